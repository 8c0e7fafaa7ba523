"""The control plane decides which workers exist and in which role: directory, leases, reconciliation, Ray."""
