"""Executors: what carries out the commands. ``base`` says what one is."""
