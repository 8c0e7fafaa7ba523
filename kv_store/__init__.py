"""The tiered KV store: memory and SSD files of a host, shared by its workers, read by other hosts."""
