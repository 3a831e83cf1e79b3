"""Where a rank listens, and what that is called."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from asynccomm.control.transport.sockets import (
    MAX_NAME,
    ListeningSockets,
    local_socket,
    peer_user,
    run_name,
    tcp_socket,
)
from tests.control.unauthenticated import descriptors, names


def test_doors_that_nobody_takes_are_closed() -> None:
    held = descriptors()
    doors = ListeningSockets(3, "some/run with ünusual characters and a name that is much too long")
    doors.open_tcp("127.0.0.1", "node#2")
    assert doors.contact.port > 0
    assert (doors.contact.host, doors.contact.address) == ("node#2", "127.0.0.1")
    (name,) = names()
    assert name.startswith("@asynccomm/some-run")
    assert len(name) < 108
    doors.close()
    assert descriptors() <= held


def test_what_is_taken_is_not_closed() -> None:
    doors = ListeningSockets(0, "run")
    (sock,) = doors.take()
    doors.close()
    assert sock.fileno() >= 0
    sock.close()
    assert doors.take() == []


@pytest.mark.parametrize(
    ("run", "name"),
    [("train", "train"), ("a/b", "a-b"), ("ü", "?"), ("a\nb\0c", "a?b?c"), ("", ""), ("x" * 99, "x" * MAX_NAME)],
)
def test_names_of_runs(run: str, name: str) -> None:
    assert run_name(run) == name


def test_a_name_that_is_taken() -> None:
    held = descriptors()
    sock = local_socket(f"asynccomm/test/{os.getpid()}")
    assert sock is not None
    with sock, pytest.raises(OSError, match="in use"):
        local_socket(f"asynccomm/test/{os.getpid()}")
    assert descriptors() <= held


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_tcp(address: str) -> None:
    if address == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this system has no IPv6")
    with tcp_socket(address) as sock:
        assert sock.getsockname()[:1] == (address,)


def test_an_address_that_is_not_ours() -> None:
    held = descriptors()
    with pytest.raises(OSError, match="assign"):
        tcp_socket("192.0.2.1")
    assert descriptors() <= held


def test_the_user_of_a_peer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_user(ours) == peer_user(theirs) == os.geteuid()
