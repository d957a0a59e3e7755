"""Mixture of experts: feed-forward networks of which each token uses only a few."""
