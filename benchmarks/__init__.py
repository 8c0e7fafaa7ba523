"""`baton bench` measures parts of Baton against their limits, as ratios within one run."""
