"""Lists of tensors as one operation, or one for each dtype. What all share is in test_checks.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm.ops import AllGather, AllReduce, Broadcast, Call, ReduceScatter, TensorOp
from asynccomm.ops.base import layout_of
from asynccomm.ops.dtypes import CODES
from asynccomm.ops.lists import all_gather, all_gather_v, all_reduce, broadcast, reduce_scatter, reduce_scatter_v
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.signature import signature
from asynccomm.ops.validation import CommInfo
from tests.cases import cases
from tests.comm.methods.argument_matrix import GROUP, RANK, SIZE, fails, t

F, D, INT = torch.float32, torch.float64, torch.int32
SUM = ReduceOp.SUM
MOVES: list[Callable[[list[Tensor]], Call]] = [  # of tensors with 8 bytes for each of 4 rows
    lambda tensors: broadcast(GROUP, tensors, 0),
    lambda tensors: all_gather(GROUP, None, tensors),
    lambda tensors: all_gather_v(GROUP, None, tensors, [1, 4, 3], 0),
]


def codes(*dtypes: torch.dtype) -> list[int]:
    return [CODES[dtype] for dtype in dtypes]


def test_one_call_for_each_dtype() -> None:
    tensors = [t(3), t(2, dtype=INT), t(2, 2), t(5, dtype=D), t(1, dtype=INT)]
    calls, result = all_reduce(GROUP, tensors, SUM)
    assert result is tensors
    assert [call.op for call in calls] == [
        AllReduce(F, 7, SUM, layout=layout_of([3, 4])),
        AllReduce(INT, 3, SUM, layout=layout_of([2, 1])),
        AllReduce(D, 5, SUM),
    ]
    for call, numbers in zip(calls, ([0, 2], [1, 4], [3]), strict=True):
        assert all(x is tensors[i] for x, i in zip(call.inputs, numbers, strict=True))
    assert all(call.inputs is call.outputs for call in calls)


def test_one_tensor_is_a_plain_call() -> None:
    ((call,), _) = all_reduce(GROUP, (t(3),), SUM)
    assert call.op == AllReduce(F, 3, SUM)


def test_all_reduce_is_checked_as_a_whole() -> None:
    with pytest.raises(ValueError, match=r"op BAND cannot reduce torch\.float32"):
        all_reduce(GROUP, [t(3, dtype=INT), t(3)], ReduceOp.BAND)


def test_broadcast() -> None:
    tensors = [t(3), t(2, dtype=torch.bool), t(0)]
    here, there = broadcast(GROUP, tensors, RANK), broadcast(GROUP, tensors, 0)
    assert here.op == Broadcast(torch.uint8, 14, RANK, layout=layout_of([12, 2, 0, *codes(F, torch.bool, F)]))
    assert here.result is there.result is tensors
    assert (here.outputs, there.inputs) == ((), ())
    with pytest.raises(ValueError, match=r"root must be in \[0, 3\), got 3"):
        broadcast(GROUP, tensors, 3)


def test_all_gather() -> None:
    tensors = [t(3), t(2, 2, dtype=INT)]
    outputs = tuple([t(1, 3), t(4, dtype=INT)] for _ in range(SIZE))
    call = all_gather(GROUP, outputs, tensors)
    assert call.op == AllGather(torch.uint8, 28, layout=layout_of([12, 16, *codes(F, INT)]))
    assert call.result is outputs
    assert all(a is b for a, b in zip(call.outputs, [x for share in outputs for x in share], strict=True))


def test_allocated_all_gather() -> None:
    tensors = [t(3).requires_grad_(), t(2, 2, dtype=INT).t(), t()]
    result = all_gather(GROUP, None, tensors).result
    assert [[x.shape for x in share] for share in result] == [[x.shape for x in tensors]] * SIZE
    assert [[x.dtype for x in share] for share in result] == [[x.dtype for x in tensors]] * SIZE
    assert not any(x.requires_grad for share in result for x in share)


def test_all_gather_is_checked() -> None:
    tensors = [t(3), t(4, dtype=INT)]
    good = [t(3), t(4, dtype=INT)]

    def use(*shares: object) -> object:
        return all_gather(GROUP, list(shares), tensors)  # type: ignore[arg-type]

    assert fails(ValueError, use, good, good) == "output_lists must have one list for each of the 3 ranks, got 2"
    for wrong in (t(3), 3, None):
        text = fails(TypeError, use, good, good, wrong)
        assert text == f"output_lists[2] must be a list or tuple of tensors, got {type(wrong).__name__}"
    assert fails(ValueError, use, good, good[:1], good) == (
        "output_lists[1] must have as many tensors as tensors, 2, got 1"
    )
    assert fails(ValueError, use, good, [t(3), t(4)], good) == (
        "output_lists[1][1] has dtype torch.float32, but tensors[1] has torch.int32"
    )
    assert fails(ValueError, use, [t(4), good[1]], good, good) == (
        "output_lists[0][0] must have 3 elements (1 x tensors[0]), got 4 (shape (4,))"
    )
    for lists in (t(3), 3, {0: good}):
        text = fails(TypeError, all_gather, GROUP, lists, tensors)
        assert text == f"output_lists must be a list of lists of tensors, got {type(lists).__name__}"


def test_reduce_scatter() -> None:
    inputs = [t(6, 2), t(3, dtype=INT), t(SIZE, 5)]
    outputs = [t(4), t(dtype=INT), t(5)]
    calls, result = reduce_scatter(GROUP, outputs, inputs, SUM)
    assert result is outputs
    assert [call.op for call in calls] == [
        ReduceScatter(F, 9, SUM, layout=layout_of([4, 5])),
        ReduceScatter(INT, 1, SUM, layout=layout_of([1])),
    ]
    floats = calls[0]
    assert [x.numel() for x in floats.inputs] == [4, 5] * SIZE
    assert floats.inputs[2].data_ptr() == inputs[0][2:].data_ptr(), "no copy"
    assert floats.outputs[0] is outputs[0]


def test_allocated_reduce_scatter() -> None:
    _, made = reduce_scatter(GROUP, None, [t(6, 2).requires_grad_(), t(0, 5, dtype=INT), t(3, 0)], SUM)
    assert [x.shape for x in made] == [(2, 2), (0, 5), (1, 0)]
    assert [x.dtype for x in made] == [F, INT, F]
    assert not any(x.requires_grad for x in made)
    text = fails(ValueError, reduce_scatter, GROUP, None, [t(3), t(4)], SUM)
    assert text.startswith("inputs[1] must divide evenly among 3 ranks along dim 0")


def test_reduce_scatter_is_checked() -> None:
    text = fails(ValueError, reduce_scatter, GROUP, [t(1)], [t(3), t(3)], SUM)
    assert text == "inputs must have as many tensors as outputs, 1, got 2"
    text = fails(ValueError, reduce_scatter, GROUP, [t(1), t(2)], [t(3), t(3)], SUM)
    assert text == "inputs[1] must have 6 elements (3 x outputs[1]), got 3 (shape (3,))"
    text = fails(ValueError, reduce_scatter, GROUP, [t(1), t(1, dtype=INT)], [t(3), t(3)], SUM)
    assert text == "inputs[1] has dtype torch.float32, but outputs[1] has torch.int32"
    with pytest.raises(ValueError, match=r"op MAX cannot reduce torch\.complex64"):
        reduce_scatter(GROUP, None, [t(3, dtype=INT), t(3, dtype=torch.complex64)], ReduceOp.MAX)


@pytest.mark.parametrize("tensor", [t(2, 0), t(0), t(0, 3), t(2, 3), t(6), torch.arange(6.0).view(3, 2).t(), t(6, 1)])
def test_chunks_are_of_equal_size_in_row_major_order(tensor: Tensor) -> None:
    numel = tensor.numel() // SIZE
    calls, _ = reduce_scatter(GROUP, [t(numel)], [tensor], SUM)
    for fill, source in calls[0].copies:
        fill(source)
    flat = torch.cat([x.reshape(-1) for x in calls[0].inputs])
    assert flat.equal(tensor.reshape(-1))
    assert [x.numel() for x in calls[0].inputs] == [numel] * SIZE


def target_of(fill: Any) -> Tensor:
    return fill.args[0]  # type: ignore[no-any-return]


def test_only_chunks_that_are_no_views_are_copied_and_not_yet() -> None:
    turned, spread, rows = t(3, 2).t(), t(2, 12)[:, ::2], t(3, 4)[:, 1:]
    (call,), _ = reduce_scatter(GROUP, [t(2), t(4), t(3)], [turned, spread, rows], SUM)
    ((fill, source),) = call.copies
    memory = target_of(fill)
    assert source is turned
    assert [x.data_ptr() for x in call.inputs[::3]] == [memory.data_ptr() + 8 * r for r in range(SIZE)]
    assert {x.untyped_storage().data_ptr() for x in call.inputs[1::3]} == {spread.untyped_storage().data_ptr()}
    assert {x.untyped_storage().data_ptr() for x in call.inputs[2::3]} == {rows.untyped_storage().data_ptr()}
    with torch.inference_mode():
        (call,), _ = reduce_scatter(GROUP, [t(2)], [turned], SUM)
    assert not target_of(call.copies[0][0]).is_inference(), "any thread may write it"


def test_a_group_of_one_takes_scalars() -> None:
    alone = CommInfo("alone", 0, 1, torch.device("cpu"))
    calls, _ = reduce_scatter(alone, [t()], [torch.tensor(3.0)], SUM)
    assert calls[0].inputs[0].numel() == 1


# -- uneven


def test_all_gather_v() -> None:
    inputs, outputs = [t(4, 2), t(4, dtype=INT)], [t(8, 2), t(8, dtype=INT)]
    call = all_gather_v(GROUP, outputs, inputs, [1, 4, 3], 0)
    layout = layout_of([0, 0, 8, 4, 32, 16, 24, 12, *codes(F, INT)])
    assert call.op == AllGather(torch.uint8, 48, layout=layout, counts=(12, 48, 36))
    assert [x.shape for x in call.outputs] == [(1, 2), (1,), (4, 2), (4,), (3, 2), (3,)]
    assert call.outputs[2].data_ptr() == outputs[0][1:].data_ptr()
    assert call.result is outputs
    made = all_gather_v(GROUP, None, [t(2, 4), t(3, 4, dtype=INT).requires_grad_(False)], (1, 4, 3), -1).result
    assert [x.shape for x in made] == [(2, 8), (3, 8)]
    assert [x.dtype for x in made] == [F, INT]


@cases("move", MOVES)
def test_moves_of_one_dtype_are_described_in_it(move: Callable[[list[Tensor]], Call]) -> None:
    reals = move([t(4, 2), t(4, 2)]).op
    assert isinstance(reals, TensorOp)
    assert (reals.dtype, reals.numel) == (F, 16)
    assert move([t(4, dtype=torch.complex64), t(4, 2)]).op == reals


@cases("move", MOVES)
def test_moves_of_other_dtypes_do_not_fit(move: Callable[[list[Tensor]], Call]) -> None:
    lists = [[F, F], [INT, INT], [F, INT], [INT, F], [D, F], [D, INT], [torch.uint8, torch.uint8]]
    ops = [move([t(4, 8 // dtype.itemsize, dtype=dtype) for dtype in dtypes]).op for dtypes in lists]
    assert len({signature(op) for op in ops}) == len(lists)
    assert not any(one.fits(other) for one, other in combinations(ops, 2))


def test_reduce_scatter_v() -> None:
    inputs, outputs = [t(8, 2), t(8, dtype=INT), t(8)], [t(4, 2), t(4, dtype=INT), t(4)]
    calls, result = reduce_scatter_v(GROUP, outputs, inputs, [1, 4, 3], SUM, 0)
    assert [call.op for call in calls] == [
        ReduceScatter(F, 12, SUM, layout=layout_of([0, 0, 0, 2, 1, 8, 4, 6, 3]), counts=(3, 12, 9)),
        ReduceScatter(INT, 4, SUM, layout=layout_of([0, 0, 0, 1, 4, 3]), counts=(1, 4, 3)),
    ]
    assert result is outputs
    assert calls[0].outputs[1] is outputs[2]
    _, made = reduce_scatter_v(GROUP, None, inputs, [8, 0, 0], SUM, 0)
    assert [x.shape for x in made] == [(0, 2), (0,), (0,)]


def test_uneven_lists_are_checked() -> None:
    both = [t(4, 2), t(5, 2)]
    for use in (
        lambda: all_gather_v(GROUP, None, both, [1, 4, 3], 0),
        lambda: reduce_scatter_v(GROUP, None, both, [1, 2, 1], SUM, 0),
    ):
        text = fails(ValueError, use)
        assert text == (
            "inputs must all have one extent along the dimension: inputs[0] has 4, inputs[1] has 5 "
            "(shape (5, 2), dim 0)"
        )
    text = fails(ValueError, all_gather_v, GROUP, None, [t(4)], [1, 5, 3], 0)
    assert text == "sizes[1] must be this rank's extent of inputs along dim 0, 4, got 5"
    text = fails(ValueError, reduce_scatter_v, GROUP, None, [t(4)], [1, 5, 3], SUM, 0)
    assert text == "sizes must add up to inputs' extent along dim 0, 4, got [1, 5, 3]"
    for use in (
        lambda x: all_gather_v(GROUP, x, [t(4), t(4)], [1, 4, 3], 0),
        lambda x: reduce_scatter_v(GROUP, x, [t(8), t(8)], [1, 4, 3], SUM, 0),
    ):
        assert fails(ValueError, use, [t(4)]) == "outputs must have as many tensors as inputs, 2, got 1"
        assert fails(TypeError, use, [t(4), None]).startswith("outputs[1] must be a torch.Tensor, got None")
        text = fails(ValueError, use, [t(1), t(1)])
        assert text.startswith("outputs[0] must have shape (")
        text = fails(ValueError, use, [t(8, dtype=D), t(8)])
        assert text == "outputs[0] has dtype torch.float64, but inputs[0] has torch.float32"
