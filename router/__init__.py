"""The router: the public API, admission, placement, and the life of every request."""
