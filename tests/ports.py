"""Ports for processes that tests start."""

import random
import socket

FIRST, LAST = 20_000, 32_000
"""Ports below Linux's ephemeral ports. Nobody who asks for any port is given one of these, so it is still
free when the process that gets it comes to listen."""

_random = random.SystemRandom()
"""Test processes that run beside each other must not draw the same ports."""


def free_port(*, twin=0):
    """`twin`: the port this far above it is free, too."""
    for _ in range(1000):
        port = _random.randint(FIRST, LAST - twin)
        if _is_free(port) and (not twin or _is_free(port + twin)):
            return port
    raise OSError(f"no port between {FIRST} and {LAST} is free")


def _is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
