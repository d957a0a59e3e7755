"""The papers' figures and tables at a size that fits: one file each."""
