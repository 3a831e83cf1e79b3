"""Where a rank listens, and what that is called."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

import pytest

from asynccomm.control.transport import sockets as module
from asynccomm.control.transport.sockets import (
    MAX_NAME,
    ListeningSockets,
    derived_port,
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


def test_a_port_that_is_in_use_is_replaced() -> None:
    with tcp_socket("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with tcp_socket("127.0.0.1", port) as other:
            assert other.getsockname()[1] not in (0, port)


def test_a_free_port_can_be_chosen() -> None:
    for _ in range(20):  # another process may take the port first
        with tcp_socket("127.0.0.1") as sock:
            port = sock.getsockname()[1]
        with tcp_socket("127.0.0.1", port) as sock:
            if sock.getsockname()[1] == port:
                return
    pytest.fail("no port was free")


def test_ports_follow_from_job_and_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ports, reserved = tmp_path / "ports", tmp_path / "reserved"
    monkeypatch.setattr(module, "_PORTS", ports)
    monkeypatch.setattr(module, "_RESERVED", reserved)
    assert derived_port("job", 0) == 0  # the system does not say which ports there are
    ports.write_text("32768\t32867\n")
    reserved.write_text("\n")
    found = [derived_port("job", rank) for rank in range(200)]
    assert sorted(found[:100]) == list(range(32768, 32868))
    assert found[100:] == found[:100]
    assert sum(later - port != 1 for port, later in itertools.pairwise(found)) <= 2
    assert derived_port("another job", 0) != found[0]
    reserved.write_text("32800-32810\n")
    assert derived_port("job", 0) == 0


def test_a_local_name_that_another_process_has_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_numbers", iter([1, 1, 2]))
    doors = [ListeningSockets(5, "run") for _ in range(3)]
    ends = [each.contact.local.rpartition("/")[2] for each in doors]
    for each in doors:
        each.close()
    assert (ends[0], ends[2]) == ("1", "2")
    assert len(ends[1]) == 16


def test_an_address_that_is_not_ours() -> None:
    held = descriptors()
    with pytest.raises(OSError, match="assign"):
        tcp_socket("192.0.2.1")
    assert descriptors() <= held


def test_the_user_of_a_peer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_user(ours) == peer_user(theirs) == os.geteuid()
