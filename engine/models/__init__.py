"""Forward passes: the decoder of our own, and a wrapper around models of transformers."""
