"""Faster forms of a model that share its parameters, for training and for decoding, and estimates of memory and FLOPs."""
