"""The three model shapes: encoder, decoder and encoder-decoder; their configuration, initialization and file format."""
