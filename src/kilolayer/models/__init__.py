"""The three shapes: encoder, decoder, encoder-decoder."""
