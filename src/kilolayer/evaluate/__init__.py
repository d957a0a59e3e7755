"""How good the translations are: scores with their signatures, significance, and where the errors lie."""
