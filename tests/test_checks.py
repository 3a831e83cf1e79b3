"""Checks that all collectives share. What each of them makes of its arguments is in test_ops.py."""

import itertools
from collections.abc import Sequence

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asynccomm.checks import overlaps_itself


def brute_force(shape: Sequence[int], strides: Sequence[int]) -> bool:
    offsets = [
        sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, shape))
    ]
    return len(set(offsets)) < len(offsets)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=4))
def test_no_overlap_is_missed(dimensions: list[tuple[int, int]]) -> None:
    shape, strides = [n for n, _ in dimensions], [s for _, s in dimensions]
    tensor = torch.empty(200).as_strided(shape, strides)
    if brute_force(shape, strides):
        assert overlaps_itself(tensor)
        assert not tensor.is_contiguous()


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_views_do_not_overlap(data: st.DataObject) -> None:
    tensor = torch.empty(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    for _ in range(data.draw(st.integers(0, 4))):
        dim = data.draw(st.integers(0, max(0, tensor.dim() - 1)))
        match data.draw(st.sampled_from(["slice", "permute", "select", "diagonal", "unsqueeze"])):
            case "slice" if tensor.dim():
                start, step = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
                tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
            case "permute":
                tensor = tensor.permute(data.draw(st.permutations(range(tensor.dim()))))
            case "select" if tensor.dim() and tensor.shape[dim]:
                tensor = tensor.select(dim, 0)
            case "diagonal" if tensor.dim() >= 2:
                tensor = tensor.diagonal(0, dim, (dim + 1) % tensor.dim())
            case "unsqueeze":
                tensor = tensor.unsqueeze(dim)
    assume(tensor.numel())
    assert not brute_force(tensor.shape, tensor.stride())
    assert not overlaps_itself(tensor)
