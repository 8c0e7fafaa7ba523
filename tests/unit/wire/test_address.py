"""Nobody is ever told to connect to 0.0.0.0."""

import pytest

from baton.core.errors import SetupError
from baton.wire import address
from baton.wire.address import host_port, reachable_host, split_address


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "node-7.cluster", "::1"])
def test_a_definite_host_is_itself(host):
    assert reachable_host(host, towards="10.9.9.9:1") == host


def test_all_interfaces_become_the_one_that_leads_to_the_peer():
    assert reachable_host("0.0.0.0", towards="127.0.0.1:5000") == "127.0.0.1"


def test_no_way_out_is_for_the_operator_to_change(monkeypatch):
    class Isolated(address.socket.socket):
        def connect(self, _):
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(address.socket, "socket", Isolated)
    with pytest.raises(SetupError, match="name the address"):
        reachable_host("0.0.0.0")


def test_an_ipv6_address_is_told_from_its_port():
    assert host_port("::1", 80) == "[::1]:80"
    assert host_port("a", 80) == "a:80"


@pytest.mark.parametrize("host", ["::1", "a", "10.1.2.3"])
def test_what_was_joined_is_split_again(host):
    assert split_address(host_port(host, 80)) == (host, 80)


@pytest.mark.parametrize("text", ["", "a", "a:", "a:b"])
def test_an_address_without_a_port_is_none(text):
    with pytest.raises(ValueError, match="invalid literal"):
        split_address(text)
