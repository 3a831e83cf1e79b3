"""Whole collectives on boards, under random interleavings, against the loopback backend's arithmetic."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asynccomm import ops
from asynccomm.backends import loopback
from asynccomm.backends.base import Submission
from asynccomm.backends.shm.collectives import start
from asynccomm.checks import Group
from asynccomm.errors import CollectiveMismatchError
from asynccomm.ops import Call
from asynccomm.reduce_op import ReduceOp

from .world import boards, interleave, submission

KINDS = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "gather",
    "all_to_all_single",
    "barrier",
]
DTYPES = [torch.float32, torch.int64, torch.float64, torch.int8, torch.bfloat16, torch.bool, torch.complex64]


def values(n: int, dtype: torch.dtype, strided: bool, choose: random.Random) -> Tensor:
    """Small whole numbers: sums and products of few are exact in any type and order."""
    generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
    numbers = torch.randint(0, 3, (n, 2) if strided else (n,), generator=generator).to(dtype)
    return numbers[:, 0] if strided else numbers


def make(kind: str, group: Group, n: int, root: int, op: ReduceOp, new: Callable[[int], Tensor]) -> Call:
    size, me = group.size, group.rank
    match kind:
        case "all_reduce":
            return ops.AllReduce.of(group, new(n), op)
        case "broadcast":
            return ops.Broadcast.of(group, new(n), root)
        case "reduce":
            return ops.Reduce.of(group, new(n), root, op)
        case "all_gather":
            return ops.AllGather.of(group, [new(n) for _ in range(size)], new(n))
        case "all_gather_single":
            return ops.AllGatherSingle.of(group, new(n * size), new(n))
        case "reduce_scatter":
            return ops.ReduceScatter.of(group, new(n), [new(n) for _ in range(size)], op)
        case "reduce_scatter_single":
            return ops.ReduceScatterSingle.of(group, new(n), new(n * size), op)
        case "scatter":
            return ops.Scatter.of(group, new(n), [new(n) for _ in range(size)] if me == root else None, root)
        case "gather":
            return ops.Gather.of(group, [new(n) for _ in range(size)] if me == root else None, new(n), root)
        case "all_to_all_single":
            return ops.AllToAllSingle.of(group, new(n * size), new(n * size))
        case _:
            return ops.Barrier.of(group)


def copied(call: Call) -> Call:
    """The same on tensors of its own, aliases kept."""
    twins: dict[int, Tensor] = {}

    def twin(tensor: Tensor) -> Tensor:
        return twins.setdefault(id(tensor), tensor.clone())

    return Call(call.op, tuple(map(twin, call.inputs)), tuple(map(twin, call.outputs)), None)


def run_both(calls: list[list[Call]], size: int, *, chunk: int, whole: int, choose: random.Random) -> None:
    """Run ``calls[i][rank]`` on boards, and compare everything with what loopback makes of the same."""
    expected = [[copied(call) for call in row] for row in calls]
    for seq, row in enumerate(expected):
        loopback._perform([submission(call, seq) for call in row])
    programs = [[submission(row[rank], seq) for seq, row in enumerate(calls)] for rank in range(size)]
    interleave(boards(size, chunk), programs, whole, choose)
    for row, expected_row in zip(calls, expected, strict=True):
        for rank, (call, want) in enumerate(zip(row, expected_row, strict=True)):
            for mine, theirs in zip((*call.inputs, *call.outputs), (*want.inputs, *want.outputs), strict=True):
                assert torch.equal(mine, theirs), f"{call.op} on rank {rank}: {mine} != {theirs}"


@given(
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1, 2, 3, 4, 5, 8]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    whole=st.sampled_from([0, 64, 1024]),
)
@settings(max_examples=150, deadline=None)
def test_any_sequence_in_any_interleaving(seed: int, size: int, kinds: list[str], whole: int) -> None:
    choose = random.Random(seed)
    calls = []
    for kind in kinds:
        n = choose.choice([0, 1, 2, 7, 64, 255, 600, 1500])
        root = choose.randrange(size)
        dtype = choose.choice(DTYPES)
        legal = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.BXOR]
        op = choose.choice([o for o in legal if _legal(o, dtype)])
        strided = choose.random() < 0.2
        calls.append(
            [
                make(
                    kind,
                    Group("t", rank, size, torch.device("cpu")),
                    n,
                    root,
                    op,
                    partial(values, dtype=dtype, strided=strided, choose=choose),
                )
                for rank in range(size)
            ]
        )
    run_both(calls, size, chunk=1024, whole=whole, choose=choose)


def _legal(op: ReduceOp, dtype: torch.dtype) -> bool:
    try:
        op.check(dtype)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.int16, torch.uint16, torch.uint64, torch.int32])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter_single"])
@pytest.mark.parametrize("whole", [0, 1024])
def test_every_reduction_of(dtype: torch.dtype, kind: str, whole: int) -> None:
    choose = random.Random(1)
    reductions = [getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")]
    reductions = [op for op in [*reductions, ReduceOp.PREMUL_SUM(2)] if _legal(op, dtype)]
    for size in (1, 2, 3):
        groups = [Group("t", rank, size, torch.device("cpu")) for rank in range(size)]
        calls = [
            [make(kind, g, 700, 0, op, lambda n: values(n, dtype, False, choose)) for g in groups] for op in reductions
        ]
        run_both(calls, size, chunk=1024, whole=whole, choose=choose)


def test_one_byte_floats_are_moved() -> None:
    choose = random.Random(1)
    groups = [Group("t", rank, 3, torch.device("cpu")) for rank in range(3)]
    new = lambda n: values(n, torch.float32, False, choose).to(torch.float8_e4m3fn)  # noqa: E731
    calls = [[make("all_gather", g, 2000, 0, ReduceOp.SUM, new) for g in groups]]
    expected = [copied(call) for call in calls[0]]
    loopback._perform([submission(call, 0) for call in expected])
    interleave(boards(3), [[submission(call, 0)] for call in calls[0]], 0, choose)
    for call, want in zip(calls[0], expected, strict=True):
        for mine, theirs in zip(call.outputs, want.outputs, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("n", [50, 5000])
def test_all_ranks_get_the_same_bits(dtype: torch.dtype, kind: ReduceOp, n: int) -> None:
    choose = random.Random(1)
    size = 5
    tensors = [torch.randn(n).to(dtype) * 10.0 ** (rank - 2) for rank in range(size)]
    exact = torch.stack([t.to(torch.float64) for t in tensors]).sum(0)
    calls = [ops.AllReduce.of(Group("t", r, size, torch.device("cpu")), t, kind) for r, t in enumerate(tensors)]
    interleave(boards(size), [[submission(call, 0)] for call in calls], 512, choose)
    for tensor in tensors[1:]:
        assert torch.equal(tensor, tensors[0])
    exact = exact / size if kind is ReduceOp.AVG else exact
    assert torch.allclose(tensors[0].to(torch.float64), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_half_types_are_added_in_single_precision() -> None:
    size = 4  # each 1 would be lost one by one beside 2048 in float16
    tensors = [torch.full((3,), value, dtype=torch.float16) for value in (2048.0, 1.0, 1.0, 2.0)]
    calls = [ops.AllReduce.of(Group("t", r, size, torch.device("cpu")), t, ReduceOp.SUM) for r, t in enumerate(tensors)]
    interleave(boards(size), [[submission(call, 0)] for call in calls], 512, random.Random(1))
    assert tensors[3].tolist() == [2052.0] * 3


@pytest.mark.parametrize("n", [3, 3000])
def test_in_place_forms(n: int) -> None:
    size = 3
    groups = [Group("t", rank, size, torch.device("cpu")) for rank in range(size)]
    gathered = [torch.full((size * n,), -1.0) for _ in range(size)]
    for rank in range(size):
        gathered[rank][rank * n : (rank + 1) * n] = torch.arange(n) + 1000.0 * rank
    swapped = [torch.arange(size * n) + 10_000.0 * rank for rank in range(size)]
    scattered = [torch.arange(size * n, dtype=torch.float32) for _ in range(size)]
    calls = [
        [ops.AllGatherSingle.of(g, gathered[g.rank], gathered[g.rank][g.rank * n : (g.rank + 1) * n]) for g in groups],
        [ops.AllToAllSingle.of(g, swapped[g.rank], swapped[g.rank]) for g in groups],
        [ops.ReduceScatterSingle.of(g, scattered[g.rank][:n], scattered[g.rank], ReduceOp.SUM) for g in groups],
    ]
    programs = [[submission(row[rank], seq) for seq, row in enumerate(calls)] for rank in range(size)]
    interleave(boards(size), programs, 1024, random.Random(2))
    for rank in range(size):
        assert torch.equal(
            gathered[rank].view(size, n), torch.stack([torch.arange(n) + 1000.0 * r for r in range(size)])
        )
        want = torch.stack([torch.arange(size * n)[rank * n : (rank + 1) * n] + 10_000.0 * r for r in range(size)])
        assert torch.equal(swapped[rank].view(size, n), want)
        assert torch.equal(scattered[rank][:n], 3.0 * torch.arange(rank * n, (rank + 1) * n))


@pytest.mark.parametrize("n", [3, 3000])
def test_overlapping_memory_is_cloned(n: int) -> None:
    size = 2
    memory = [torch.arange(2 * n + 1) + 100_000.0 * rank for rank in range(size)]
    before = [m.clone() for m in memory]
    groups = [Group("t", rank, size, torch.device("cpu")) for rank in range(size)]
    calls = [ops.AllToAllSingle.of(g, memory[g.rank][1:], memory[g.rank][: 2 * n]) for g in groups]
    interleave(boards(size), [[submission(call, 0)] for call in calls], 0, random.Random(3))
    for rank in range(size):
        want = torch.cat([b[: 2 * n][rank * n : (rank + 1) * n] for b in before])
        assert torch.equal(memory[rank][1:], want)


def _mismatch(mine: Callable[[Group], Call], theirs: Callable[[Group], Call]) -> CollectiveMismatchError:
    groups = [Group("t", rank, 2, torch.device("cpu")) for rank in range(2)]
    programs: list[list[Submission]] = [[submission(mine(groups[0]), 7)], [submission(theirs(groups[1]), 7)]]
    with pytest.raises(CollectiveMismatchError) as caught:
        interleave(boards(2), programs, 1024, random.Random(0))
    return caught.value


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (
            lambda g: ops.AllReduce.of(g, torch.ones(2), ReduceOp.SUM),
            lambda g: ops.AllReduce.of(g, torch.ones(3), ReduceOp.SUM),
            ["all_reduce(float32[2], SUM)", "all_reduce(float32[3], SUM)"],
        ),
        (
            lambda g: ops.AllReduce.of(g, torch.ones(2000), ReduceOp.MAX),
            lambda g: ops.Barrier.of(g),
            ["all_reduce(float32[2000], MAX)", "barrier()"],
        ),
        (
            lambda g: ops.Gather.of(g, None, torch.ones(2), 0),
            lambda g: ops.Reduce.of(g, torch.ones(2, dtype=torch.int64), 0, ReduceOp.SUM),
            ["gather(float32[2], root=0)", "reduce(int64[2], root=0, SUM)"],
        ),
    ],
)
def test_a_differing_operation_is_named_not_mixed_up(mine: Any, theirs: Any, words: list[str]) -> None:
    error = _mismatch(mine, theirs)
    assert error.seq == 7
    assert sorted([error.op, error.other_op]) == sorted(words)
    assert {error.rank, error.other_rank} == {0, 1}


def test_a_root_runs_ahead_as_far_as_there_are_banks() -> None:
    world = boards(2, banks=4)
    groups = [Group("t", rank, 2, torch.device("cpu")) for rank in range(2)]
    for i in range(4):
        tensor = torch.full((5,), float(i))
        assert list(start(world[0], submission(ops.Broadcast.of(groups[0], tensor, 0), i), 0)) == []
        tensor.fill_(-1)  # done, so it is the caller's again
    fifth = start(world[0], submission(ops.Broadcast.of(groups[0], torch.full((5,), 4.0), 0), 4), 0)
    assert next(fifth) is False
    for i in range(4):
        received = torch.zeros(5)
        assert list(start(world[1], submission(ops.Broadcast.of(groups[1], received, 0), i), 0)) == []
        assert received.tolist() == [i] * 5
    assert list(fifth) == []
