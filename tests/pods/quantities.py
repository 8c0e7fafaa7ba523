"""Kubernetes' numbers with units. Pure."""

import re

UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: str | int | float) -> float:
    """Kubernetes' quantities, such as 512Mi or 500m."""
    found = re.fullmatch(r"([0-9.]+)(m|k|[MG]|[KMGT]i|)", str(text))
    assert found, f"not a quantity: {text}"
    return float(found[1]) * UNITS[found[2]]
