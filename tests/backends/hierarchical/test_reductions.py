"""Reductions over two levels: the same as over one, on hosts of any sizes, rounded once, equal bits on all ranks."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.hierarchical import reductions
from asynccomm.ops import AllReduce, Reduce, ReduceScatter, ReduceScatterSingle
from asynccomm.ops.reduce_op import CONSTANTS, ReduceOp
from tests.sampling import examples, exhaustive

from .world import WORLDS, World

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]
DTYPES += [torch.complex64, torch.uint64, torch.float8_e4m3fn]


def whole_numbers(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    """Small numbers, so that every order of additions gives the same."""
    return ((torch.arange(n) * 7 + rank * 3) % 3).to(dtype)


def reduced(tensors: list[Tensor], op: ReduceOp) -> Tensor:
    """The model: all contributions combined at once."""
    result = torch.empty_like(tensors[0])
    rows = [arithmetic.widen(tensor, op) for tensor in tensors]
    total = arithmetic.combine(rows, op, bools=result.dtype == torch.bool)
    arithmetic.narrow(total, result, op, len(tensors))
    return result


def legal(op: ReduceOp, dtype: torch.dtype) -> bool:
    try:
        op.check(dtype)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("hosts", "limit"),
    itertools.product(WORLDS, [0, 1 << 20]) if exhaustive() else [("3+1", 0), ("2x2", 0), ("1+2+3", 1 << 20)],
)  # in parts, by leaders
async def test_every_reduction_of_every_dtype(hosts: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "SMALL", limit)
    monkeypatch.setattr(reductions, "PIECE", 40)
    world = World(WORLDS[hosts])
    size = world.size
    # by default all on one layout: the levels differ in who reduces what, and not by dtype
    for dtype in DTYPES if exhaustive() or hosts == "3+1" else DTYPES[::4]:
        for op in (*CONSTANTS, ReduceOp.PREMUL_SUM(2)):
            if legal(op, dtype):
                check_all(world, [whole_numbers(rank, 5 * size, dtype) for rank in range(size)], op)


def check_all(world: World, inputs: list[Tensor], op: ReduceOp) -> None:
    expected, kept = reduced(inputs, op), [each.clone() for each in inputs]
    outputs = [torch.empty_like(each) for each in inputs]
    note = f"{op} of {expected.dtype}"
    world.run(lambda group: AllReduce.of(group, inputs[group.rank], op, outputs[group.rank]))
    assert all(output.equal(expected) for output in outputs), note
    for call in world.run(lambda group: AllReduce.of(group, inputs[group.rank].clone(), op)):
        assert call.result.equal(expected), note
    calls = world.run(lambda group: ReduceScatterSingle.of(group, None, inputs[group.rank], op))
    assert torch.cat([call.result for call in calls]).equal(expected), note
    for root in (0, world.size - 1):
        outputs[root].zero_()
        world.run(lambda group, root=root: Reduce.of(group, inputs[group.rank], root, op, outputs[group.rank]))
        assert outputs[root].equal(expected), note
    assert all(each.equal(before) for each, before in zip(inputs, kept, strict=True)), note


@pytest.mark.parametrize("hosts", WORLDS)
@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["on rails", "by leaders"])
async def test_uneven_shares(hosts: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "SMALL", limit)
    world = World(WORLDS[hosts])
    counts = [3, 0, 5, 1, 2, 4][: world.size]
    inputs = [whole_numbers(rank, sum(counts), torch.int32) for rank in range(world.size)]
    expected = reduced(inputs, ReduceOp.SUM)
    calls = world.run(
        lambda group: ReduceScatter.of(group, None, inputs[group.rank].split_with_sizes(counts), ReduceOp.SUM)
    )
    for call, share in zip(calls, expected.split_with_sizes(counts), strict=True):
        assert call.result.equal(share)


@pytest.mark.parametrize("hosts", ["2x2", "1+2+3"])
async def test_halves_are_rounded_once(hosts: str) -> None:
    world = World(WORLDS[hosts])
    # 256 + 1 is 256 in bfloat16, where a sum that is rounded between the levels stays
    inputs = [torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16) for rank in range(world.size)]
    expected = torch.tensor([256.0 + world.size - 1]).to(torch.bfloat16)
    for call in world.run(lambda group: AllReduce.of(group, inputs[group.rank].clone(), ReduceOp.SUM)):
        assert call.result.equal(expected)


async def test_the_average_of_integers_is_truncated_once() -> None:
    world = World(WORLDS["2x2"])
    inputs = [torch.tensor([value]) for value in (1, 2, 3, 5)]  # 11 / 4; truncated on each host: (1 + 4) / 2
    for call in world.run(lambda group: AllReduce.of(group, inputs[group.rank], ReduceOp.AVG)):
        assert call.result.item() == 2


@examples(100)
@given(
    hosts=st.sampled_from(sorted(WORLDS)),
    n=st.integers(0, 200),
    seed=st.integers(0, 1 << 30),
    in_parts=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PREMUL_SUM(0.5)]),
)
def test_results_are_near_to_those_in_float64_and_bitwise_equal(
    hosts: str, n: int, seed: int, in_parts: bool, dtype: torch.dtype, op: ReduceOp
) -> None:
    async def check() -> None:
        world = World(WORLDS[hosts])
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(n, generator=generator).to(dtype) for _ in range(world.size)]
        if n:
            inputs[seed % world.size][seed % n] = float("nan")
        expected = reduced([each.double() for each in inputs], op)
        calls = world.run(lambda group: AllReduce.of(group, inputs[group.rank].clone(), op))
        first = calls[0].result
        torch.testing.assert_close(first.double(), expected, rtol=2e-3, atol=2e-3, equal_nan=True)
        for call in calls[1:]:
            assert call.result.view(torch.uint8).equal(first.view(torch.uint8))

    with pytest.MonkeyPatch.context() as patch:
        if in_parts:
            patch.setattr(reductions, "SMALL", 0)
            patch.setattr(reductions, "PIECE", 64)
        asyncio.run(check())
