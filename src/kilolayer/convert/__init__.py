"""What a trained model becomes elsewhere."""
