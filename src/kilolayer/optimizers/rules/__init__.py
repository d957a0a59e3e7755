"""The built-in optimizers: NAME.py holds the one that `train.optimizer = "NAME"` chooses."""
