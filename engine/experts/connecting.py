"""Connections of processes of workers to expert ranks, as long as a model is being loaded."""

import contextlib
from collections.abc import Generator

from baton.wire.experts import CallerStream
from engine.experts.access import ExpertAccess
from engine.experts.following import ExpertConnection


@contextlib.contextmanager
def connection_to(access: ExpertAccess | None) -> Generator[ExpertConnection | None]:
    """A connection that is closed if what follows raises, and else belongs to whoever was given it; it waits
    until all experts can be reached. None: the process holds its experts. Raises SetupError."""
    if access is None:
        yield None
        return
    connection = ExpertConnection(access, CallerStream)
    try:
        yield connection
        connection.wait_ready()
    except BaseException:
        connection.close()
        raise
