"""Experts over many nodes, in the fleet simulator: published layouts, and the loss of a node."""
