"""Where blocks are, by node and tier, over all hosts."""
