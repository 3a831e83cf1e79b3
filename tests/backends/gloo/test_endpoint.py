"""The sockets of a rank for messages: who may connect, and what the end of a connection shows."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asynccomm import BackendError
from asynccomm.backends.gloo import endpoint as endpoint_module
from asynccomm.backends.gloo.endpoint import Contact, Endpoint
from asynccomm.backends.gloo.links import MessageLink
from asynccomm.backends.gloo.messages import Header, Kind


class Rank:
    """An endpoint, and what has come to it."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank = rank
        self.headers: list[tuple[int, int]] = []
        self.gone: list[int] = []
        self.endpoint = Endpoint(rank, size, "127.0.0.1", f"test-messages-{rank}")

    def start(self, contacts: list[Contact]) -> None:
        self.endpoint.start(contacts, self._arrived, lambda peer, _: self.gone.append(peer), lambda: None)

    def _arrived(self, link: MessageLink, header: Header) -> None:
        self.headers.append((link.peer, header.number))

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


def test_a_rank_cannot_connect_twice_or_as_a_rank_that_does_not_exist(ranks: list[Rank]) -> None:
    ranks[0].send(1, 1)
    soon(lambda: ranks[1].headers)
    contact = ranks[1].endpoint.contact
    for rank in (0, 2, 2**32 - 1):
        with socket.create_connection((contact.address, contact.port), timeout=20) as other:
            other.sendall(contact.token + rank.to_bytes(4, "little"))
            assert other.recv(1) == b""


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
        lonely.endpoint.link_to(1)
    soon(lambda: lonely.gone == [1])
    lonely.endpoint.close()
    lonely.endpoint.join(5)


def test_closing_frees_all_descriptors_and_the_thread() -> None:
    before = set(os.listdir("/proc/self/fd"))
    rank = Rank(0)
    rank.start([rank.endpoint.contact] * 2)
    for _ in range(2):
        rank.endpoint.close()
        rank.endpoint.join(20)
    assert set(os.listdir("/proc/self/fd")) == before
    assert "test-messages-0" not in [thread.name for thread in threading.enumerate()]


def test_contacts() -> None:
    contact = Contact("fe80::1", 65535, b"t" * 16)
    again = Contact.unpack(contact.pack())
    assert (again.address, again.port, again.token) == ("fe80::1", 65535, b"t" * 16)
    with pytest.raises(BackendError, match="corrupt address"):
        Contact.unpack(b"short")
