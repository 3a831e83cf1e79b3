"""The sockets of a rank for messages: who may connect, and what the end of a connection shows."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from asynccomm import BackendError
from asynccomm.backends.gloo import endpoint as endpoint_module
from asynccomm.backends.gloo.endpoint import Contact, Endpoint
from asynccomm.backends.gloo.links import BULK, MessageLink
from asynccomm.backends.gloo.messages import Header, Kind
from asynccomm.control.transport.sockets import tcp_socket
from asynccomm.core.mailbox import Mailbox
from tests.waiting import until


class Rank:
    """An endpoint, and what has come to it."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank = rank
        self.headers: list[tuple[int, int]] = []
        self.gone: list[int] = []
        self.readers: list[int] = []  # the thread that has read each header
        self.endpoint = Endpoint(rank, size, "127.0.0.1", f"test-messages-{rank}")

    def start(self, contacts: list[Contact], mailbox: Mailbox | None = None) -> None:
        self.endpoint.start(contacts, self._arrived, lambda peer, _: self.gone.append(peer), lambda: None, mailbox)

    def _arrived(self, link: MessageLink, header: Header) -> None:
        self.headers.append((link.peer, header.number))
        self.readers.append(threading.get_ident())

    def send(self, peer: int, number: int) -> None:
        with self.endpoint.lock:
            link = self.endpoint.link_to(peer)
            assert link is not None
            self.endpoint.send(link, Header(Kind.DATA, number=number).pack())


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    ranks = [Rank(0), Rank(1)]
    contacts = [rank.endpoint.contact for rank in ranks]
    for rank in ranks:
        rank.start(contacts)
    yield ranks
    for rank in ranks:
        rank.endpoint.close()
        rank.endpoint.join(5)


def soon(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.001)


def test_nothing_stays_open_if_the_process_has_no_more_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    def listen(address: str) -> socket.socket:
        made.append(tcp_socket(address))
        return made[0]

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(endpoint_module, "tcp_socket", listen)
    monkeypatch.setattr(os, "eventfd", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Endpoint(0, 2, "127.0.0.1", "test-messages")
    assert made[0].fileno() == -1


def test_messages_arrive_in_order_by_the_thread_and_by_a_reader(ranks: list[Rank]) -> None:
    for number in range(20):
        ranks[0].send(1, number)
    soon(lambda: len(ranks[1].headers) == 20)
    until = time.perf_counter() + 20
    reader = threading.Thread(target=ranks[1].endpoint.serve, args=[until, lambda: len(ranks[1].headers) == 40])
    reader.start()
    for number in range(20, 40):
        ranks[0].send(1, number)
    reader.join()
    assert ranks[1].headers == [(0, number) for number in range(40)]
    ranks[0].send(1, 40)  # the thread reads again
    soon(lambda: len(ranks[1].headers) == 41)


def test_the_end_of_a_rank_shows_behind_its_messages(ranks: list[Rank]) -> None:
    with ranks[1].endpoint.lock:
        assert ranks[1].endpoint.link_to(0) is not None  # as a receive does
    for number in range(50):
        ranks[0].send(1, number)
    ranks[0].endpoint.leave(5)
    ranks[0].endpoint.close()
    soon(lambda: ranks[1].gone)
    assert len(ranks[1].headers) == 50


def test_a_reply_that_cannot_be_written_loses_no_message(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks[0].send(1, 0)
    soon(lambda: ranks[1].headers)
    receiver = ranks[1].endpoint

    def refuse() -> None:
        raise BrokenPipeError

    with receiver.lock:
        for number in range(1, 50):
            ranks[0].send(1, number)
        link = receiver.inbound(0)
        assert link is not None
        monkeypatch.setattr(link, "write", refuse)
        receiver.flush(link)
    ranks[0].endpoint.close()
    soon(lambda: ranks[1].gone)
    assert len(ranks[1].headers) == 50
    assert not receiver.cut(0)


def test_a_connection_may_be_cut_in_a_message(ranks: list[Rank]) -> None:
    def arrived(link: MessageLink, header: Header) -> None:
        link.receive([memoryview(bytearray(10))], lambda: None)

    ranks[1].endpoint._arrived = arrived
    ranks[0].send(1, 0)
    soon(lambda: ranks[1].endpoint._inbound)
    assert not ranks[1].endpoint.cut(0), "the data may still come"
    ranks[0].endpoint.close()
    soon(lambda: ranks[1].gone)
    assert ranks[1].endpoint.cut(0)


def test_the_end_of_a_rank_that_has_sent_nothing_shows(ranks: list[Rank]) -> None:
    with ranks[1].endpoint.lock:
        assert ranks[1].endpoint.link_to(0) is not None
    ranks[0].endpoint.close()
    soon(lambda: 0 in ranks[1].gone)


def test_leaving_does_not_wait_for_a_rank_without_messages(ranks: list[Rank]) -> None:
    start = time.monotonic()
    ranks[0].endpoint.leave(20)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "hello", [b"\0" * 20, b"token", b""], ids=["a wrong token", "a part of a token", "nothing at all"]
)
def test_a_stranger_is_refused(ranks: list[Rank], hello: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "HELLO_SECONDS", 0.05)
    contact = ranks[1].endpoint.contact
    with socket.create_connection((contact.address, contact.port), timeout=20) as stranger:
        stranger.sendall(hello)
        assert stranger.recv(1) == b"", "closed"
    ranks[0].send(1, 7)
    soon(lambda: ranks[1].headers == [(0, 7)])


def test_a_rank_cannot_connect_twice_or_as_a_rank_that_does_not_exist(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "HELLO_SECONDS", 3600.0)
    ranks[0].send(1, 1)
    soon(lambda: ranks[1].headers)
    contact = ranks[1].endpoint.contact
    for rank in (0, 2, 2**32 - 1):
        with socket.create_connection((contact.address, contact.port), timeout=20) as other:
            other.sendall(endpoint_module._HELLO.pack(contact.token, rank, endpoint_module.MESSAGES))
            assert other.recv(1) == b"", "refused at once"


def test_a_crowd_of_strangers_keeps_no_rank_out(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "UNAUTHENTICATED", 3)
    contact = ranks[1].endpoint.contact
    crowd = [socket.create_connection((contact.address, contact.port), timeout=20) for _ in range(20)]
    ranks[0].send(1, 3)
    soon(lambda: ranks[1].headers == [(0, 3)])
    for stranger in crowd:
        stranger.close()


def test_a_rank_that_does_not_listen_is_gone(ranks: list[Rank]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lonely = Rank(0)
    lonely.start([lonely.endpoint.contact, Contact("127.0.0.1", port, bytes(16))])
    with lonely.endpoint.lock:
        assert lonely.endpoint.link_to(1) is None, "no message can wait for it"
        assert lonely.gone == [1]
    lonely.endpoint.close()
    lonely.endpoint.join(5)


def test_a_link_that_has_ended_leaves_its_descriptor_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, _ = ranks = [Rank(rank, 3) for rank in range(3)]
    contacts = [rank.endpoint.contact for rank in ranks]
    other.start(contacts)
    one.endpoint.start(contacts, one._arrived, lambda peer, _: one.gone.append(peer), lambda: None)
    write = MessageLink.write

    def failing(link: MessageLink) -> None:
        if link.outbound and link.peer == 2:
            raise ConnectionResetError(104, "Connection reset by peer")
        write(link)

    with one.endpoint.lock:
        other.send(0, 1)  # waits to be accepted
        ended = one.endpoint.link_to(2)
        assert ended is not None
        monkeypatch.setattr(MessageLink, "write", failing)
        ended.put(b"queued")
        for use in (one.endpoint.flush, one.endpoint.flush, lambda link: one.endpoint.send(link, b"more")):
            use(ended)
            assert one.gone == [2]
    other.send(0, 2)
    soon(lambda: one.headers == [(1, 1), (1, 2)])
    assert one.gone == [2]
    for rank in ranks:
        rank.endpoint.close()
        rank.endpoint.join(5)


def test_closing_frees_all_descriptors_and_the_thread() -> None:
    before = set(os.listdir("/proc/self/fd"))
    rank = Rank(0)
    rank.start([rank.endpoint.contact] * 2)
    for _ in range(2):
        rank.endpoint.close()
        rank.endpoint.join(20)
    assert set(os.listdir("/proc/self/fd")) == before
    assert "test-messages-0" not in [thread.name for thread in threading.enumerate()]


# -- with an event loop -----------------------------------------------------------------------------------------------


@pytest.fixture
async def on_loop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Rank]]:
    """Two ranks; the loop reads what arrives at rank 1."""
    ranks = [Rank(0), Rank(1)]
    contacts = [rank.endpoint.contact for rank in ranks]
    ranks[0].start(contacts)
    ranks[1].start(contacts, Mailbox(asyncio.get_running_loop()))
    yield ranks
    for rank in ranks:
        rank.endpoint.close()
        rank.endpoint.join(5)


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses of the endpoints' threads last until the endpoint closes, unless something ends them."""
    monkeypatch.setattr(endpoint_module, "SHORTEST_PAUSE", 20.0)
    monkeypatch.setattr(endpoint_module, "LONGEST_PAUSE", 20.0)


async def test_the_loop_reads_what_arrives(long_pauses: None, on_loop: list[Rank]) -> None:
    sender, receiver = on_loop
    for number in range(20):
        sender.send(1, number)
    await until(lambda: len(receiver.headers) == 20)
    assert receiver.headers == [(0, number) for number in range(20)]
    assert set(receiver.readers) == {threading.get_ident()}


async def test_the_thread_reads_while_the_loop_is_blocked_and_no_longer(on_loop: list[Rank]) -> None:
    sender, receiver = on_loop
    sender.send(1, 0)
    await until(lambda: bool(receiver.headers))
    for number in range(1, 21):
        sender.send(1, number)
        soon(lambda number=number: len(receiver.headers) == number + 1)  # which blocks the loop
    assert threading.get_ident() not in receiver.readers[1:]
    assert receiver.endpoint._late
    await until(lambda: not receiver.endpoint._late)  # the loop has had a turn
    sender.send(1, 21)
    await until(lambda: len(receiver.headers) == 22)


async def test_the_thread_reads_while_much_data_is_under_way(long_pauses: None, on_loop: list[Rank]) -> None:
    sender, receiver = on_loop
    room = bytearray(3 * BULK)
    landed = threading.Event()

    def take(link: MessageLink, header: Header) -> None:
        link.receive([memoryview(room)], landed.set)

    receiver.endpoint._arrived = take
    with sender.endpoint.lock:
        link = sender.endpoint.link_to(1)
        assert link is not None
        sender.endpoint.send(link, Header(Kind.DATA).pack())
    await until(lambda: not receiver.endpoint._listens)
    with sender.endpoint.lock:
        sender.endpoint.send(link, b"x" * len(room))
    await until(landed.is_set)
    assert room == b"x" * len(room)
    await until(lambda: receiver.endpoint._listens)


async def test_the_loop_is_not_told_while_another_thread_reads(on_loop: list[Rank]) -> None:
    sender, receiver = on_loop
    sender.send(1, 0)
    await until(lambda: bool(receiver.headers))
    silent = threading.Event()

    def done() -> bool:
        if not receiver.endpoint._listens:
            silent.set()
        return len(receiver.headers) == 2

    reader = threading.Thread(target=receiver.endpoint.serve, args=[time.perf_counter() + 20, done])
    reader.start()
    await until(silent.is_set)
    sender.send(1, 1)
    await until(lambda: not reader.is_alive())
    assert receiver.endpoint._listens
    assert receiver.readers[1] != threading.get_ident()


async def test_the_loop_is_left_alone_after_the_end() -> None:
    before = set(os.listdir("/proc/self/fd"))
    loop = asyncio.get_running_loop()
    for detached in (False, True):
        rank = Rank(0)
        rank.start([rank.endpoint.contact] * 2, Mailbox(loop))
        if detached:
            rank.endpoint.detach()
        closing = threading.Thread(target=rank.endpoint.close)  # as when another thread aborts
        closing.start()
        closing.join()
        rank.endpoint.join(20)
        await until(lambda: set(os.listdir("/proc/self/fd")) == before)


def test_contacts() -> None:
    contact = Contact("fe80::1", 65535, b"t" * 16)
    again = Contact.unpack(contact.pack())
    assert (again.address, again.port, again.token) == ("fe80::1", 65535, b"t" * 16)
    with pytest.raises(BackendError, match="corrupt address"):
        Contact.unpack(b"short")


def test_a_drain_reads_however_slowly_the_machine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock may pass the limit before the thread has looked once."""
    clock = iter(range(0, 10**6, 10))
    with monkeypatch.context() as patched:
        patched.setattr(Endpoint, "_main", lambda self: None)  # no thread reads
        ranks = [Rank(0), Rank(1)]
        for rank in ranks:
            rank.start([each.endpoint.contact for each in ranks])
    ranks[0].send(1, 7)
    ranks[0].endpoint.serve(time.perf_counter() + 20, lambda: not ranks[0].endpoint._outbound[1].pending)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    soon(lambda: bool(ranks[1].endpoint._inner.poll(0)))
    while not ranks[1].headers:  # the connection, and then its data
        ranks[1].endpoint.drain(0.02)
        assert next(clock) < 1000, "nothing was read"
    for rank in ranks:
        rank.endpoint.close()
        rank.endpoint.join(5)
