"""Export a trained run to a folder for other software."""
