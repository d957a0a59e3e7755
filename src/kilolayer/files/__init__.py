"""File access: all files that come from a run, a cache or elsewhere are read here, and all files are written here."""
