"""Runs a rendered chart's pods on podman, deletes them one after the other under load, and says what broke.

It stands in for scheduler, KubeRay, kubelet and the network, and takes from the manifests what they say of
containers: security contexts, limits, volumes, probes, hooks, grace periods and NetworkPolicies. See
`python -m tests.pods --help` and docs/contributing.md.
"""
