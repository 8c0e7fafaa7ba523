"""Fuzzers: programs that feed damaged input to whatever reads files and messages of others.

Each is a module with a `check` of one input, run as `python -m tests.fuzz.NAME --seconds N`. In `corpus` are
the inputs that they begin with, those of earlier findings included.
"""
