"""Builders and the contract suites that every policy and executor must pass. Needs pytest and hypothesis."""
