"""Predictions from a Profile: step time, memory, utilisation, the worth of a frozen sample; and how they are fitted."""
