"""Weights in fewer bits: made at load, and read from checkpoints that have them."""
