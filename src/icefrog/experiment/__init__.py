"""Experiments: policies x traces x loads x seeds, run once each, compared in pairs, with confidence intervals."""
