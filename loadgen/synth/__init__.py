"""Traces that look like a production trace, made from a few numbers fitted to it: no request of it is in
them."""
