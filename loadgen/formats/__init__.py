"""Readers of trace files: one module per format, on top of `base` (what a trace is) and `lines` (how a file
is read)."""
