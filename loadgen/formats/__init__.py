"""Readers of trace files: a module per format, over `base` (what a trace is) and `lines` (how it is read)."""
