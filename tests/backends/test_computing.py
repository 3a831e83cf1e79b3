"""What the outputs of a collective become of the ranks' contributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asynccomm import ReduceOp
from asynccomm.backends.computing import contributed_bytes, contribution, fill, perform
from asynccomm.backends.regions import bytes_of
from asynccomm.ops import (
    AllGather,
    AllReduce,
    AllToAll,
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
from asynccomm.ops.validation import CommInfo
from asynccomm.testing.conformance.data import combinations, expect_equal, reduced, sample, sentinel, strided
from tests.cases import cases

SIZE = 3


def group(rank: int) -> CommInfo:
    return CommInfo("t", rank, SIZE, torch.device("cpu"))


def one_by_one(calls: Sequence[Call]) -> None:
    """Each rank computes its own."""
    given = [contribution(call.op, call.inputs).clone() for call in calls]
    for call, own in zip(calls, given, strict=True):
        assert len(own) == contributed_bytes(call.op, call.inputs)
    for rank, call in enumerate(calls):
        perform([call.op for call in calls], given, {rank: call.outputs})


def of_all(make: Any, *arguments: Any) -> list[Call]:
    return [make(group(rank), *[argument(rank) for argument in arguments]) for rank in range(SIZE)]


@cases("dtype, op", list(combinations()))
def test_reductions(dtype: torch.dtype, op: ReduceOp) -> None:
    shape = (SIZE, 4)
    tensors = [strided(sample(rank, shape, dtype)) for rank in range(SIZE)]
    inputs = [tensor.clone() for tensor in tensors]
    expected = reduced([sample(rank, shape, dtype) for rank in range(SIZE)], op)
    one_by_one([AllReduce.of(group(rank), tensor, op) for rank, tensor in enumerate(tensors)])
    assert all(torch.equal(bytes_of(tensor), bytes_of(tensors[0])) for tensor in tensors)
    expect_equal(tensors[0], expected, "all_reduce")
    at_root = inputs[1].clone()
    one_by_one([Reduce.of(group(rank), at_root if rank == 1 else inputs[rank], 1, op) for rank in range(SIZE)])
    expect_equal(at_root, expected, "reduce")
    parts = [sentinel((4,), dtype) for _ in range(SIZE)]
    one_by_one([ReduceScatterSingle.of(group(rank), parts[rank], inputs[rank], op) for rank in range(SIZE)])
    expect_equal(torch.stack(parts), expected, "reduce_scatter_single")


def test_products_are_not_rounded() -> None:
    tensors = [torch.full((2,), 3, dtype=torch.bfloat16) for _ in range(SIZE)]
    factor = ReduceOp.PREMUL_SUM(1 / 3 + 1e-4)
    calls = [AllReduce.of(group(rank), tensor, factor) for rank, tensor in enumerate(tensors)]
    assert contributed_bytes(calls[0].op, calls[0].inputs) == 8
    one_by_one(calls)
    assert tensors[0].tolist() == [3, 3]


def test_each_rank_has_its_factor() -> None:
    tensors = [torch.ones(2) for _ in range(SIZE)]
    one_by_one([AllReduce.of(group(rank), t, ReduceOp.PREMUL_SUM(10**rank)) for rank, t in enumerate(tensors)])
    assert tensors[2].tolist() == [111, 111]


def test_uneven_shares_of_a_reduction() -> None:
    counts = [2, 0, 3]
    outputs = [torch.zeros(n) for n in counts]
    inputs = [[sample(rank, (n,), salt=i) for i, n in enumerate(counts)] for rank in range(SIZE)]
    one_by_one([ReduceScatter.of(group(rank), outputs[rank], inputs[rank], ReduceOp.SUM) for rank in range(SIZE)])
    for i, output in enumerate(outputs):
        assert torch.equal(output, sum(inputs[rank][i] for rank in range(SIZE)) + torch.zeros(counts[i]))


def test_moves() -> None:
    def mine(rank: int, n: int = 2) -> Tensor:
        return torch.full((n,), float(rank))

    tensors = [mine(rank) for rank in range(SIZE)]
    one_by_one([Broadcast.of(group(rank), tensors[rank], 2) for rank in range(SIZE)])
    assert [tensor.tolist() for tensor in tensors] == [[2, 2]] * SIZE
    lists = [[torch.zeros(n) for n in (1, 2, 3)] for _ in range(SIZE)]
    one_by_one([AllGather.of(group(rank), lists[rank], mine(rank, rank + 1)) for rank in range(SIZE)])
    assert [[t.tolist() for t in got] for got in lists] == [[[0], [1, 1], [2, 2, 2]]] * SIZE
    at_root = [torch.zeros(2) for _ in range(SIZE)]
    one_by_one([Gather.of(group(rank), at_root if rank == 1 else None, mine(rank), 1) for rank in range(SIZE)])
    assert [t.tolist() for t in at_root] == [[0, 0], [1, 1], [2, 2]]
    got = [torch.zeros(2) for _ in range(SIZE)]
    given = [mine(5), mine(6), mine(7)]
    one_by_one([Scatter.of(group(rank), got[rank], given if rank == 0 else None, 0) for rank in range(SIZE)])
    assert [t.tolist() for t in got] == [[5, 5], [6, 6], [7, 7]]
    singles = [torch.zeros(6) for _ in range(SIZE)]
    one_by_one([AllToAllSingle.of(group(r), singles[r], torch.arange(6.0) + 10 * r) for r in range(SIZE)])
    assert singles[1].tolist() == [2, 3, 12, 13, 22, 23]
    one_by_one(of_all(Barrier.of))


def test_uneven_all_to_all() -> None:
    def count(source: int, target: int) -> int:
        return (source + 2 * target) % 4

    calls, outputs = [], []
    for rank in range(SIZE):
        inputs = [torch.full((count(rank, peer),), 10.0 * rank + peer) for peer in range(SIZE)]
        outputs.append([torch.zeros(count(peer, rank)) for peer in range(SIZE)])
        calls.append(AllToAll.of(group(rank), outputs[rank], inputs))
    one_by_one(calls)
    for rank, got in enumerate(outputs):
        assert [t.tolist() for t in got] == [[10.0 * peer + rank] * count(peer, rank) for peer in range(SIZE)]


def test_nothing_at_all() -> None:
    empty = [torch.zeros(0) for _ in range(SIZE)]
    one_by_one([AllReduce.of(group(rank), empty[rank], ReduceOp.SUM) for rank in range(SIZE)])
    one_by_one([AllToAllSingle.of(group(rank), empty[rank], torch.zeros(0)) for rank in range(SIZE)])
    fill((), torch.ones(3))


def test_bytes_at_any_address() -> None:
    data = torch.arange(25, dtype=torch.uint8)[1:]
    outputs = [torch.zeros(3, dtype=torch.uint8), torch.zeros(2, dtype=torch.complex64), torch.zeros(5)[::2][:1]]
    fill(outputs, torch.cat([data[:23], data[:0]]))
    assert bytes(b"".join(bytes_of(output).numpy().tobytes() for output in outputs)) == bytes(range(1, 24))
