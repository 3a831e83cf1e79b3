"""Strangers at the socket of the bootstrap, a host and a store that lie, and crowds.

Rank 0 must let every rank in, keep nothing of anybody else, and complain twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import resource
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import uvloop

from asynccomm import BackendError, MemoryStore, PeerLostError
from asynccomm.backends.base import UnsuitableError
from asynccomm.backends.shm import handshake
from asynccomm.backends.shm.bootstrap import PeerMapping
from asynccomm.backends.shm.fd_socket import MESSAGE_BYTES
from asynccomm.control.transport import admission
from tests.security.mutations import little_memory, mutated
from tests.waiting import until

from .segment_world import SETTINGS, World, check_mappings


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "asynccomm")
    return lambda: [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]


def close_all(mappings: Sequence[object]) -> None:
    assert all(isinstance(mapping, PeerMapping) for mapping in mappings), mappings
    for mapping in mappings:
        assert isinstance(mapping, PeerMapping)
        mapping.segment.words[0] = 1
        mapping.close()


async def all_come(world: World, zero: Awaitable[PeerMapping]) -> None:
    async with asyncio.timeout(20):
        close_all(await asyncio.gather(zero, *(world.rank(rank) for rank in range(1, world.size))))


def heard(sock: socket.socket) -> tuple[bytes, bool]:
    """What was said on this connection, and whether it has ended."""
    sock.setblocking(False)
    said = b""
    for _ in range(3):  # a reset is told once, and before what was said
        try:
            while data := sock.recv(100):
                said += data
        except BlockingIOError:
            return said, False
        except ConnectionResetError:
            continue
        return said, True
    return said, True


# -- what strangers say -----------------------------------------------------------------------------------------------


def pipes(count: int) -> list[tuple[int, int]]:
    return [os.pipe() for _ in range(count)]


async def test_descriptors_of_strangers_are_closed(
    world_of: Callable[[int], World], warnings_of: Callable[[], list[str]]
) -> None:
    """Nobody else has the pipes' other ends: that they end shows that rank 0 has not kept them."""
    world = world_of(2)
    zero = asyncio.ensure_future(world.rank(0))
    address = await world.address()
    wrong = handshake.HELLO.pack(b"x" * 16, 1)
    given, strangers = [], []
    for data in (
        b"x",
        wrong,
        world.hello(address, 0),
        world.hello(address, 2),
        world.hello(address, 1),
        b"",
        b"x" * 5000,
    ):
        for count in (1, 2, 4, 100, 253):
            ends = pipes(1)
            sock = world.stranger(address)
            socket.send_fds(sock, [data], [ends[0][1]] * count)
            os.close(ends[0][1])
            given.append(ends[0][0])
            strangers.append(sock)
    ended = [asyncio.get_running_loop().run_in_executor(None, os.read, fd, 1) for fd in given]
    async with asyncio.timeout(20):
        assert set(await asyncio.gather(*ended)) == {b""}
    for sock in strangers:
        assert heard(sock) in ((b"", True), (handshake.REFUSED, True))
        sock.close()
    for fd in given:
        os.close(fd)
    # with the right token and too many descriptors for a message, it may be a rank that ran into a limit
    with contextlib.suppress(BackendError):
        await all_come(world, zero)
    await asyncio.gather(zero, return_exceptions=True)
    first, warning = warnings_of()
    assert "rank 0 of comm 'test' refused a connection: " in first
    assert "refused 35 connections: " in warning


@pytest.mark.parametrize("seed", range(10))
async def test_hellos_that_are_almost_right(world_of: Callable[[int], World], seed: int) -> None:
    choose = random.Random(seed)
    world = world_of(3)
    zero = asyncio.ensure_future(world.rank(0))
    address = await world.address()
    null = os.open(os.devnull, os.O_RDONLY)
    for _ in range(30):
        hello = world.hello(address, choose.choice([0, 1, 2, 3, 2**32 - 1]))
        data = mutated(hello, choose)
        if data[:16] == hello[:16] and len(data) == len(hello):
            continue  # that would be a rank
        with world.stranger(address) as sock:
            socket.send_fds(sock, [data], [null] * choose.randrange(5))
            if choose.random() < 0.5:
                await asyncio.sleep(0)
    os.close(null)
    await all_come(world, zero)


async def test_an_oversized_message_is_no_hello(world_of: Callable[[int], World]) -> None:
    world = world_of(2)
    zero = asyncio.ensure_future(world.rank(0))
    address = await world.address()
    with world.stranger(address) as sock:
        sock.send(world.hello(address, 1) + b"\0" * 100_000)
        await until(lambda: heard(sock) == (b"", True) or select.select([sock], [], [], 0)[0])
    with world.stranger(address) as sock:
        sock.send(b"\0" * (MESSAGE_BYTES + 1))
    await all_come(world, zero)


async def test_a_rank_cannot_be_taken_twice(world_of: Callable[[int], World], connected: asyncio.Event) -> None:
    world = world_of(3)
    tasks = [asyncio.ensure_future(world.rank(rank)) for rank in (0, 1)]
    address = await world.address()
    await connected.wait()
    with world.stranger(address) as sock:
        socket.send_fds(sock, [world.hello(address, 1)], [*world.bells[0], world.bells[1][0]])
        await until(lambda: select.select([sock], [], [], 0)[0])
        assert heard(sock) == (handshake.REFUSED, True)
    tasks.append(asyncio.ensure_future(world.rank(2)))
    check_mappings(await asyncio.gather(*tasks), world.bells)


# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_who_says_nothing_is_dropped_after_some_time(
    world_of: Callable[[int], World],
    monkeypatch: pytest.MonkeyPatch,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    warnings_of: Callable[[], list[str]],
) -> None:
    async def main() -> None:
        world = world_of(2)
        zero = asyncio.ensure_future(world.rank(0))
        address = await world.address()
        strangers = [world.stranger(address) for _ in range(5)]
        await until(lambda: all(heard(sock)[1] for sock in strangers))
        for sock in strangers:
            sock.close()
        await all_come(world, zero)
        assert warnings_of()[1:] == ["rank 0 of comm 'test' refused 5 connections: 5 without a hello in time"]

    monkeypatch.setattr(admission, "HELLO_SECONDS", 0.05)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def test_a_rank_that_has_spoken_has_all_the_time(
    world_of: Callable[[int], World], connected: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "HELLO_SECONDS", 0.02)
    world = world_of(3)
    two = [asyncio.ensure_future(world.rank(rank)) for rank in (0, 1)]
    await connected.wait()
    with world.stranger(await world.address()) as late:
        await until(lambda: heard(late)[1])
    close_all(await asyncio.gather(*two, world.rank(2)))


async def test_who_was_dropped_for_its_silence_comes_again(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be stopped just between connecting and saying who it is."""
    world = world_of(2)
    send, tries = handshake.FdSocket.send, 0

    async def slow(self: handshake.FdSocket, data: bytes, fds: Sequence[int] = ()) -> None:
        nonlocal tries
        if len(data) == handshake.HELLO.size:
            tries += 1
            if tries < 3:
                await asyncio.sleep(0.1)
        await send(self, data, fds)

    monkeypatch.setattr(admission, "HELLO_SECONDS", 0.01)
    monkeypatch.setattr(handshake.FdSocket, "send", slow)
    await all_come(world, asyncio.ensure_future(world.rank(0)))
    assert tries == 3


# -- crowds -----------------------------------------------------------------------------------------------------------


async def test_a_thousand_strangers_that_stay(
    world_of: Callable[[int], World], warnings_of: Callable[[], list[str]]
) -> None:
    world = world_of(3)
    before = len(os.listdir("/proc/self/fd"))
    zero = asyncio.ensure_future(world.rank(0))
    address = await world.address()
    strangers = []
    for _ in range(1000):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        while True:
            try:
                sock.connect(f"\0{address['name']}")
                break
            except BlockingIOError:
                await asyncio.sleep(0.001)
        strangers.append(sock)
        if len(strangers) % 100 == 0:
            await asyncio.sleep(0.001)
    most = admission.UNAUTHENTICATED + world.size
    await until(lambda: sum(heard(sock)[1] for sock in strangers) == 1000 - most)
    assert [heard(sock)[1] for sock in strangers] == [True] * (1000 - most) + [False] * most, "the oldest had to go"
    assert len(os.listdir("/proc/self/fd")) - before - 1000 < most + 20
    await all_come(world, zero)
    for sock in strangers:
        sock.close()
    _, warning = warnings_of()
    assert "refused 1000 connections: " in warning
    assert "too many at once, " in warning


async def test_a_rank_whose_hello_is_there_is_not_dropped_as_the_oldest(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop takes connections before it reads: it must look before it throws out."""
    monkeypatch.setattr(admission, "UNAUTHENTICATED", 0)
    monkeypatch.setattr(handshake, "ACCEPTS", 1000)
    world = world_of(2)
    zero = asyncio.ensure_future(world.rank(0))
    address = await world.address()
    one = asyncio.ensure_future(world.rank(1))
    tries = 0
    connect = handshake.PeerSide._connect_once

    async def counted(self: Any, rank: int, there: Any) -> bool:
        nonlocal tries
        tries += 1
        return await connect(self, rank, there)

    monkeypatch.setattr(handshake.PeerSide, "_connect_once", counted)
    send = handshake.FdSocket.send
    strangers: list[socket.socket] = []

    async def crowd(self: handshake.FdSocket, data: bytes, fds: Sequence[int] = ()) -> None:
        await send(self, data, fds)
        if len(data) == handshake.HELLO.size:  # right behind the rank, before the loop sees any of it
            strangers.extend(world.stranger(address) for _ in range(20))

    monkeypatch.setattr(handshake.FdSocket, "send", crowd)
    async with asyncio.timeout(20):
        close_all(await asyncio.gather(zero, one))
    assert tries == 1
    for sock in strangers:
        sock.close()


FLOOD = """
import socket, sys
kept = []
print("ready", flush=True)
while True:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect("\\0" + sys.argv[1])
    except OSError:
        sock.close()
        continue
    if len(sys.argv) > 2:
        sock.send(b"x" * 50)
    kept.append(sock)
    if len(kept) > 500:
        kept.pop(0).close()
"""


@pytest.mark.parametrize("says", [[], ["something"]], ids=["silent", "loud"])
async def test_a_flood_keeps_no_rank_out(
    world_of: Callable[[int], World], says: list[str], warnings_of: Callable[[], list[str]]
) -> None:
    world = world_of(4)
    zero = asyncio.ensure_future(world.rank(0))
    name = (await world.address())["name"]
    floods = [
        subprocess.Popen([sys.executable, "-S", "-c", FLOOD, name, *says], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for flood in floods:
            assert flood.stdout is not None
            await asyncio.get_running_loop().run_in_executor(None, flood.stdout.readline)
        async with asyncio.timeout(60):
            close_all(await asyncio.gather(zero, *(world.rank(rank) for rank in range(1, 4))))
    finally:
        for flood in floods:
            flood.kill()
            flood.communicate()
    assert 1 <= len(warnings_of()) <= 2  # the second counts the others, if there were any


async def test_strangers_that_use_up_all_descriptors_have_to_go(world_of: Callable[[int], World]) -> None:
    world = world_of(2)
    one = asyncio.ensure_future(world.rank(0))
    address = await world.address()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [world.stranger(address) for _ in range(30)]
    spare = os.dup(0)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 10, limits[1]))  # for a third of them
    try:
        while sum(heard(sock)[1] for sock in strangers) < 20:
            await asyncio.sleep(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for sock in strangers:
            sock.close()
    await all_come(world, one)


# -- a host and a store that lie --------------------------------------------------------------------------------------

RIGHT = {"problem": "", "settings": SETTINGS, "name": "nobody", "ask": "00" * 16, "answer": "11" * 16}


def addresses() -> Iterator[bytes]:
    yield from (b"", b"\xff\xfe", b"null", b"7", b"[]", b"{}", b'"x"', b"[" * 100_000, b'{"a":' * 100_000, b"1e999")
    for key in RIGHT:
        for value in (None, 7, [], {}, "x", "é", "zz" * 16, "a" * 5000, 1e400):
            yield json.dumps({**RIGHT, key: value}).encode()
        yield json.dumps({other: RIGHT[other] for other in RIGHT if other != key}).encode()
    choose = random.Random(1)
    for _ in range(200):
        yield mutated(json.dumps(RIGHT).encode(), choose)


async def test_an_address_that_is_none(world_of: Callable[[int], World]) -> None:
    """All ranks go on to another backend, as if memory could not be shared."""
    world = world_of(2)
    for address in addresses():
        world.store = MemoryStore()
        await world.store.set("address", address)
        await world.store.set("reach/0", "ok")
        async with asyncio.timeout(5):
            with pytest.raises(UnsuitableError) as caught:
                await world.rank(1)
        caught.value.__traceback__ = None


@pytest.mark.parametrize("word", [b"\xff\xfe\xfd", b"", b"\0" * 1000])
@pytest.mark.parametrize("key", ["reach/0", "reach/1", "problem"])
async def test_words_in_the_store_that_are_none(
    world_of: Callable[[int], World], key: str, word: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(2)
    monkeypatch.setattr(handshake, "peer_user", lambda sock: os.geteuid() + 1)  # so rank 1 has a problem

    class Lying(MemoryStore):  # type: ignore[misc]
        async def set(self, name: str, value: bytes | str) -> None:
            await super().set(name, word if name == key else value)

    world.store = Lying()
    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(world.rank(0), world.rank(1), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UnsuitableError] * 2
    for outcome in outcomes:
        assert isinstance(outcome, UnsuitableError)
        outcome.__traceback__ = None


class LyingHost:
    """A rank 0 that lets rank 1 in, and then says what it is told to."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0asynccomm-test-{os.getpid()}-{id(self)}")
        self.listener.listen(5)
        self.listener.setblocking(False)

    async def receive(self) -> tuple[socket.socket, asyncio.Future[PeerMapping]]:
        name = self.listener.getsockname()[1:].decode()
        await self.world.store.set("address", json.dumps({**RIGHT, "name": name}))
        one = asyncio.ensure_future(self.world.rank(1))
        await until(lambda: select.select([self.listener], [], [], 0)[0])
        sock, _ = self.listener.accept()
        await until(lambda: select.select([sock], [], [], 0)[0])
        _, fds, _, _ = socket.recv_fds(sock, 100, 10)
        for fd in fds:
            os.close(fd)
        sock.send(bytes.fromhex(str(RIGHT["answer"])))
        return sock, one

    def close(self) -> None:
        self.listener.close()


NEWS = [
    b"x",
    b"\xff",
    b"null",
    b"[]",
    b"7",
    b"[" * 4000,
    b'{"lost": "x"}',
    b'{"lost": -1}',
    b'{"lost": 2}',
    b'{"lost": null}',
    b'{"problem": 7}',
    b'{"other": 1}',
    b"{" + b" " * 5000 + b"}",
]


@pytest.mark.parametrize("count", [0, 1, 5], ids=["alone", "with a descriptor", "with too many"])
@pytest.mark.parametrize("news", [*NEWS, b"{}"], ids=range(len(NEWS) + 1))
async def test_news_that_are_none(world_of: Callable[[int], World], news: bytes, count: int) -> None:
    world = world_of(2)
    host = LyingHost(world)
    sock, one = await host.receive()
    null = os.open(os.devnull, os.O_RDONLY)
    socket.send_fds(sock, [news], [null] * count)
    if (news, count) in ((b"{}", 0), (b"{}", 1)):
        socket.send_fds(sock, [b"{}"], [null] * (4 - count))
        await until(lambda: select.select([sock], [], [], 0)[0])  # the rank reports that this is no segment
    sock.close()
    async with asyncio.timeout(20):
        with pytest.raises(UnsuitableError, match="rank 1 cannot share memory") as caught:
            await one
    caught.value.__traceback__ = None
    host.close()
    os.close(null)


async def test_a_message_that_has_lost_all_its_descriptors(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system drops those that exceed the limit of the process."""
    receive = handshake.PeerSide._receive

    def truncated(self: Any, message: handshake.Datagram) -> None:
        receive(self, message._replace(whole=message.data != b"{}"))

    monkeypatch.setattr(handshake.PeerSide, "_receive", truncated)
    world = world_of(2)
    host = LyingHost(world)
    sock, one = await host.receive()
    sock.send(b"{}")
    await until(lambda: select.select([sock], [], [], 0)[0])
    problem = json.loads(sock.recv(1000))["problem"]
    assert problem.startswith("rank 1 cannot share memory: Too many open files: 6 more exceed the limit of")
    sock.send(json.dumps({"problem": problem}).encode())
    with pytest.raises(UnsuitableError, match=r"rank 1 cannot share memory: Too many open files: 6 more") as caught:
        async with asyncio.timeout(20):
            await one
    caught.value.__traceback__ = None
    sock.close()
    host.close()


async def test_rank_0_that_has_lost_descriptors_of_a_hello_fails_at_once(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another backend, which may need as many descriptors, would be no way out."""
    check = handshake.RootSide._check_hello

    def truncated(self: Any, message: handshake.Datagram) -> tuple[int, str]:
        return check(self, message._replace(whole=False))

    monkeypatch.setattr(handshake.RootSide, "_check_hello", truncated)
    world = world_of(2)
    zero, one = map(asyncio.ensure_future, map(world.joining, world.trusting()))
    with pytest.raises(BackendError, match=r"rank 0 cannot .*: Too many open files: 6 more exceed") as caught:
        async with asyncio.timeout(20):
            await zero
    assert not isinstance(caught.value, UnsuitableError)
    caught.value.__traceback__ = None
    one.cancel()
    await asyncio.wait([one])


async def test_a_host_that_sends_descriptors_without_end(world_of: Callable[[int], World]) -> None:
    world = world_of(2)
    host = LyingHost(world)
    sock, one = await host.receive()
    before = len(os.listdir("/proc/self/fd"))
    null = os.open(os.devnull, os.O_RDONLY)
    sock.setblocking(False)
    sent = 0
    with little_memory(64 << 20):
        async with asyncio.timeout(20):
            while sent < 300:
                try:
                    socket.send_fds(sock, [b"{}"], [null] * 100)
                    sent += 1
                except (BlockingIOError, BrokenPipeError):
                    await asyncio.sleep(0.001)
                    if one.done():
                        break
                assert len(os.listdir("/proc/self/fd")) < before + 20
    with pytest.raises(
        UnsuitableError, match="rank 1 cannot share memory: rank 0 sends an unreadable message"
    ) as caught:
        await one
    caught.value.__traceback__ = None
    os.close(null)
    sock.close()
    host.close()


@pytest.mark.parametrize("seed", range(10))
async def test_news_that_are_almost_right(world_of: Callable[[int], World], seed: int) -> None:
    choose = random.Random(seed)
    world = world_of(2)
    host = LyingHost(world)
    sock, one = await host.receive()
    null = os.open(os.devnull, os.O_RDONLY)
    for _ in range(20):
        news = mutated(choose.choice([b'{"lost": 1}', b'{"problem": "no memory"}', b"{}"]), choose)
        with contextlib.suppress(OSError):
            socket.send_fds(sock, [news or b"x"], [null] * choose.choice([0, 0, 1, 3]))
    sock.close()
    async with asyncio.timeout(20):
        with pytest.raises((UnsuitableError, PeerLostError)) as caught:
            await one
    caught.value.__traceback__ = None
    host.close()
    os.close(null)


def test_the_hello_is_what_this_file_thinks_it_is() -> None:
    assert handshake.HELLO.size == struct.calcsize("=16sI") == 20
