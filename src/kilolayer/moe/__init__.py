"""Feed-forward networks of many experts, of which each token uses few."""
