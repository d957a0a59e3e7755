"""Generation: greedy decoding, beam search and sampling; translating lines, continuing texts and filling masks."""
