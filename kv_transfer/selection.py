"""Pure: which backend reads from a peer."""

from collections.abc import Mapping, Sequence


def choose_backend(preference: Sequence[str], offers: Mapping[str, bytes]) -> str | None:
    """The first of our own backends, most preferred first, that the peer offers too."""
    return next((name for name in preference if name in offers), None)
