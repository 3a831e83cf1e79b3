"""Buckets carry the boxes of a plan: each element arrives at its place, in the server's dtype, in limited messages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.testing.conformance.data import DTYPES
from asynccomm.weights import buckets as module
from asynccomm.weights.buckets import ALIGN, Bucket, cut, direct, largest, pack, total, unpack
from asynccomm.weights.layout import Layout
from asynccomm.weights.plan import BoxTransfer, plan

from .test_plan import part, worlds


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(math.prod(shape)) % (2 if dtype == torch.bool else 7)
    return numbers.to(torch.float32).reshape(shape).to(dtype)


def local(whole: Tensor, layout: Layout, name: str) -> Tensor:
    held = layout[name]
    ranges = tuple(slice(start, start + size) for start, size in zip(held.offsets, held.sizes, strict=True))
    return whole[ranges].clone()


def carry(trainers: list[Layout], server: Layout, wholes: dict[str, Tensor], limit: int) -> dict[str, Tensor]:
    """The server's tensors, sent through messages."""
    found = {name: torch.full(target.sizes, 9).to(target.torch_dtype) for name, target in server.items()}
    for layout, transfers in zip(trainers, plan(trainers, server), strict=True):
        tensors = {name: local(wholes[name], layout, name) for name in layout}
        made = cut(transfers, limit)
        assert total(made) == sum(transfer.nbytes for transfer in transfers)
        for bucket in made:
            assert bucket.nbytes <= limit or math.prod(bucket.boxes[0][1].sizes) == 1
            message = direct(bucket, tensors, layout, sending=True)
            if message is None:
                message = torch.zeros(bucket.nbytes, dtype=torch.uint8)
                pack(bucket, tensors, layout, message)
            place = direct(bucket, found, server, sending=False)
            if place is None:
                unpack(bucket, found, server, message)
            else:
                place.copy_(message)
    return found


@given(worlds(), st.integers(1, 64))
def test_every_element_arrives_at_its_place(world: tuple[list[Layout], Layout], limit: int) -> None:
    trainers, server = world
    wholes = {name: values(target.shape, target.torch_dtype) for name, target in server.items()}
    found = carry(trainers, server, wholes, limit)
    for name in server:
        assert torch.equal(found[name], local(wholes[name], server, name)), name


@pytest.mark.parametrize("alone", [1, 1 << 20])
def test_all_dtypes(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALONE", alone)
    halves = [((0, 0), (3, 3)), ((3, 0), (2, 3))]
    trainers: list[Layout] = [{str(dtype): part((5, 3), half, dtype) for dtype in DTYPES} for half in halves]
    server = {str(dtype): part((5, 3), ((0, 1), (5, 2)), dtype) for dtype in DTYPES}
    wholes = {str(dtype): values((5, 3), dtype) for dtype in DTYPES}
    found = carry(trainers, server, wholes, 40)
    for dtype in DTYPES:
        here, there = found[str(dtype)], local(wholes[str(dtype)], server, str(dtype))
        assert torch.equal(here.contiguous().view(torch.uint8), there.contiguous().view(torch.uint8)), dtype


def test_values_are_converted_by_the_sender() -> None:
    whole = torch.tensor([1.0, 1 / 3, 1e30])
    found = carry([{"a": part((3,))}], {"a": part((3,), dtype=torch.bfloat16)}, {"a": whole}, 64)
    assert torch.equal(found["a"], whole.bfloat16())


def box(rows: int, name: str = "a") -> BoxTransfer:
    return BoxTransfer(name, name, torch.float32, (0, 0), (rows, 4))


def test_small_boxes_share_a_message_and_large_ones_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALONE", 64)
    found = cut([box(1, "a"), box(4, "b"), box(1, "c"), box(2, "d")], 48)
    assert [[(start, piece.name, piece.sizes[0]) for start, piece in bucket.boxes] for bucket in found] == [
        [(0, "a", 1)],
        [(0, "b", 3)],
        [(0, "b", 1), (16, "c", 1)],
        [(0, "d", 2)],
    ]
    alone = cut([box(1, "a"), box(4, "b"), box(1, "c")], 1 << 10)
    assert [[piece.name for _, piece in bucket.boxes] for bucket in alone] == [["b"], ["a", "c"]]


def test_boxes_are_aligned() -> None:
    odd = BoxTransfer("odd", "odd", torch.bool, (0,), (3,))
    (bucket,) = cut([odd, box(1)], 1 << 10)
    assert [start for start, _ in bucket.boxes] == [0, ALIGN]


def test_only_contiguous_boxes_of_the_right_dtype_travel_without_a_copy() -> None:
    layout = {"a": part((4, 4))}
    rows = Bucket(((0, box(2)),), 32)
    columns = Bucket(((0, BoxTransfer("a", "a", torch.float32, (0, 0), (4, 2))),), 32)
    tensors = {"a": torch.arange(16.0).reshape(4, 4)}
    found = direct(rows, tensors, layout, sending=True)
    assert found is not None
    assert found.data_ptr() == tensors["a"].data_ptr()
    assert direct(columns, tensors, layout, sending=True) is None
    assert direct(rows, {"a": tensors["a"].double()}, layout, sending=True) is None
    assert direct(rows, {"a": tensors["a"].T.contiguous().T}, layout, sending=True) is None
    negative = torch.complex(torch.zeros(4, 4), tensors["a"]).conj().imag
    assert direct(rows, {"a": negative}, layout, sending=True) is None
    element = Bucket(((0, BoxTransfer("b", "b", torch.float32, (0,), (1,))),), 4)
    alone = torch.arange(12.0).view(3, 4)[:, 1][:1]  # a stride of 4, which torch counts as contiguous
    found = direct(element, {"b": alone}, {"b": part((1,))}, sending=False)
    assert found is not None
    found.copy_(torch.tensor([5.0]).view(torch.uint8))
    assert alone.item() == 5
    assert largest([rows, columns], [False, True]) == 32
    assert largest([rows], [False]) == 0
