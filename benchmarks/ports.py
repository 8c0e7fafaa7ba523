"""Ports for the servers that benchmarks start."""

import random
import socket

FIRST, LAST = 20_000, 30_000
"""Ports below those that Linux gives to connections. A connection of another process would otherwise take one
between its choice and the start of its server, or between two starts."""


def free_port() -> int:
    """Return a port where nobody listens. Raises OSError if none is found."""
    for _ in range(1000):
        port = random.SystemRandom().randrange(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"no port from {FIRST} to {LAST} is free")
