"""Models for Transformers and CTranslate2, and from there."""
