"""The way from logits to tokens. A choice depends on what the request asks, the logits, the seed, the index
and the sequence's own tokens, and on nothing else."""
