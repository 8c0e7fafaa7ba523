"""Ranks of one worker: their shape, the collectives between them, and the plans that the leader sends.

Nothing here knows models.
"""
