"""What a run looks like: plots, and one HTML page that holds them."""
