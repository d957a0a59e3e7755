"""From a model to text: greedy, beam search and sampling, and the translation of lines."""
