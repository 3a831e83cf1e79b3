"""The memory of collectives that frames carry, as C gets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.carried import CarriedCall
from asynccomm.backends.gloo.frames import LONG, PAIR
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo

SIZE = 3
UNPLANNED: Any = None


class Wrapper(Tensor):
    """A tensor without memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def group(rank: int, size: int = SIZE) -> CommInfo:
    return CommInfo("t", rank, size, torch.device("cpu"))


def kind_of(call: Call, rank: int = 0, size: int = SIZE) -> CarriedCall | None:
    return CarriedCall.of(Submission(call, UNPLANNED), rank, size)


def memory(call: Call, rank: int) -> tuple[list[int], list[int], int, int]:
    kind = kind_of(call, rank)
    assert kind is not None
    found = kind.memory(call.inputs, call.outputs)
    assert found is not None
    gives, takes = ([found[k][peer] if peer != rank else 0 for peer in range(SIZE)] for k in range(2))
    return gives, takes, found.source, found.target


def at(tensor: Tensor, row: int = 0) -> int:
    return tensor[row].data_ptr() if row else tensor.data_ptr()


def test_a_broadcast_goes_from_the_root() -> None:
    tensor = torch.zeros(4)
    assert memory(Broadcast.of(group(1), tensor, 1), 1) == ([at(tensor), 0, at(tensor)], [0, 0, 0], 0, 0)
    assert memory(Broadcast.of(group(0), tensor, 1), 0) == ([0, 0, 0], [0, at(tensor), 0], 0, 0)


def test_reductions_take_contributions_where_the_result_is() -> None:
    tensor, out = torch.zeros(4), torch.ones(4)
    everywhere = [at(tensor), 0, at(tensor)], [1, 0, 1]
    assert memory(AllReduce.of(group(1), tensor, ReduceOp.SUM), 1) == (*everywhere, at(tensor), at(tensor))
    assert memory(AllReduce.of(group(1), tensor, ReduceOp.SUM, out), 1) == (*everywhere, at(tensor), at(out))
    assert memory(Reduce.of(group(1), tensor, 1, ReduceOp.SUM), 1) == ([0] * 3, [1, 0, 1], at(tensor), at(tensor))
    assert memory(Reduce.of(group(0), tensor, 1, ReduceOp.SUM), 0) == ([0, at(tensor), 0], [0] * 3, 0, 0)


def test_gathers_have_a_place_for_each_rank() -> None:
    tensor, whole = torch.zeros(4), torch.zeros(SIZE, 4)
    rows = [whole[k] for k in range(SIZE)]
    places = [at(whole), 0, at(whole, 2)]
    gives = [at(tensor), 0, at(tensor)]
    assert memory(AllGather.of(group(1), rows, tensor), 1) == (gives, places, at(tensor), at(whole, 1))
    assert memory(AllGatherSingle.of(group(1), whole, tensor), 1) == (gives, places, at(tensor), at(whole, 1))
    assert memory(Gather.of(group(1), rows, tensor, 1), 1) == ([0] * 3, places, at(tensor), at(whole, 1))
    assert memory(Gather.of(group(0), None, tensor, 1), 0) == ([0, at(tensor), 0], [0] * 3, 0, 0)
    assert memory(Scatter.of(group(1), tensor, rows, 1), 1) == (places, [0] * 3, at(whole, 1), at(tensor))
    assert memory(Scatter.of(group(0), tensor, None, 1), 0) == ([0] * 3, [0, at(tensor), 0], 0, 0)


def test_parts_go_to_their_ranks() -> None:
    tensor, whole = torch.zeros(4), torch.zeros(SIZE, 4)
    rows = [whole[k] for k in range(SIZE)]
    gives = [at(whole), 0, at(whole, 2)]
    summed = (gives, [1, 0, 1], at(whole, 1), at(tensor))
    assert memory(ReduceScatter.of(group(1), tensor, rows, ReduceOp.SUM), 1) == summed
    assert memory(ReduceScatterSingle.of(group(1), tensor, whole, ReduceOp.SUM), 1) == summed
    places = torch.zeros(SIZE, 4)
    moved = (gives, [at(places), 0, at(places, 2)], at(whole, 1), at(places, 1))
    assert memory(AllToAllSingle.of(group(1), places, whole), 1) == moved
    in_place = ReduceScatterSingle.of(group(1), whole[1], whole, ReduceOp.SUM)
    assert memory(in_place, 1) == (gives, [1, 0, 1], at(whole, 1), at(whole, 1))
    shifted = Call(in_place.op, (whole,), (whole.view(-1)[6:10],), None)
    kind = kind_of(shifted, 1)
    assert kind is not None
    assert kind.memory(shifted.inputs, shifted.outputs) is None, "the sum would overwrite its own terms"


def test_a_barrier_moves_nothing() -> None:
    assert memory(Barrier.of(group(0)), 0) == ([0] * 3, [0] * 3, 0, 0)


def test_c_reduces_where_its_bits_are_those_of_torch() -> None:
    kernels = {}
    for reduction in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            kind = kind_of(AllReduce.of(group(0), torch.zeros(4, dtype=dtype), reduction))
            assert kind is not None
            kernels[reduction.type.name, dtype] = kind.kernel
    by_python = {name for name, kernel in kernels.items() if kernel == (-2, 0)}
    assert by_python == {*kernels} - {("SUM", torch.float32), ("SUM", torch.int32), ("MAX", torch.int32)}


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_know_by_the_size_whether_frames_carry_a_call(rank: int) -> None:
    """A rank that contributes nothing itself has to know, too."""
    n = PAIR // 4
    assert kind_of(Broadcast.of(group(rank, 2), torch.zeros(n), 0), rank, 2) is not None
    assert kind_of(Broadcast.of(group(rank, 2), torch.zeros(n + 1), 0), rank, 2) is None
    n = LONG // 4
    for numel, carried in ((n, True), (n + 1, False)):
        parts = [torch.zeros(numel) for _ in range(SIZE)]
        given = parts if rank == 0 else None
        assert (kind_of(Scatter.of(group(rank), torch.zeros(numel), given, 0), rank) is not None) is carried
        assert (kind_of(Gather.of(group(rank), given, torch.zeros(numel), 0), rank) is not None) is carried


@pytest.mark.parametrize("size", [2, SIZE])
def test_parts_are_as_long_as_what_goes_to_all_ranks(size: int) -> None:
    n = (PAIR if size == 2 else LONG // 2) // 4
    for numel, carried in ((n, True), (n + 1, False)):
        whole = torch.zeros(size * numel)
        summed = ReduceScatterSingle.of(group(0, size), torch.zeros(numel), whole, ReduceOp.SUM)
        moved = AllToAllSingle.of(group(0, size), torch.zeros(size * numel), whole)
        for call in (summed, moved):
            kind = kind_of(call, 0, size)
            assert (kind is not None) is carried
            assert kind is None or kind.nbytes == 4 * numel


def test_calls_that_are_not_plain_have_no_memory() -> None:
    memory = torch.zeros(8)
    strided = AllReduce.of(group(0), memory[::2], ReduceOp.SUM)
    shifted = AllReduce.of(group(0), memory[:4], ReduceOp.SUM, memory[1:5])
    shared = AllGather((torch.float32), 4), (torch.zeros(4),), (memory[:4], memory[2:6], memory[4:])
    with torch.inference_mode():
        inferred = AllReduce.of(group(0), torch.zeros(4), ReduceOp.SUM)
    for call in (strided, shifted, Call(*shared, None), inferred):
        kind = kind_of(call)
        assert kind is not None
        assert kind.memory(call.inputs, call.outputs) is None
    without = Tensor._make_wrapper_subclass(Wrapper, (4,), dtype=torch.float32)
    kind = kind_of(AllReduce.of(group(0), torch.zeros(4), ReduceOp.SUM))
    assert kind is not None
    assert kind.memory((without,), (without,)) is None
    assert kind_of(AllReduce.of(group(0), torch.zeros(0), ReduceOp.SUM)) is None
