"""Convert Kilolayer models to and from Hugging Face's classes, one file per class, without importing Transformers."""
