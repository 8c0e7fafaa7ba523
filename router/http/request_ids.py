"""Identifiers of requests whose clients sent none."""

from random import Random, SystemRandom

_ids = Random(SystemRandom().getrandbits(256))


def new_id() -> str:
    """Return 128 random bits in hexadecimal: unique, and no secret.

    The generator is seeded by the kernel once. Asking the kernel for each id would cost a twentieth of what a
    router does for a whole request.
    """
    return f"{_ids.getrandbits(128):032x}"
