"""The decode phase's own decisions: reserving blocks, asking for KV, reading it, joining."""
