"""`baton bench`: parts of Baton against their limits, as ratios measured in one run."""
