"""Evaluation: scores with their signatures, significance tests, error analysis, likelihoods and question answering."""
