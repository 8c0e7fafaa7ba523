"""The tiered KV store (host memory, SSD) is not built yet; nothing imports this package."""
