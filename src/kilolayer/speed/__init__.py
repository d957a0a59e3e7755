"""Running the same arithmetic faster."""
