"""The address between hosts; on hosts of their own in tests/many_hosts."""

import re
import socket
from collections.abc import Mapping

import pytest

from asynccomm.backends import addresses
from asynccomm.backends.addresses import (
    LocalAddress,
    advice,
    automatic_address,
    choose_address,
    several_networks,
)
from asynccomm.backends.base import RankInfo
from asynccomm.errors import BackendError
from asynccomm.store.routes import InterfaceAddress

HERE = [
    InterfaceAddress("lo", "127.0.0.1"),
    InterfaceAddress("eth0", "fe80::5"),
    InterfaceAddress("eth0", "10.0.0.5"),
    InterfaceAddress("eth1", "10.1.0.5"),
]
ONE, TWO = RankInfo(0, "one", 1, "net 1"), RankInfo(1, "two", 1, "net 2", "10.0.0.9")


@pytest.fixture(autouse=True)
def this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two networks, no way anywhere, and no name service."""
    monkeypatch.setattr(addresses, "interface_addresses", lambda: HERE)
    monkeypatch.setattr(addresses, "reachable_addresses", lambda: HERE[2:])
    monkeypatch.setattr(addresses, "interface_of", lambda address: next(i for i, a in HERE if a == address))
    monkeypatch.setattr(addresses, "address_towards", lambda host, port: None)
    monkeypatch.setattr(addresses, "addresses_of", lambda name: [name] if name[0].isdigit() else [])
    monkeypatch.setattr(socket, "gethostname", lambda: "one")


@pytest.mark.parametrize(
    ("hints", "environ", "address", "reason"),
    [
        ({"hostname": "10.1.0.5"}, {"GLOO_SOCKET_IFNAME": "eth0"}, "10.1.0.5", "hint 'hostname'='10.1.0.5' names it"),
        ({"interface": "eth1"}, {"GLOO_SOCKET_IFNAME": "eth0"}, "10.1.0.5", "hint 'interface'='eth1' names it"),
        ({}, {"GLOO_SOCKET_IFNAME": "eth0"}, "10.0.0.5", "GLOO_SOCKET_IFNAME='eth0' names it"),
        ({}, {"GLOO_SOCKET_IFNAME": "ib0, eth1"}, "10.1.0.5", "GLOO_SOCKET_IFNAME='ib0, eth1' names it"),
    ],
)
def test_hints_win_over_the_environment(
    hints: Mapping[str, str], environ: Mapping[str, str], address: str, reason: str
) -> None:
    assert choose_address(hints, environ, 0, [ONE, TWO]) == LocalAddress(address, reason)


@pytest.mark.parametrize(
    ("hints", "environ", "message"),
    [
        (
            {"hostname": "10.9.9.9"},
            {},
            "hint 'hostname'='10.9.9.9' resolves to 10.9.9.9, which no interface has on",
        ),
        ({"hostname": "node9"}, {}, "hint 'hostname'='node9' does not resolve on host 'one'"),
        ({"interface": "ib0"}, {}, "hint 'interface'='ib0' names no interface of host 'one' that is up and has an"),
        ({}, {"GLOO_SOCKET_IFNAME": "ib0"}, "GLOO_SOCKET_IFNAME='ib0' names no interface of host 'one'"),
        ({"interface": "lo"}, {}, "host 'one' would use 127.0.0.1 (lo), because hint 'interface'='lo' names it; other"),
        ({}, {}, "host 'one' has no way to the other hosts of the comm"),
    ],
)
def test_an_error_names_the_source_and_what_to_set(
    hints: Mapping[str, str], environ: Mapping[str, str], message: str
) -> None:
    with pytest.raises(BackendError, match=re.escape(message)) as caught:
        choose_address(hints, environ, 0, [ONE, TWO])
    to_set = "set GLOO_SOCKET_IFNAME, or hints={'interface': ...}, to one of eth0 (10.0.0.5), eth1 (10.1.0.5)"
    assert str(caught.value).endswith(to_set)


def test_a_host_without_any_address_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "reachable_addresses", list)
    assert advice() == "no interface of this host has an address that other hosts could reach"


def test_loopback_serves_where_all_ranks_are_in_one_network() -> None:
    beside = RankInfo(1, "one", 2, "net 1")
    pretended = RankInfo(1, "two", 2, "net 1")
    assert automatic_address(0, [ONE, beside]) == LocalAddress("127.0.0.1", "all ranks are on one host")
    assert automatic_address(0, [ONE, pretended]) == LocalAddress("127.0.0.1", "all ranks are on one machine")
    assert not several_networks([ONE, pretended])
    assert several_networks([ONE, TWO])


def test_the_way_to_the_store_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: dict[str, str] = {"192.0.2.1": "10.1.0.5"}
    monkeypatch.setattr(addresses, "address_towards", lambda host, port: ways.get(host))
    assert automatic_address(1, [ONE, TWO]) == LocalAddress("10.0.0.9", "it leads to the store")
    assert automatic_address(0, [ONE, TWO]) == LocalAddress("10.1.0.5", "it is on the default route")
    monkeypatch.setattr(addresses, "addresses_of", lambda name: ["127.0.1.1", "10.7.7.7", "10.0.0.5"])
    assert automatic_address(0, [ONE, TWO]) == LocalAddress("10.0.0.5", "the host's name resolves to it")
    ways["10.0.0.9"] = "10.0.0.5"
    assert automatic_address(0, [ONE, TWO]) == LocalAddress("10.0.0.5", "it leads to host 'two'")


def test_an_address_is_shown_with_its_interface() -> None:
    assert str(LocalAddress("10.1.0.5", "of a test")) == "10.1.0.5 (eth1)"
