"""The messages of a rank to another one, as they come out of a socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import BackendError
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo import outbox
from asynccomm.backends.gloo.links import JOINED, MessageLink
from asynccomm.backends.gloo.messages import HEADER_BYTES, OFFERED, SHORT, WINDOW, Header, Kind
from asynccomm.backends.gloo.outbox import Outbox
from asynccomm.backends.regions import bytes_of
from asynccomm.core.native import CoreUnavailable
from asynccomm.ops import Call, MessageSpace, Parcel, Send, SendParcel
from asynccomm.ops.dtypes import CODES
from asynccomm.ops.validation import CommInfo

GROUP = CommInfo("test", 0, 2, torch.device("cpu"))
WORK: Any = None
LARGE = SHORT // 4 + 1  # elements of float32 that are offered


class Sender:
    """An outbox, and the other end of its connection to rank 1."""

    def __init__(self) -> None:
        mine, self.there = socket.socketpair()
        for sock in mine, self.there:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * WINDOW)
        mine.setblocking(False)
        self.there.settimeout(20)
        self.link = MessageLink(mine, 1, outbound=True, arrived=lambda *_: None)
        self.sent: list[Submission] = []
        endpoint: Any = self
        self.outbox = Outbox(endpoint, self.sent.append)

    # -- as an endpoint --

    def send(self, link: MessageLink, *parts: bytes) -> None:
        link.send(*parts)

    def flush(self, link: MessageLink) -> None:
        link.write()

    def sink(self, peer: int) -> int | None:
        return None if self.link.pending else self.link.fd

    # -- for the tests --

    def tensor(self, tensor: Tensor, tag: int = 0) -> tuple[Submission, bool]:
        return self.start(Send.of(GROUP, tensor, 1, tag))

    def start(self, call: Any) -> tuple[Submission, bool]:
        submission = Submission(call, WORK)
        return submission, self.outbox.send(self.link, submission)

    def header(self) -> Header:
        return Header.unpack_from(memoryview(self.take(HEADER_BYTES)), 0)

    def take(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            self.link.write()
            data += self.there.recv(nbytes - len(data))
        return bytes(data)

    def nothing_more(self) -> bool:
        self.there.setblocking(False)
        try:
            return not self.there.recv(1)
        except BlockingIOError:
            return True
        finally:
            self.there.settimeout(20)


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.link.close()
    sender.there.close()


def bytes_in(tensor: Tensor) -> bytes:
    return bytes_of(tensor.resolve_neg().contiguous()).numpy().tobytes()


def tensors() -> Sequence[Tensor]:
    long = torch.arange(SHORT // 4, dtype=torch.float32)
    negated = torch.full((5,), 1 + 2j).conj().imag
    return torch.zeros(0), torch.ones(3), torch.arange(JOINED + 4.0), long, long[::2], negated


@pytest.mark.parametrize("number", range(6))
def test_a_short_message_leaves_in_the_call(sender: Sender, number: int) -> None:
    tensor = tensors()[number]
    _, left = sender.tensor(tensor, 7)
    assert left
    assert sender.header() == Header(Kind.TENSOR, 7, 0, tensor.numel(), CODES[tensor.dtype])
    assert sender.take(tensor.nbytes) == bytes_in(tensor)
    assert sender.nothing_more()
    assert sender.sent == []


def test_without_c_messages_are_the_same(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_core", CoreUnavailable("no compiler"))
    for tensor in tensors():
        assert sender.tensor(tensor)[1]
        assert sender.header().first == tensor.numel()
        assert sender.take(tensor.nbytes) == bytes_in(tensor)
    assert sender.nothing_more()


def test_memory_is_free_when_a_short_message_has_left(sender: Sender) -> None:
    """Also for the part that the socket has not taken."""
    sender.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    tensor = torch.arange(SHORT // 4, dtype=torch.float32)
    expected = bytes_in(tensor)
    assert sender.tensor(tensor)[1]
    assert sender.link.pending
    tensor.zero_()
    sender.header()
    assert sender.take(len(expected)) == expected


def test_a_long_message_waits_for_its_receive(sender: Sender) -> None:
    tensor = torch.arange(float(LARGE))
    submission, left = sender.tensor(tensor, 3)
    assert not left
    assert sender.header() == Header(Kind.TENSOR + OFFERED, 3, 1, LARGE, CODES[torch.float32])
    assert sender.nothing_more()
    sender.outbox.answered(sender.link, Header(Kind.CLEAR, number=1))
    assert sender.header() == Header(Kind.DATA, number=1)
    assert sender.take(tensor.nbytes) == bytes_in(tensor)
    assert sender.sent == [submission]


def test_a_long_message_is_unsent_until_the_socket_has_its_data(sender: Sender) -> None:
    tensor = torch.arange(16.0 * LARGE)
    sender.tensor(tensor)
    assert sender.outbox.unsent(1)
    assert not sender.outbox.unsent(0)
    sender.header()
    sender.outbox.answered(sender.link, Header(Kind.CLEAR, number=1))
    assert sender.link.pending
    assert sender.outbox.unsent(1)
    with pytest.raises(BackendError, match="rank 1"):
        sender.outbox.answered(sender.link, Header(Kind.CLEAR, number=1))
    sender.take(HEADER_BYTES + tensor.nbytes)
    assert not sender.outbox.unsent(1)


def test_a_parcel_has_its_head_in_front(sender: Sender) -> None:
    for number, payload in enumerate([torch.ones(2), torch.ones(LARGE)]):
        op = SendParcel("send_object", 1, 4, MessageSpace.OBJECTS)
        _, left = sender.start(Call(op, (payload,), (), None, parcels=(Parcel(b"head", (payload,)),)))
        assert left == (number == 0)
        header = sender.header()
        assert header == Header(Kind.PARCEL + number * OFFERED, op.key, number, 4, payload.nbytes)
        if header.offered:
            sender.outbox.answered(sender.link, Header(Kind.CLEAR, number=1))
            sender.header()
        assert sender.take(4 + payload.nbytes) == b"head" + bytes_in(payload)


def test_the_window_bounds_what_no_operation_has_taken(sender: Sender) -> None:
    tensor = torch.zeros(SHORT // 4)
    size = HEADER_BYTES + tensor.nbytes
    for _ in range(WINDOW // size):
        assert sender.tensor(tensor)[1]
        sender.take(size)
    assert not sender.tensor(tensor)[1], "as long as nothing is taken, it is offered"
    assert sender.header().offered
    sender.outbox.answered(sender.link, Header(Kind.TAKEN, first=size))
    assert sender.tensor(tensor)[1]


@pytest.mark.parametrize(
    "header",
    [
        Header(Kind.CLEAR, number=2),
        Header(Kind.TAKEN, first=HEADER_BYTES + 13),
        Header(Kind.TAKEN, first=0),
        Header(Kind.TAKEN, first=-1),
        Header(Kind.DATA, number=1),
    ],
    ids=str,
)
def test_impossible_answers_are_refused(sender: Sender, header: Header) -> None:
    sender.tensor(torch.ones(3))
    sender.tensor(torch.ones(LARGE))
    with pytest.raises(BackendError, match="rank 1"):
        sender.outbox.answered(sender.link, header)
    sender.outbox.answered(sender.link, Header(Kind.TAKEN, first=HEADER_BYTES + 12))
    sender.outbox.answered(sender.link, Header(Kind.CLEAR, number=1))


def test_dropped_offers_cannot_be_cleared(sender: Sender) -> None:
    sender.tensor(torch.ones(LARGE))
    sender.outbox.clear()
    assert not sender.outbox.unsent(1)
    with pytest.raises(BackendError, match="rank 1"):
        sender.outbox.answered(sender.link, Header(Kind.CLEAR, number=1))


def test_messages_dropped_in_the_middle_are_not_reported(sender: Sender) -> None:
    tensor = torch.ones(16 * LARGE)
    sender.tensor(tensor)
    sender.header()
    sender.outbox.answered(sender.link, Header(Kind.CLEAR, number=1))
    sender.outbox.clear()
    sender.take(HEADER_BYTES + tensor.nbytes)
    assert not sender.sent
