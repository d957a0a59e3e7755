"""The path from text files to batches: corpora, vocabularies, filters, token files, batch shapes and sampling."""
