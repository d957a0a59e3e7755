"""Models of ours as models of Hugging Face's Transformers, and back: one file a class of theirs, none of which imports it."""
