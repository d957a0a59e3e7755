"""Comparisons: the same task under every combination of options, with a run for each, a table and an HTML page."""
