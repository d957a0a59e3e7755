"""Reproductions of the papers' figures and tables at a small scale: one file each."""
