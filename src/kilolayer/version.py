"""The version, in a file of its own: what writes it down imports nothing else of the package."""

__version__ = "0.1.0"
