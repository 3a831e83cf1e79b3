"""Parcels as messages, with a gloo that keeps them in lists. Over a real one in test_payload_collectives.py."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import BackendError
from asynccomm.backends.gloo import payloads
from asynccomm.backends.gloo.payloads import InboundParcel, OutboundParcel, segments_of
from asynccomm.backends.regions import bytes_of
from asynccomm.ops import Parcel
from tests.cases import cases
from tests.sampling import some

from .parcels import data, joined

SMALL, PACK, SEGMENT = payloads.SMALL, payloads.PACK, payloads.SEGMENT


class Loop:
    """What is sent comes back. Receives must be posted in order, and messages be as long as their receives."""

    def __init__(self) -> None:
        self.messages: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        self.sent: list[Tensor] = []

    def send(self, tensor: Tensor, dst: int, tag: int) -> Any:
        self.messages[tag].append(tensor)
        self.sent.append(tensor)
        return self

    def recv(self, tensor: Tensor, src: int, tag: int) -> Any:
        loop = self

        class Work:
            def wait(self) -> None:
                message = loop.messages[tag].popleft()
                assert len(message) == len(tensor) or tag % 2 == 0, "this would end the process"
                tensor[: len(message)].copy_(message)

        return Work()

    def wait(self) -> None:
        pass


def lengths(tensors: list[Tensor]) -> list[int]:
    return [segment.numel() for segment in segments_of(tensors)]


def test_small_tensors_share_segments_and_large_ones_are_cut() -> None:
    large = data(SEGMENT + 5)
    assert lengths([data(1), data(2), large, data(3), torch.zeros(0), data(4)]) == [3, SEGMENT, 5, 7]
    assert segments_of([large])[0].data_ptr() == large.data_ptr()
    assert max(lengths([data(SMALL)] * 40)) == PACK
    assert lengths([]) == lengths([torch.zeros(0)]) == []


@cases("cut", [[1], [3, 2], [50, 1, 0, 7], [1000] * 4])
@cases(
    "nbytes, head",
    some(list(itertools.product([0, 1, 4096, 4097, 3 * SMALL, SEGMENT + 3], [0, 10, 4096, 100_000])), 12),
)
def test_any_cut_into_any_other(nbytes: int, head: int, cut: list[int]) -> None:
    def pieces(weights: list[int]) -> list[Tensor]:
        parts = [nbytes * weight // sum(weights) for weight in weights]
        return [torch.zeros(n, dtype=torch.uint8) for n in [*parts, nbytes - sum(parts)]]

    payload = data(nbytes)
    given = list(payload.split([len(piece) for piece in pieces([5, 7])]))
    loop: Any = Loop()
    for wait in OutboundParcel(Parcel(b"h" * head, tuple(given)), 77, "what it is").send(loop, 1, 3):
        wait()
    incoming = InboundParcel(loop, 1, 3)
    notes: list[tuple[int, str]] = []
    incoming.read(lambda *note: notes.append(note))
    assert notes == [(77, "what it is")]
    assert incoming.head == b"h" * head
    assert incoming.nbytes == nbytes
    targets = pieces(cut)
    incoming.take(targets)
    assert torch.equal(joined(targets), payload)
    assert not any(loop.messages.values())


@pytest.mark.parametrize("nbytes", [0, 100, 5000, 2 * SEGMENT + 1])
def test_thrown_away(nbytes: int) -> None:
    loop: Any = Loop()
    OutboundParcel(Parcel(b"", (data(nbytes),))).send(loop, 1, 3)
    incoming = InboundParcel(loop, 1, 3)
    incoming.read()
    incoming.take(None)
    assert not any(loop.messages.values())


def test_short_parcels_are_one_message() -> None:
    loop: Any = Loop()
    OutboundParcel(Parcel(b"h" * 96, (data(4000),))).send(loop, 1, 3)
    assert len(loop.sent) == 1
    loop.sent.clear()
    OutboundParcel(Parcel(b"h" * 97, (data(4000),))).send(loop, 1, 3)
    assert len(loop.sent) == 2, "a short head comes along with the header"


def test_what_is_sent_is_the_memory_of_the_call() -> None:
    tensor = torch.ones(SMALL)
    loop: Any = Loop()
    OutboundParcel(Parcel(b"", (tensor,))).send(loop, 1, 3)
    tensor.data = torch.zeros(SMALL)
    assert loop.sent[-1].view(torch.float32).eq(1).all()


def test_a_check_comes_before_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "MAX_HEAD", 10_000)
    loop: Any = Loop()
    OutboundParcel(Parcel(bytes(10_001), ())).send(loop, 1, 3)

    def check(code: int, text: str) -> None:
        raise KeyError(text)

    with pytest.raises(KeyError):
        InboundParcel(loop, 1, 3).read(check)
    OutboundParcel(Parcel(bytes(10_001), ())).send(loop, 1, 3)
    with pytest.raises(BackendError, match="rank 1 sent a head of 10001 bytes; 10000 are allowed"):
        InboundParcel(loop, 1, 3).read()


def test_a_long_text_is_cut() -> None:
    loop: Any = Loop()
    OutboundParcel(Parcel(b"head", ()), 1, "x" * 100).send(loop, 1, 3)
    incoming = InboundParcel(loop, 1, 3)
    texts: list[str] = []
    incoming.read(lambda _, text: texts.append(text))
    assert texts == ["x" * 60]
    assert incoming.head == b"head"


def test_into_tensors_of_any_dtype() -> None:
    loop: Any = Loop()
    given = torch.arange(100_000, dtype=torch.float64)
    OutboundParcel(Parcel(b"", (given,))).send(loop, 1, 3)
    incoming = InboundParcel(loop, 1, 3)
    incoming.read()
    target = torch.zeros(100_000, dtype=torch.complex32), torch.zeros(50_000, dtype=torch.float64)
    incoming.take(target)
    assert torch.equal(joined(target), bytes_of(given))
