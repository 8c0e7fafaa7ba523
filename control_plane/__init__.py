"""Which workers exist and in which role: directory, leases, reconciliation, Ray."""
