"""Synthetic traces that resemble a production trace, made from a few fitted numbers. They contain none of its
requests."""
