"""From text files to batches: text, corpora, tokenizer, filters, token files, shapes, mixing, batches."""
