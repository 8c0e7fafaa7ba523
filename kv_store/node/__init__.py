"""The store node's decisions, pure: `core.NodeCore` over index, spaces, tiers and fetches."""
