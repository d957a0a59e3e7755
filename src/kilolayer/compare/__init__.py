"""Comparisons: the same task under every combination of options, as runs side by side, a table and a page."""
