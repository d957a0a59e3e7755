"""Apply a recipe to a model of torch or of Hugging Face's Transformers, and convert it back to a plain model."""
