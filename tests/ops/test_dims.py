"""The single-tensor forms along any dimension, and with sizes that all ranks know: the views that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllToAll,
    Call,
    Gather,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)
from asynccomm.ops.base import layout_of
from asynccomm.ops.dims import (
    all_gather_single,
    all_gather_v,
    all_to_all_v_single,
    gather_single,
    parts_along,
    reduce_scatter_single,
    reduce_scatter_v,
    scatter_single,
)
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.comm.methods.argument_matrix import GROUP, RANK, SIZE, fails, t

F, D, C = torch.float32, torch.float64, torch.complex64
SUM = ReduceOp.SUM


def are_parts(views: tuple[Tensor, ...], whole: Tensor, dim: int, extents: list[int]) -> bool:
    """Whether these are the parts of the caller's own memory."""
    expected = torch.split(whole, extents, dim)
    return len(views) == len(expected) and all(
        a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()
        for a, b in zip(views, expected, strict=True)
    )


def test_all_gather_along_a_dim() -> None:
    output, source = t(2, 12, 3), t(2, 4, 3)
    for dim in (1, -2, np.int64(1)):
        call = all_gather_single(GROUP, output, source, dim)
        assert call.op == AllGather(F, 24, layout=layout_of([1, 2]))
        assert call.inputs[0] is source
        assert are_parts(call.outputs, output, 1, [4] * 3)
        assert call.result is output


@pytest.mark.parametrize("dim", [0, -3, np.int64(0)])
def test_along_the_first_dim_it_is_the_plain_form(dim: Any) -> None:
    output, source = t(6, 4, 3), t(2, 4, 3)
    call = all_gather_single(GROUP, output, source, dim)
    assert call.op == AllGatherSingle(F, 24)
    assert call.outputs[0] is call.result is output
    call = reduce_scatter_single(GROUP, source, output, SUM, dim)
    assert call.op == ReduceScatterSingle(F, 24, SUM)
    assert call.outputs[0] is call.result is source
    assert all_gather_single(GROUP, t(SIZE, 24), source, dim).op == AllGatherSingle(F, 24), "stacked"


def test_a_scalar_counts_as_a_vector() -> None:
    for dim in (0, -1):
        call = all_gather_single(GROUP, None, t(), dim)
        assert call.result.shape == (3,)
        call = gather_single(GROUP, None, t(), RANK, dim)
        assert call.op == Gather(F, 1, RANK)
        assert call.result.shape == (3,)
    for use in (
        lambda: all_gather_single(GROUP, None, t(), 1),
        lambda: reduce_scatter_single(GROUP, None, t(), SUM, 1),
        lambda: gather_single(GROUP, None, t(), RANK, -2),
        lambda: all_gather_v(GROUP, None, t(), [1, 1, 1], 0),
        lambda: reduce_scatter_v(GROUP, None, t(), [1, 1, 1], SUM, 0),
        lambda: scatter_single(GROUP, None, t(), RANK, 0),
    ):
        text = fails(ValueError, use)
        assert text.startswith("input must have a dim ")
        assert text.endswith(", got a scalar")


def test_reduce_scatter_along_a_dim() -> None:
    output, source = t(2, 4, 3), t(2, 12, 3)
    call = reduce_scatter_single(GROUP, output, source, SUM, -2)
    assert call.op == ReduceScatter(F, 24, SUM, layout=layout_of([1, 2]))
    assert are_parts(call.inputs, source, 1, [4] * 3)
    assert call.outputs[0] is call.result is output
    text = fails(ValueError, reduce_scatter_single, GROUP, None, t(3, 4), SUM, 1)
    assert text == "input must divide evenly among 3 ranks along dim 1, got shape (3, 4)"


def test_all_gather_v() -> None:
    output, source = t(2, 8), t(2, 4)
    call = all_gather_v(GROUP, output, source, (1, 4, 3), -1)
    counts = (2, 8, 6)
    assert call.op == AllGather(F, 8, layout=layout_of([1, 2, *counts]), counts=counts)
    assert are_parts(call.outputs, output, 1, [1, 4, 3])
    assert call.result is output
    assert all_gather_v(GROUP, None, t(0, 2), [0, 0, 0], 0).op == AllGatherSingle(F, 0)
    assert all_gather_v(GROUP, None, t(0, 2), [5, 0, 1], 0).result.shape == (6, 2)


def test_sizes_that_are_all_equal() -> None:
    output, source = t(12, 2), t(4, 2)
    call = all_gather_v(GROUP, output, source, [4, 4, 4], 0)
    assert call.op == AllGatherSingle(F, 8)
    assert call.outputs[0] is call.result is output
    call = all_gather_v(GROUP, None, source, [2, 2, 2], 1)
    assert call.op == AllGather(F, 8, layout=layout_of([1, 4]))
    call = reduce_scatter_v(GROUP, source, output, [4, 4, 4], SUM, 0)
    assert call.op == ReduceScatterSingle(F, 8, SUM)
    assert call.outputs[0] is call.result is source
    call = reduce_scatter_v(GROUP, None, t(2, 6), [2, 2, 2], SUM, 1)
    assert call.op == ReduceScatter(F, 4, SUM, layout=layout_of([1, 2]))


@pytest.mark.parametrize("sizes", [[1, 4, 3], [4, 4, 4]], ids=["uneven", "equal"])
def test_an_output_is_of_the_same_shape_whether_sizes_are_equal_or_not(sizes: list[int]) -> None:
    total = sum(sizes)
    text = fails(ValueError, all_gather_v, GROUP, t(total * 2), t(4, 2), sizes, 0)
    assert text == f"output must have shape ({total}, 2), got ({total * 2},)"
    text = fails(ValueError, reduce_scatter_v, GROUP, t(8), t(total, 2), sizes, SUM, 0)
    assert text == "output must have shape (4, 2), got (8,)"


def test_sizes_say_what_this_rank_has() -> None:
    text = fails(ValueError, all_gather_v, GROUP, None, t(2, 4), [1, 5, 3], 1)
    assert text == "sizes[1] must be this rank's extent of input along dim 1, 4, got 5"
    text = fails(ValueError, reduce_scatter_v, GROUP, None, t(2, 4), [1, 5, 3], SUM, -1)
    assert text == "sizes must add up to input's extent along dim 1, 4, got [1, 5, 3]"


def test_reduce_scatter_v() -> None:
    output, source = t(2, 4), t(2, 8)
    call = reduce_scatter_v(GROUP, output, source, [1, 4, 3], SUM, 1)
    counts = (2, 8, 6)
    assert call.op == ReduceScatter(F, 8, SUM, layout=layout_of([1, 2, *counts]), counts=counts)
    assert are_parts(call.inputs, source, 1, [1, 4, 3])
    assert call.outputs[0] is call.result is output
    assert reduce_scatter_v(GROUP, None, t(12), None, SUM, 0).op == ReduceScatterSingle(F, 4, SUM)
    assert reduce_scatter_v(GROUP, None, t(1), [1, 0, 0], SUM, 0).result.shape == (0,)


def test_gather_single() -> None:
    output, source = t(2, 12), t(2, 4)
    call = gather_single(GROUP, output, source, RANK, -1)
    assert call.op == Gather(F, 8, RANK, layout=layout_of([1, 2]))
    assert are_parts(call.outputs, output, 1, [4] * 3)
    assert call.result is output
    assert are_parts(gather_single(GROUP, t(6, 4), source, RANK, 0).outputs, t(6, 4), 0, [2] * 3) is False, "no copy"
    there = gather_single(GROUP, None, source, 0, -1)
    assert there.op == Gather(F, 8, 0, layout=layout_of([1, 2]))
    assert (there.outputs, there.result) == ((), None)
    text = fails(ValueError, gather_single, GROUP, output, source, 0, 1)
    assert text == "output must be None off the root: this is rank 1, the root is 0, got Tensor"


def test_scatter_single() -> None:
    output, source = t(2, 4), t(2, 12)
    call = scatter_single(GROUP, output, source, RANK, -1)
    assert call.op == Scatter(F, 8, RANK, layout=layout_of([1, 2]))
    assert are_parts(call.inputs, source, 1, [4] * 3)
    assert call.outputs[0] is call.result is output
    there = scatter_single(GROUP, output, None, 0, -1)
    assert there.op == Scatter(F, 8, 0, layout=layout_of([1, 2]))
    assert there.inputs == ()
    assert there.outputs[0] is there.result is output
    assert scatter_single(GROUP, t(), None, 0, -1).op == Scatter(F, 1, 0), "a vector of one element"
    text = fails(ValueError, scatter_single, GROUP, output, None, 0, 2)
    assert text == "dim must be in [-2, 2) for output of shape (2, 4), got 2"


@pytest.mark.parametrize(
    "use",
    [
        lambda *shape: all_gather_single(GROUP, None, t(*shape), 1),
        lambda *shape: all_gather_v(GROUP, None, t(*shape), [0, shape[1], 1], 1),
        lambda *shape: reduce_scatter_single(GROUP, None, t(shape[0], 3 * shape[1]), SUM, 1),
        lambda *shape: gather_single(GROUP, None, t(*shape), 0, 1),
        lambda *shape: scatter_single(GROUP, t(*shape), None, 0, 1),
    ],
)
def test_shapes_that_differ_along_other_dims_do_not_fit(use: Callable[..., Any]) -> None:
    one, other = use(2, 6), use(6, 2)
    assert one.op.numel == other.op.numel
    assert not one.op.fits(other.op)
    assert one.op.fits(use(2, 6).op)


def test_scatter_single_of_nothing() -> None:
    text = fails(ValueError, scatter_single, GROUP, t(4), None, RANK, 0)
    assert text == "input must be given on the root (rank 1), got None"
    text = fails(ValueError, scatter_single, GROUP, t(4), t(12), 0, 0)
    assert text == "input must be None off the root: this is rank 1, the root is 0, got Tensor"
    text = fails(ValueError, scatter_single, GROUP, None, None, 0, 0)
    assert text == "output must be given off the root (rank 0), which alone knows its shape; got None"
    text = fails(ValueError, scatter_single, GROUP, None, t(3, 4), RANK, 1)
    assert text == "input must divide evenly among 3 ranks along dim 1, got shape (3, 4)"


WHOLES: list[tuple[str, Callable[[Any], Call], tuple[int, ...]]] = [
    ("all_gather_single", lambda x: all_gather_single(GROUP, x, t(2, 4), 1), (2, 12)),
    ("reduce_scatter_single", lambda x: reduce_scatter_single(GROUP, x, t(2, 12), SUM, 1), (2, 4)),
    ("all_gather_v", lambda x: all_gather_v(GROUP, x, t(2, 4), [1, 4, 3], 1), (2, 8)),
    ("reduce_scatter_v", lambda x: reduce_scatter_v(GROUP, x, t(2, 8), [1, 4, 3], SUM, 1), (2, 4)),
    ("gather_single", lambda x: gather_single(GROUP, x, t(2, 4), RANK, 1), (2, 12)),
    ("scatter_single", lambda x: scatter_single(GROUP, x, t(2, 12), RANK, 1), (2, 4)),
]
wholes = pytest.mark.parametrize(("use", "shape"), [w[1:] for w in WHOLES], ids=[w[0] for w in WHOLES])


@wholes
def test_outputs_have_the_shape(use: Callable[[Any], Call], shape: tuple[int, ...]) -> None:
    given = t(*shape)
    assert use(given).result is given
    for wrong in ((shape[1], shape[0]), (2 * shape[1],), (2, shape[1] + 1), (1, *shape), ()):
        assert fails(ValueError, use, t(*wrong)) == f"output must have shape {shape}, got {wrong}"
    for dtype in (D, C):
        text = fails(ValueError, use, t(*shape, dtype=dtype))
        assert text == f"output has dtype {dtype}, but input has torch.float32"


@wholes
def test_allocated_outputs(use: Callable[[Any], Call], shape: tuple[int, ...]) -> None:
    made = use(None).result
    assert made.shape == shape
    assert (made.dtype, made.device, made.requires_grad) == (F, torch.device("cpu"), False)


def test_allocated_outputs_know_nothing_of_graphs() -> None:
    source = (torch.ones(3, 6, dtype=D, requires_grad=True) * 2).t()
    for call in (
        all_gather_single(GROUP, None, source, 1),
        reduce_scatter_single(GROUP, None, source, SUM, 1),
        reduce_scatter_single(GROUP, None, source, SUM, 0),
        all_gather_v(GROUP, None, source, [3, 3, 1], 1),
        reduce_scatter_v(GROUP, None, source, [1, 2, 0], SUM, 1),
        gather_single(GROUP, None, source, RANK, 1),
        scatter_single(GROUP, None, source, RANK, 1),
        all_to_all_v_single(GROUP, None, source, [1, 2, 3], None),
    ):
        assert not call.result.requires_grad
        assert call.result.is_contiguous()
        assert call.result.dtype == D


def test_parameters_are_written_as_data() -> None:
    output = torch.nn.Parameter(t(2, 12))
    call = all_gather_single(GROUP, output, t(2, 4), 1)
    assert call.result is output
    assert are_parts(call.outputs, output, 1, [4] * 3)


# -- all_to_all_v_single


def test_all_to_all_v() -> None:
    output, source = t(9, 2), t(7, 2)
    call = all_to_all_v_single(GROUP, output, source, [4, 2, 0], [0, 2, 3])
    assert call.op == AllToAll(F, (0, 4, 6), (8, 4, 0))
    assert are_parts(call.inputs, source[:5], 0, [0, 2, 3])
    assert are_parts(call.outputs, output[:6], 0, [4, 2, 0])
    assert call.result is output, "with what is left over"
    assert all_to_all_v_single(GROUP, None, source, [4, 2, 0], [0, 2, 3]).result.shape == (6, 2)


def test_all_to_all_v_with_equal_rows_to_send() -> None:
    call = all_to_all_v_single(GROUP, None, t(6, 2), [4, 2, 0], None)
    assert call.op == AllToAll(F, (4, 4, 4), (8, 4, 0))
    text = fails(ValueError, all_to_all_v_single, GROUP, None, t(4, 2), [1, 1, 1], None)
    assert text.startswith("input must divide evenly among 3 ranks along dim 0 when input_split_sizes is None")
    assert text.endswith("got shape (4, 2)")


@pytest.mark.parametrize("shape", [(0,), (0, 3), (5, 0), (0, 0)])
def test_all_to_all_v_of_nothing(shape: tuple[int, ...]) -> None:
    rows = shape[0]
    call = all_to_all_v_single(GROUP, None, t(*shape), [2, rows, 0], [0, rows, 0])
    assert call.result.shape == (2 + rows, *shape[1:])
    row = torch.Size(shape[1:]).numel()
    assert call.op == AllToAll(F, (0, rows * row, 0), (2 * row, rows * row, 0))


def test_all_to_all_v_is_checked() -> None:
    text = fails(ValueError, all_to_all_v_single, GROUP, None, t(), [1, 1, 1], None)
    assert text == "input must have rows (a dim 0) to be split, got a scalar"
    text = fails(ValueError, all_to_all_v_single, GROUP, None, t(4), [1, 2, 3], [2, 2, 1])
    assert text == "input_split_sizes must add up to at most the 4 rows of input, got [2, 2, 1]"
    text = fails(ValueError, all_to_all_v_single, GROUP, None, t(4), [1, 2, 3], [1, 1, 1])
    assert text == (
        "output_split_sizes[1] must be input_split_sizes[1], 1: both count the rows from this rank to itself; got 2"
    )
    for wrong in (t(5, 2), t(12), t(6, 3), t(6, 2, 1), t()):
        text = fails(ValueError, all_to_all_v_single, GROUP, wrong, t(4, 2), [1, 2, 3], [1, 2, 1])
        assert text == f"output must have at least 6 rows of shape (2,), got shape {tuple(wrong.shape)}"
    text = fails(ValueError, all_to_all_v_single, GROUP, t(6, 2, dtype=D), t(4, 2), [1, 2, 3], [1, 2, 1])
    assert text == "output has dtype torch.float64, but input has torch.float32"


# -- complex and real

EITHER: list[tuple[str, Callable[[torch.dtype, int], Call]]] = [  # of some dtype, with so many times as many columns
    ("all_gather_single", lambda d, k: all_gather_single(GROUP, None, t(2, 4 * k, dtype=d), 0)),
    ("all_gather_single along 1", lambda d, k: all_gather_single(GROUP, None, t(2, 4 * k, dtype=d), 1)),
    ("all_gather_v", lambda d, k: all_gather_v(GROUP, None, t(4, 2 * k, dtype=d), [1, 4, 3], 0)),
    ("all_gather_v of equal sizes", lambda d, k: all_gather_v(GROUP, None, t(4, 2 * k, dtype=d), [4, 4, 4], 0)),
    ("gather_single along 1", lambda d, k: gather_single(GROUP, None, t(2, 4 * k, dtype=d), RANK, 1)),
    ("scatter_single along 1", lambda d, k: scatter_single(GROUP, None, t(2, 12 * k, dtype=d), RANK, 1)),
    (
        "all_to_all_v_single",
        lambda d, k: all_to_all_v_single(GROUP, None, t(7, 2 * k, dtype=d), [4, 2, 0], [0, 2, 3]),
    ),
]


@pytest.mark.parametrize("use", [use for _, use in EITHER], ids=[name for name, _ in EITHER])
def test_ranks_may_differ_in_complex_and_real(use: Callable[[torch.dtype, int], Call]) -> None:
    mine, other = use(C, 1), use(F, 2)
    assert mine.op == other.op
    assert {x.dtype for x in (*mine.inputs, *mine.outputs)} == {C}


# -- a group of one


def test_a_group_of_one() -> None:
    alone = CommInfo("alone", 0, 1, torch.device("cpu"))
    source = t(2, 3)
    assert all_gather_single(alone, None, source, 1).result.shape == (2, 3)
    assert reduce_scatter_single(alone, None, source, SUM, 1).result.shape == (2, 3)
    assert all_gather_v(alone, None, source, [2], 0).result.shape == (2, 3)
    assert reduce_scatter_v(alone, None, source, [3], SUM, 1).result.shape == (2, 3)
    assert gather_single(alone, None, source, 0, 1).result.shape == (2, 3)
    assert scatter_single(alone, None, source, 0, 1).result.shape == (2, 3)
    assert all_to_all_v_single(alone, None, source, [1], [1]).result.shape == (1, 3)


def test_parts() -> None:
    whole = torch.arange(10.0).view(2, 5)
    assert [p.tolist() for p in parts_along(whole, 1, [1, 0, 2])] == [[[0], [5]], [[], []], [[1, 2], [6, 7]]]
    assert parts_along(whole, 0, []) == ()
