"""Blocks in files: what was not written whole is never served."""
