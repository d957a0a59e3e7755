"""Forms of a built model that run its own parameters faster: for training, and for decoding."""
