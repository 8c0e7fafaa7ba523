"""Placement policies: pure objects that decide on a frozen snapshot where a sequence runs."""
