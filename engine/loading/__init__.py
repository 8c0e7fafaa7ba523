"""Weights on their way from files to the device: checkpoints, GGUF, adapters, rounding."""
