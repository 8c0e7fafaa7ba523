"""Settings for unit tests."""

from collections.abc import Iterator

import pytest

from engine.execution import team
from tests.forked import forked_follower


@pytest.fixture(scope="session", autouse=True)
def followers_are_forked() -> Iterator[None]:
    """See `tests.forked`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(team, "launch_follower", forked_follower)
        yield
