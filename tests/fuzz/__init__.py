"""Fuzzers. Each runs by `python -m tests.fuzz.NAME --seconds N`; see docs/contributing.md."""
