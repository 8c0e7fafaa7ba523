"""From logits to tokens: what a request may ask of its choice, and nothing but logits, seed, index and
the sequence's own tokens decides."""
