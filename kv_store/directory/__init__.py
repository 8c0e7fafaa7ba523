"""Who holds which block in which tier, over all hosts."""
