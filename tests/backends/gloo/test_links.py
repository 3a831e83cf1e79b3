"""A connection for messages: frames and data in any pieces, without blocking."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest
import torch

from asynccomm.backends.gloo.links import CHUNK, ROOM, VECTORS, MessageLink, copied, fill, view
from asynccomm.backends.gloo.messages import HEADER_BYTES, Header, Kind


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        yield one, other


def unexpected(link: MessageLink, header: Header) -> None:
    raise AssertionError(f"{header} has arrived")


class Taker:
    """Receives frames with as many bytes of data as ``first`` says, in some parts."""

    def __init__(self, sock: socket.socket, seed: int) -> None:
        self.got: list[tuple[Header, bytes]] = []
        self._choose = random.Random(seed)
        self.link = MessageLink(sock, 1, outbound=False, arrived=self._arrived)

    def _arrived(self, link: MessageLink, header: Header) -> None:
        data = link.take(header.first) if self._choose.random() < 0.5 else None
        if data is not None:
            self.got.append((header, data))
            return
        memory = bytearray(header.first)
        whole = memoryview(memory)
        cuts = sorted(self._choose.randint(0, header.first) for _ in range(3))
        parts = [whole[i:j] for i, j in zip([0, *cuts], [*cuts, header.first], strict=True)]
        link.receive(parts, lambda: self.got.append((header, bytes(memory))))


@pytest.mark.parametrize("seed", range(5))
def test_frames_arrive_in_order_however_they_are_cut(pair: tuple[socket.socket, socket.socket], seed: int) -> None:
    choose = random.Random(seed)
    sender = MessageLink(pair[0], 0, outbound=True, arrived=unexpected)
    taker = Taker(pair[1], seed)
    sizes = [0, 1, 40, ROOM - HEADER_BYTES, ROOM, ROOM + 1, CHUNK, 3 * CHUNK + 7]
    sent, done = [], []
    for number in range(60):
        data = choose.randbytes(choose.choice(sizes if number % 10 == 0 else sizes[:4]))
        header = Header(Kind.DATA, number=number, first=len(data))
        sent.append((header, data))
        if number % 3 == 0:
            sender.send(header.pack() + data)
        else:
            third = len(data) // 3
            sender.put(header.pack(), data[:third], data[third:], done=lambda number=number: done.append(number))
        if choose.random() < 0.3:
            sender.write()
        if choose.random() < 0.3:
            taker.link.read()
    while sender.pending or len(taker.got) < len(sent):
        sender.write()
        taker.link.read()
    assert taker.got == sent
    assert done == [number for number in range(60) if number % 3]
    assert not taker.link.read()
    assert not taker.link.receiving


def test_a_write_ends_when_the_socket_is_full(pair: tuple[socket.socket, socket.socket]) -> None:
    link = MessageLink(pair[0], 0, outbound=True, arrived=unexpected)
    done: list[int] = []
    link.put(bytes(50 << 20), done=lambda: done.append(1))
    for _ in range(200):
        link.write()
    assert link.pending
    assert not done


@pytest.mark.parametrize("sizes", [(88, 3), (88, 5 << 20), (5 << 20, 88), (3 << 20, 5 << 20), (0, 9), (9, 0)])
def test_parts_that_are_sent_arrive_in_order(pair: tuple[socket.socket, socket.socket], sizes: tuple[int, int]) -> None:
    """Also those that the socket takes in part, or not at all, behind earlier data."""
    choose = random.Random(1)
    sender = MessageLink(pair[0], 0, outbound=True, arrived=unexpected)
    taker = Taker(pair[1], 0)
    sent = []
    for _ in range(2):
        data = choose.randbytes(sizes[0]), choose.randbytes(sizes[1])
        sender.send(Header(Kind.DATA, first=sum(sizes)).pack() + data[0], bytearray(data[1]))
        sent.append(data[0] + data[1])
    while len(taker.got) < 2:
        sender.write()
        taker.link.read()
    assert [data for _, data in taker.got] == sent
    assert not sender.pending


def test_more_parts_than_one_system_call_takes(pair: tuple[socket.socket, socket.socket]) -> None:
    sender = MessageLink(pair[0], 0, outbound=True, arrived=unexpected)
    taker = Taker(pair[1], 0)
    parts = [bytes([i % 251]) * i for i in range(5 * VECTORS)]
    sender.put(Header(Kind.DATA, first=sum(map(len, parts))).pack(), *parts)
    while not taker.got:
        sender.write()
        taker.link.read()
    assert taker.got[0][1] == b"".join(parts)


def test_the_first_bytes_are_for_the_check(pair: tuple[socket.socket, socket.socket]) -> None:
    taker = Taker(pair[1], 0)
    seen: list[bytes] = []
    taker.link.expect_hello(5, lambda _, hello: seen.append(hello))
    pair[0].send(b"hel")
    taker.link.read()
    assert not seen
    pair[0].send(b"lo" + Header(Kind.DATA, first=0).pack())
    taker.link.read()
    assert seen == [b"hello"]
    assert len(taker.got) == 1


def test_the_end_of_a_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    link = MessageLink(pair[0], 0, outbound=True, arrived=unexpected)
    assert not link.read()
    pair[1].close()
    with pytest.raises(EOFError):
        link.read()


def test_the_memory_of_tensors() -> None:
    tensor = torch.arange(10, dtype=torch.uint8)
    assert copied(tensor, 10) == bytes(range(10))
    fill(tensor, bytes(range(10, 20)))
    assert tensor.tolist() == [*range(10, 20)]
    view(tensor)[3] = 99
    assert tensor[3] == 99
    assert len(view(torch.empty(0, dtype=torch.uint8))) == 0
