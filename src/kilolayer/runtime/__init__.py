"""How a model's work is run: the one seam between what is computed and how fast, with its plain implementation."""
