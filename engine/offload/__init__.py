"""Weights that do not fit: layers that are in memory only while they compute (`model.offload`)."""
