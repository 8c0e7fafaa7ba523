"""The store node's process, and how workers reach it."""
