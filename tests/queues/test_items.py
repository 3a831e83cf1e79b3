"""Items as frames, and back."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm import PayloadError, PayloadTypeError
from asynccomm.queues.items import IncomingItem, OutgoingItem, check_class, decode
from asynccomm.queues.layout import largest_payload
from asynccomm.queues.options import QueueOptions
from asynccomm.queues.ring import FULL, RingFrame
from tests.queues.rings import ENDS, ends
from tests.sampling import examples

RING = 4096
MOST = largest_payload(RING)


def through(item: object, options: QueueOptions = QueueOptions()) -> Any:  # noqa: B008 (it is frozen)
    """``item`` through a ring, frame by frame."""
    _, writer, (reader,) = ends(ENDS[-1], RING)
    outgoing = OutgoingItem(item, weights_only=options.weights_only)
    incoming: IncomingItem | None = None
    done = False
    while incoming is None or not incoming.done or not done:
        done = done or outgoing.write(writer, 3, MOST, 1 << 30)[0]
        while (found := reader.peek()) is not None:
            frame = RingFrame(*found)
            incoming = IncomingItem(frame, options) if frame.first else incoming
            assert incoming is not None
            assert incoming.feed(frame.address, frame.nbytes)
            reader.free()
    assert incoming is not None
    return decode(incoming, "rank 1", options)


@examples(60)
@given(st.binary(max_size=3 * RING), st.lists(st.integers(0, 3000), max_size=4))
def test_items_larger_than_the_ring_arrive_byte_by_byte(data: bytes, sizes: list[int]) -> None:
    assert through(data) == data
    item = {"data": data, "tensors": [torch.arange(size, dtype=torch.int32) for size in sizes], "text": "x" * len(data)}
    got = through(item)
    assert got["data"] == data
    assert got["text"] == item["text"]
    assert all(torch.equal(a, b) for a, b in zip(got["tensors"], item["tensors"], strict=True))


def test_strided_tensors_arrive() -> None:
    tensor = torch.arange(600.0).reshape(20, 30).t()
    assert torch.equal(through(tensor), tensor)


def test_conjugated_and_negated_views_arrive_as_their_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert through(tensor.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert through({"part": tensor.conj().imag})["part"].tolist() == [-2.0, 4.0]


def test_frames_of_an_item_are_never_more_than_announced() -> None:
    for item in (b"", bytes(100), bytes(2 * MOST), {"t": torch.zeros(300), "e": torch.zeros(0)}):
        _, writer, (reader,) = ends(ENDS[-1], RING)
        outgoing = OutgoingItem(item, weights_only=True)
        assert outgoing.write(writer, 0, MOST, 1 << 30)[0]
        assert writer.head <= outgoing.frames(MOST)
        assert reader.peek() is not None


def test_a_full_ring_stops_an_item_and_a_budget_does() -> None:
    _, writer, _ = ends(ENDS[-1], RING)
    item = OutgoingItem(bytes(3 * RING), weights_only=True)
    done, _, moved = item.write(writer, 0, MOST, 1)
    assert (done, moved) == (False, MOST)
    assert item.write(writer, 0, MOST, 1 << 30)[2] == 3 * MOST
    assert item.write(writer, 0, MOST, 1 << 30) == (False, False, FULL)


def test_an_item_above_max_bytes_is_refused_and_takes_no_memory() -> None:
    with pytest.raises(
        PayloadError, match="an item of rank 1 cannot be read: it has 5000 bytes, but max_bytes is 4000"
    ):
        through(bytes(5000), QueueOptions(max_bytes=4000))


def test_a_damaged_head_is_an_error() -> None:
    options = QueueOptions()
    damaged = ctypes.create_string_buffer(b"\xff" * 64)
    for frame in (
        RingFrame(64, 3, 1, 64, 64, 0, 0),
        RingFrame(64, 3, 1, 0, 64, 0, 0),
        RingFrame(64, 3, 1, 32, 64, 0, 0),
    ):
        incoming = IncomingItem(frame, options)
        assert incoming.feed(ctypes.addressof(damaged), 64)
        assert not incoming.feed(ctypes.addressof(damaged), 64)
        with pytest.raises(PayloadError, match="an item of rank 1 cannot be read"):
            decode(incoming, "rank 1", options)
    with pytest.raises(PayloadError, match="an item of rank 1 cannot be read"):
        decode(b"\xff" * 64, "rank 1", options)


def test_objects_of_unknown_classes_and_other_classes_than_expected_are_refused() -> None:
    with pytest.raises(TypeError, match="item cannot be sent"):
        OutgoingItem(object(), weights_only=True)
    with pytest.raises(PayloadTypeError, match="a int was expected, but rank 1 put a str"):
        check_class("text", "rank 1", QueueOptions(expect=int))
    check_class(7, "rank 1", QueueOptions(expect=int))
