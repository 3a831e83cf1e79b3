"""How reductions travel and are combined."""

import os
import threading
from itertools import product

import torch

from asynccomm.backends.shm.reduction import SERIAL, Reduction, reduction_for
from asynccomm.ops.reduce_op import ReduceOp
from tests.cases import cases


@cases(
    "dtype, op, travels",
    [
        (torch.float32, ReduceOp.SUM, torch.float32),
        (torch.float64, ReduceOp.AVG, torch.float64),
        (torch.bfloat16, ReduceOp.SUM, torch.bfloat16),  # half the bytes
        (torch.float16, ReduceOp.PREMUL_SUM(0.1), torch.float32),  # the product is not rounded
        (torch.complex64, ReduceOp.SUM, torch.float32),
        (torch.complex32, ReduceOp.SUM, torch.float16),
        (torch.int8, ReduceOp.SUM, torch.int8),
        (torch.int8, ReduceOp.AVG, torch.int32),
        (torch.bool, ReduceOp.SUM, torch.uint8),
        (torch.uint16, ReduceOp.SUM, torch.int32),
    ],
)
def test_dtype_on_the_way(dtype: torch.dtype, op: ReduceOp, travels: torch.dtype) -> None:
    assert Reduction(dtype, op, 3).dtype == travels


def test_reductions_are_kept_unless_they_have_a_factor() -> None:
    assert reduction_for(torch.float32, ReduceOp.SUM, 2) is reduction_for(torch.float32, ReduceOp.SUM, 2)
    assert reduction_for(torch.float32, ReduceOp.SUM, 2) is not reduction_for(torch.float32, ReduceOp.SUM, 3)
    two, three = (reduction_for(torch.float32, ReduceOp.PREMUL_SUM(f), 2) for f in (2.0, 3.0))
    assert (two.contribution(torch.ones(1)).item(), three.contribution(torch.ones(1)).item()) == (2.0, 3.0)


@cases("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_plain_tensors_are_used_as_they_are(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 4, dtype=dtype)
    reduction = Reduction(dtype, ReduceOp.SUM, 2)
    assert reduction.contribution(tensor).data_ptr() == tensor.data_ptr()
    target, land = reduction.target(tensor)
    assert target.data_ptr() == tensor.data_ptr()
    assert land is None
    assert reduction.contribution(tensor).numel() == target.numel()


@cases("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint64])
def test_several_plain_tensors_are_used_as_they_are(dtype: torch.dtype) -> None:
    tensors = [torch.ones(3, 4, dtype=dtype), torch.ones(2, dtype=dtype)]
    reduction = Reduction(dtype, ReduceOp.SUM, 2)
    assert all(a is b for a, b in zip(reduction.contributions(tensors), tensors, strict=True))
    targets, lands = reduction.targets(tensors)
    assert all(a is b for a, b in zip(targets, tensors, strict=True))
    assert lands == []


def test_several_tensors_one_of_which_is_not_plain() -> None:
    tensors = [torch.ones(2), torch.zeros(4, 2)[:, 0]]
    reduction = Reduction(torch.float32, ReduceOp.SUM, 2)
    assert [c.is_contiguous() for c in reduction.contributions(tensors)] == [True, True]
    targets, lands = reduction.targets(tensors)
    assert targets[0] is tensors[0]
    targets[1].fill_(5)
    assert len(lands) == 1
    lands[0]()
    assert tensors[1].tolist() == [5.0] * 4


def test_several_tensors_that_travel_wider() -> None:
    tensors = [torch.tensor([100], dtype=torch.int8), torch.tensor([50, 51], dtype=torch.int8)]
    reduction = Reduction(torch.int8, ReduceOp.AVG, 2)
    assert [c.dtype for c in reduction.contributions(tensors)] == [torch.int32] * 2
    targets, lands = reduction.targets(tensors)
    for target in targets:
        target.fill_(7)
    for land in lands:
        land()
    assert torch.cat(tensors).tolist() == [7] * 3


def test_other_memory_is_filled_by_land() -> None:
    output = torch.zeros(4, 2)[:, 0]
    reduction = Reduction(torch.float32, ReduceOp.AVG, 2)
    target, land = reduction.target(output)
    reduction.combine([torch.ones(4), torch.full((4,), 3.0)], target)
    assert output.tolist() == [0] * 4
    assert land is not None
    land()
    assert output.tolist() == [2.0] * 4


@cases("size", [1, 2, 3, 5])
def test_half_types_round_once(size: int) -> None:
    rows = [torch.full((2,), value, dtype=torch.float16) for value in (2048.0, 1.0, 1.0, 1.0, 1.0)[:size]]
    out = torch.empty(2, dtype=torch.float16)
    Reduction(torch.float16, ReduceOp.SUM, size).combine(rows, out)
    want = torch.stack([row.float() for row in rows]).sum(0).half()
    assert torch.equal(out, want)


def test_average_of_integers_truncates() -> None:
    out = torch.empty(2, dtype=torch.int64)
    rows = [torch.tensor([-3, 3]), torch.tensor([-2, 2])]
    Reduction(torch.int64, ReduceOp.AVG, 2).combine(rows, out)
    assert out.tolist() == [-2, 2]


def test_one_rank_still_divides_and_multiplies() -> None:
    tensor = torch.ones(2)
    reduction = Reduction(torch.float32, ReduceOp.PREMUL_SUM(3.0), 1)
    out = torch.empty(2)
    reduction.combine([reduction.contribution(tensor)], out)
    assert out.tolist() == [3.0, 3.0]
    assert tensor.tolist() == [1.0, 1.0]


@cases("place", [0, 1])
def test_the_result_may_be_one_of_the_first_two_rows(place: int) -> None:
    rows = [torch.full((2,), 1.0), torch.full((2,), 2.0), torch.full((2,), 4.0)]
    Reduction(torch.float32, ReduceOp.SUM, 3).combine(rows, rows[place])
    assert rows[place].tolist() == [7.0, 7.0]


@cases("dtype, n", product([torch.float32, torch.bfloat16], [SERIAL, SERIAL + 1, 3 * SERIAL]))
def test_long_parts_take_no_more_threads_than_the_one_that_calls(dtype: torch.dtype, n: int) -> None:
    rows = [torch.full((n,), value, dtype=dtype) for value in (1.0, 2.0, 4.0)]
    out = torch.empty(n, dtype=dtype)
    counts: list[int] = []

    def combine() -> None:  # on a thread of its own, which has no OpenMP threads yet
        before = len(os.listdir("/proc/self/task"))
        Reduction(dtype, ReduceOp.AVG, 3).combine(rows, out)
        counts.append(len(os.listdir("/proc/self/task")) - before)

    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        thread = threading.Thread(target=combine)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(usual)
    assert counts[0] <= 0  # others may end meanwhile
    assert torch.equal(out, torch.full((n,), 7.0 / 3).to(dtype))
