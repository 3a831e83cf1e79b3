"""Heads of what one rank gives another."""

from __future__ import annotations

import pytest
import torch

from asynccomm import BackendError
from asynccomm.backends.nccl.envelopes import ByteCursor, HeaderReceiver, packed

BYTES = torch.arange(20, dtype=torch.uint8)


def test_a_head_says_what_comes() -> None:
    segments = [(BYTES[:3], False), (BYTES[3:10], True), (BYTES[10:11], False)]
    parcel = packed(7, b"the head", segments)
    assert [tensor.tolist() for tensor in parcel.tensors] == [[0, 1, 2], [10]]
    inbox = HeaderReceiver()
    (along,) = inbox(2, parcel.head, {2: parcel.nbytes})
    along.copy_(torch.cat(parcel.tensors))
    envelope = inbox.envelopes[2]
    assert (envelope.number, envelope.head, envelope.segments) == (7, b"the head", [(3, False), (7, True), (1, False)])
    assert envelope.along.tolist() == [0, 1, 2, 10]
    assert envelope.nbytes == 11
    assert envelope.on_device


def test_nothing_but_a_head() -> None:
    inbox = HeaderReceiver()
    parcel = packed(0, b"", [])
    inbox(0, parcel.head, {0: 0})
    assert not inbox.envelopes[0].on_device
    assert inbox.envelopes[0].nbytes == 0


@pytest.mark.parametrize(
    ("head", "length"),
    [
        (b"", 0),
        (b"x" * 5, 0),
        (packed(1, b"", [(BYTES, False)]).head, 19),  # another number of bytes came along
        (packed(1, b"", [(BYTES, True)] * 3).head[:-1], 0),  # cut off
        (packed(1, b"", [(BYTES, True)] * 3).head[:-8], 0),
    ],
)
def test_heads_that_do_not_fit_name_the_rank(head: bytes, length: int) -> None:
    with pytest.raises(BackendError, match="rank 3 sent a head"):
        HeaderReceiver()(3, head, {3: length})


def test_a_cursor_cuts_at_the_ends_of_tensors() -> None:
    tensors = [torch.zeros(3), torch.zeros(0), torch.zeros(5, dtype=torch.uint8), torch.zeros(2, dtype=torch.int16)]
    cursor = ByteCursor(tensors)
    pieces = [cursor.next(n) for n in (0, 4, 10, 2, 5)]
    assert [[len(piece) for piece in found] for found in pieces] == [[], [4], [8, 2], [2], [1, 4]]
    assert pieces[2][0].data_ptr() == tensors[0].data_ptr() + 4
    assert pieces[4][1].data_ptr() == tensors[3].data_ptr()
