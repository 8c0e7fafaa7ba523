"""Ranks of one worker: what they say to each other while they compute a step."""
