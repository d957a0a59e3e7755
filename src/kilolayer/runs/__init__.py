"""Whole runs: training from a configuration to a scored folder, and trained runs as Python objects."""
