"""Vectors in one place and in many; the bytes of tensors, gone through once from front to back."""

import ctypes
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends.arithmetic import plain
from asynccomm.backends.shm.vectors import (
    SMALL,
    Pieces,
    Scattered,
    address_of,
    copy_between,
    read,
    scattered,
    share_of,
    spans,
    where,
    write,
)
from asynccomm.testing.conformance.data import DTYPES, SHAPES, layouts, sample

from .ring_world import as_bytes, pattern, text


def numbers(n: int) -> Tensor:
    return torch.arange(n).to(torch.uint8)


def pieces(sizes: list[int]) -> tuple[list[Tensor], Tensor]:
    """Tensors of so many bytes, with gaps between them, and their bytes as one."""
    memory = torch.randint(0, 256, (sum(sizes) + 3 * len(sizes),), dtype=torch.uint8)
    found, at = [], 0
    for n in sizes:
        found.append(memory[at : at + n])
        at += n + 3
    return found, torch.cat(found)


SIZES = st.lists(st.integers(0, 9), min_size=2, max_size=12)


@given(sizes=SIZES, data=st.data())
def test_any_range_of_a_scattered_vector(sizes: list[int], data: st.DataObject) -> None:
    tensors, whole = pieces(sizes)
    vector = scattered(tensors)
    start = data.draw(st.integers(0, len(whole)))
    n = data.draw(st.integers(0, len(whole) - start))
    found = torch.zeros(n, dtype=torch.uint8)
    read(vector, start, n, found.data_ptr())
    assert torch.equal(found, whole[start : start + n])
    new = numbers(n) + 100
    write(vector, start, n, new.data_ptr())
    whole[start : start + n] = new
    assert torch.equal(torch.cat(tensors), whole)


@given(sizes=SIZES, others=SIZES)
def test_copies_between_any_divisions(sizes: list[int], others: list[int]) -> None:
    source, whole = pieces(sizes)
    cut = [min(n, max(0, len(whole) - sum(others[:i]))) for i, n in enumerate(others)]
    cut.append(len(whole) - sum(cut))
    target, _ = pieces(cut)
    copy_between(scattered(source), 0, scattered(target), 0, len(whole))
    assert torch.equal(torch.cat(target), whole)
    for one in (numbers(len(whole)), whole):
        copy_between(one.data_ptr(), 0, scattered(target), 0, len(whole))
        assert torch.equal(torch.cat(target), one)
        flat = torch.zeros_like(whole)
        copy_between(scattered(target), 0, flat.data_ptr(), 0, len(whole))
        assert torch.equal(flat, one)


def test_large_pieces_and_small_ones() -> None:
    tensors, whole = pieces([SMALL + 1, 5, 3 * SMALL])
    found = torch.zeros_like(whole)
    read(scattered(tensors), 0, len(whole), found.data_ptr())
    assert torch.equal(found, whole)


def test_one_tensor_is_its_address_and_neighbours_are_one_piece() -> None:
    memory = numbers(20)
    assert share_of(3, [memory]) == (3, memory.data_ptr(), 20)
    rank, vector, nbytes = share_of(3, [memory[:5], memory[5:5], memory[5:9], memory[12:]])
    assert (rank, nbytes) == (3, 17)
    assert isinstance(vector, Scattered)
    assert (vector.addresses, vector.starts) == ([memory.data_ptr(), memory.data_ptr() + 12], [0, 9, 17])
    assert vector.nbytes == 17
    assert vector == scattered([memory[:9], memory[12:]])
    assert vector != scattered([memory[:9], memory[13:]])
    assert where(memory) == memory.data_ptr()
    assert where(vector) is vector


def test_nothing_in_pieces() -> None:
    vector = scattered([torch.empty(0), torch.empty(0, 3)])
    assert vector.nbytes == 0
    read(vector, 0, 0, 0)
    write(vector, 0, 0, 0)


def test_a_scattered_vector_keeps_its_tensors() -> None:
    vector = scattered([torch.full((1000,), 7.0), torch.full((1000,), 8.0)])
    found = torch.zeros(2000)
    torch.zeros(1000), torch.zeros(1000)  # would get the same memory
    vector.read(0, vector.nbytes, found.data_ptr())
    assert found.tolist() == [7.0] * 1000 + [8.0] * 1000


def test_plain_tensors_are_themselves_and_others_are_copied() -> None:
    tensor = torch.ones(2, 3)
    assert plain(tensor) is tensor
    assert plain(tensor.t()).tolist() == tensor.t().tolist()
    assert plain(tensor.t()).data_ptr() != tensor.data_ptr()
    conjugated = torch.tensor([1 + 2j]).conj()
    assert torch.view_as_real(plain(conjugated)).tolist() == [[1.0, -2.0]]
    wanted = torch.ones(3, requires_grad=True)
    assert plain(wanted).data_ptr() == wanted.data_ptr()
    assert not plain(wanted[::2]).requires_grad


# -- pieces -----------------------------------------------------------------------------------------------------------

DIVISIONS = st.lists(st.integers(0, 40), max_size=8)


@given(DIVISIONS, st.lists(st.integers(1, 60), max_size=60), st.booleans())
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


@given(DIVISIONS, st.lists(st.integers(1, 60), max_size=60))
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

    monkeypatch.setattr("asynccomm.backends.shm.vectors.plain", watched)
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
