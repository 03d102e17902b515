"""Adapters for training frameworks; each module needs its framework, and none is imported from elsewhere in icefrog."""
