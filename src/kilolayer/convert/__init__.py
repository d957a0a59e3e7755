"""Conversions of models: to plain Post-LN, to and from Hugging Face's classes, and recipes for models of other libraries."""
