"""Where a rank listens, and what that is called."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asynccomm.control.transport import sockets as module
from asynccomm.control.transport.sockets import (
    MAX_NAME,
    ListeningSockets,
    connect_in_turn,
    derived_port,
    local_socket,
    peer_user,
    run_name,
    tcp_socket,
)
from tests.control.unauthenticated import descriptors, names
from tests.waiting import until


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


# -- a full backlog ---------------------------------------------------------------------------------------------------


@pytest.fixture
def full() -> Iterator[tuple[socket.socket, str]]:
    """A listening socket whose backlog is full, and its address."""
    address = f"\0asynccomm-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(address)
            yield listener, address


class Counting(socket.socket):
    """A local socket that counts its attempts to connect, and those of its duplicates."""

    def __init__(self, *arguments: Any, attempts: list[object] | None = None) -> None:
        super().__init__(*arguments)
        self.attempts: list[object] = [] if attempts is None else attempts

    def dup(self) -> Counting:
        return Counting(self.family, self.type, self.proto, os.dup(self.fileno()), attempts=self.attempts)

    def connect(self, address: object) -> None:
        self.attempts.append(address)
        super().connect(address)  # type: ignore[arg-type]


async def test_a_full_backlog_is_waited_for(full: tuple[socket.socket, str]) -> None:
    listener, address = full
    with Counting(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        done = asyncio.ensure_future(connect_in_turn(sock, address))
        await until(lambda: len(sock.attempts) > 2)
        assert not done.done()
        listener.accept()[0].close()
        await asyncio.wait_for(done, 20)
        with listener.accept()[0] as accepted:
            accepted.send(b"x")
            assert sock.recv(1) == b"x"
            assert not sock.getblocking()
            with pytest.raises(BlockingIOError):
                sock.recv(1)
        assert not any(sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16))


async def test_a_wait_for_a_backlog_ends_with_the_listener(full: tuple[socket.socket, str]) -> None:
    listener, address = full
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        done = asyncio.ensure_future(connect_in_turn(sock, address))
        await asyncio.sleep(0)
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.wait_for(done, 20)


async def test_a_cancelled_wait_for_a_backlog_leaves_no_thread_in_it(
    full: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, address = full
    ended = threading.Event()
    real = module.anyio.to_thread.run_sync

    async def run_sync(function: Callable[[], None], **options: Any) -> None:
        def run() -> None:
            try:
                function()
            finally:
                ended.set()

        await real(run, **options)

    monkeypatch.setattr(module.anyio.to_thread, "run_sync", run_sync)
    with Counting(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        done = asyncio.ensure_future(connect_in_turn(sock, address))
        await until(lambda: len(sock.attempts) > 1)
        done.cancel()
        with pytest.raises(asyncio.CancelledError):
            await done
    await until(ended.is_set)
    listener.accept()[0].close()
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):  # it has not connected since
        listener.accept()


async def test_a_wait_for_a_backlog_that_is_cancelled_at_once_leaves_no_descriptor(
    full: tuple[socket.socket, str],
) -> None:
    held = descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        task = asyncio.ensure_future(connect_in_turn(sock, full[1]))
        asyncio.get_running_loop().call_soon(task.cancel)  # behind its first step
        with pytest.raises(asyncio.CancelledError):
            await task
    assert descriptors() <= held


async def test_waits_for_a_backlog_leave_threads_to_others(full: tuple[socket.socket, str]) -> None:
    listener, address = full
    socks = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(50)]  # more than AnyIO's usual limit
    waiting = [asyncio.ensure_future(connect_in_turn(sock, address)) for sock in socks]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(module.anyio.to_thread.run_sync(lambda: 7), 20) == 7
    listener.close()
    assert all(isinstance(error, OSError) for error in await asyncio.gather(*waiting, return_exceptions=True))
    for sock in socks:
        sock.close()
