"""Other routers of the same cluster. Each counts what the others have in flight."""
