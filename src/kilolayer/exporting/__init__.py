"""A trained run as a folder for other software."""
