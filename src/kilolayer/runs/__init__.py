"""Runs as a whole: trained from a configuration to a scored folder, by the command and from Python alike."""
