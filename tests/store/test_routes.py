import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from asynccomm.store import routes
from asynccomm.store.routes import (
    InterfaceAddress,
    address_towards,
    addresses_of,
    interface_addresses,
    interface_of,
    is_reachable,
    network_id,
    reachable_addresses,
)
from tests.cases import cases


def test_loopback_is_among_the_addresses_and_other_hosts_do_not_reach_it() -> None:
    assert InterfaceAddress("lo", "127.0.0.1") in interface_addresses()
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == ""
    assert "lo" not in {each.interface for each in reachable_addresses()}


def test_an_interface_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(getifaddrs=lambda _: -1))
    with pytest.raises(OSError, match="getifaddrs"):
        interface_addresses()


@cases(
    "address, reachable",
    [
        ("10.0.0.1", True),
        ("169.254.3.4", True),
        ("fd00::1", True),
        ("127.0.1.1", False),
        ("::1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("", False),
        ("node1", False),
    ],
)
def test_the_addresses_that_other_hosts_may_reach(address: str, reachable: bool) -> None:
    assert is_reachable(address) is reachable


@cases("host, address", [("127.0.0.1", "127.0.0.1"), ("no such host.", None)])
def test_the_address_towards_a_host(host: str, address: str | None) -> None:
    assert address_towards(host, 9) == address


def test_the_addresses_of_a_name() -> None:
    assert addresses_of("127.0.0.3") == ["127.0.0.3"]
    assert addresses_of("no such host.") == []


def test_the_network_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert network_id() == f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    routes._boot_id.cache_clear()
    monkeypatch.setattr(routes, "Path", lambda _: Path("/no such file"))
    assert network_id() == socket.gethostname()
