"""Eviction policies against each other and against the optimum, with two that only serve for comparison."""
