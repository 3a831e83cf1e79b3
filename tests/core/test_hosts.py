"""The name of the host, which tests may change, and the names of loopback addresses."""

import socket

import pytest

from asynccomm.core.hosts import PRETENDED, host_name, loopback_address, pretends


def test_the_host_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRETENDED, raising=False)
    assert host_name() == socket.gethostname()
    assert not pretends()


def test_a_process_may_pretend_to_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRETENDED, "elsewhere")
    assert host_name() == "elsewhere"
    assert pretends()


def test_loopback_addresses_in_any_spelling() -> None:
    for host in ("localhost", "LOCALHOST", "127.0.0.1", "127.1", "::ffff:127.0.0.1"):
        assert loopback_address(host) == "127.0.0.1", host
    assert loopback_address("127.0.0.2") == "127.0.0.2"
    assert loopback_address("0:0:0:0:0:0:0:1") == "::1"
    for host in ("127.example.com", "node0", "10.0.0.1", "::", "0.0.0.0", "a" * 70, "a..b", ""):
        assert loopback_address(host) == "", host
