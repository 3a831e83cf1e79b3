"""Pieces: however the bytes are divided on either side, they come out in order, and nothing beyond them is touched."""

import ctypes
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends.arithmetic import plain
from asynccomm.backends.shm.iovec import SMALL, Pieces, address_of, spans
from asynccomm.testing.conformance.data import DTYPES, SHAPES, layouts, sample

from .ring_world import as_bytes, pattern, text

sizes = st.lists(st.integers(0, 40), max_size=8)


@given(sizes, st.lists(st.integers(1, 60), max_size=60), st.booleans())
def test_bytes_go_out_in_order(parts: list[int], cuts: list[int], with_bytes: bool) -> None:
    tensors: list[Tensor | bytes] = [
        text(n, i) if with_bytes and i % 2 else pattern(n, 0, i) for i, n in enumerate(parts)
    ]
    expected = b"".join(part if isinstance(part, bytes) else as_bytes([part]) for part in tensors)
    pieces, found, at = Pieces(tensors), b"", 0
    target = ctypes.create_string_buffer(b"\xee" * 128, 128)
    while at < len(expected):
        n = min(cuts.pop() if cuts else 7, len(expected) - at)
        ctypes.memset(target, 0xEE, 128)
        pieces.copy_to(ctypes.addressof(target), n)
        assert target.raw[n:] == b"\xee" * (128 - n)
        found += target.raw[:n]
        at += n
    assert found == expected


@given(sizes, st.lists(st.integers(1, 60), max_size=60))
def test_bytes_come_in_in_order(parts: list[int], cuts: list[int]) -> None:
    room = [torch.full((n + 2,), 0xEE, dtype=torch.uint8) for n in parts]
    pieces, data, at = Pieces([tensor[1:-1] for tensor in room]), text(sum(parts)), 0
    source = ctypes.create_string_buffer(data, max(len(data), 1))
    while at < len(data):
        n = min(cuts.pop() if cuts else 7, len(data) - at)
        pieces.copy_from(ctypes.addressof(source) + at, n)
        at += n
    assert as_bytes([tensor[1:-1] for tensor in room]) == data
    assert all(tensor[0] == tensor[-1] == 0xEE for tensor in room)


def test_every_dtype_and_layout() -> None:
    tensors = [t for dtype in DTYPES for shape in SHAPES for _, t in layouts(sample(1, shape, dtype))]
    expected = as_bytes(tensors)
    target = ctypes.create_string_buffer(len(expected))
    Pieces(tensors).copy_to(ctypes.addressof(target), len(expected))
    assert target.raw == expected


def test_large_and_small_ones() -> None:
    tensors = [pattern(n, 0, 0) for n in (SMALL + 1, 3, SMALL, 2 * SMALL)]
    expected = torch.cat(tensors)
    flat = torch.zeros_like(expected)
    Pieces(tensors).copy_to(flat.data_ptr(), len(flat))
    assert torch.equal(flat, expected)
    room = [torch.zeros_like(tensor) for tensor in tensors]
    Pieces(room).copy_from(flat.data_ptr(), len(flat))
    assert torch.equal(torch.cat(room), expected)


def test_what_is_large_is_copied_without_the_gil() -> None:
    assert not ctypes.memmove._flags_ & 0x4  # type: ignore[attr-defined]  # FUNCFLAG_PYTHONAPI would keep it


def test_one_is_packed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[Tensor]] = []
    alive = []

    def watched(tensor: Tensor) -> Tensor:
        alive.append(sum(copy() is not None for copy in copies))
        copy = plain(tensor)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr("asynccomm.backends.shm.iovec.plain", watched)
    strided = [pattern(40, 0, i)[::2] for i in range(5)]
    pieces = Pieces(strided)
    assert copies == [], "not before its turn"
    target = torch.zeros(100, dtype=torch.uint8)
    pieces.copy_to(target.data_ptr(), 10)
    assert len(copies) == 1
    pieces.copy_to(target.data_ptr() + 10, 90)
    assert torch.equal(target, torch.cat(strided))
    assert alive == [0] * 5


def test_spans_are_what_is_not_empty() -> None:
    tensor = torch.ones(3)
    parts: list[Tensor | bytes] = [b"", torch.empty(0), b"abc", torch.empty(2, 0), tensor]
    found = spans(parts)
    address, nbytes = next(found)
    assert ctypes.string_at(address, nbytes) == b"abc"
    assert next(found) == (tensor.data_ptr(), 12)
    assert next(found, None) is None


def test_nothing_of_nothing() -> None:
    Pieces([]).copy_to(0, 0)
    Pieces([torch.empty(0)]).copy_from(0, 0)


def test_tensors_are_asked_for_only_when_it_is_their_turn() -> None:
    def parts() -> Iterator[Tensor]:
        yield torch.ones(4, dtype=torch.uint8)
        raise AssertionError("too far")

    target = torch.zeros(4, dtype=torch.uint8)
    Pieces(parts()).copy_to(target.data_ptr(), 4)
    assert target.tolist() == [1] * 4


def test_address_of_bytes() -> None:
    data = b"0\x001"
    assert ctypes.string_at(address_of(data), 3) == data


def test_plain_tensors_are_not_copied() -> None:
    tensor = torch.ones(2, 3)
    assert plain(tensor) is tensor
    assert plain(tensor.t()).flatten().tolist() == [1] * 6
