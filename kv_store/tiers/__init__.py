"""Eviction policies, pure: which blocks stay in a tier and which earn the next one."""
