"""The store node's decisions, pure: `core.NodeCore` over index, size classes, tiers and fetches."""
