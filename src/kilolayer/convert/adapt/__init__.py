"""A recipe for a model of torch or of Hugging Face's Transformers, and the way back to a plain model."""
