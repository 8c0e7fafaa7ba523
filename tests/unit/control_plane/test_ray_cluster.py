"""Joining a Ray that somebody else started."""

import socket

import pytest

from baton.core.errors import SetupError
from control_plane import ray_cluster
from control_plane.ray_cluster import RayCluster


@pytest.fixture
def nobody(monkeypatch):
    """An address where nobody listens."""
    monkeypatch.setattr(ray_cluster, "REACH_S", ray_cluster.REACH_AGAIN_S)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def test_an_address_where_nobody_answers_is_told_without_ray(nobody):
    home = RayCluster(nobody)
    with pytest.raises(
        SetupError, match=rf"no Ray answers at {nobody} \(.*\): start one .*`ray start --head`"
    ):
        await home.open()
    await home.close()


@pytest.mark.parametrize("address", ["no.such.host.invalid:6379", "127.0.0.1:99999", "[::1]:1"])
async def test_addresses_that_cannot_be_reached(address, monkeypatch):
    monkeypatch.setattr(ray_cluster, "REACH_S", ray_cluster.REACH_AGAIN_S)
    with pytest.raises(SetupError, match="no Ray answers at"):
        await RayCluster(address).open()
