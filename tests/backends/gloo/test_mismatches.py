"""Random pairs of different calls: every rank gets the error that names both, and no rank gets a result or dies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynccomm import BrokenError, CollectiveMismatchError, Comm, ReduceOp, Work, new_comm
from asynccomm.backends.gloo.messages import SHORT
from tests.sampling import some

SIZES = [1, 3, 256, 257, 5000, 70_000]
DTYPES = [torch.float32, torch.int32, torch.float16, torch.bool]
KINDS = ["all_reduce", "reduce", "broadcast", "gather", "scatter", "all_gather", "all_gather_v", "reduce_scatter"]
KINDS += ["all_to_all", "barrier", "object", "coalesced", "tagged"]
Make = Callable[[Comm], Work[Any]]


def uneven(comm: Comm, n: int) -> list[int]:
    return [n + rank for rank in range(comm.size)]


def call_of(choose: random.Random, size: int) -> tuple[str, Make]:
    """A random call, with a text that is equal for equal calls."""
    kind = choose.choice(KINDS)
    n, dtype, root = choose.choice(SIZES), choose.choice(DTYPES), choose.randrange(size)
    reduction = choose.choice([ReduceOp.SUM, ReduceOp.MAX])

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype)

    calls: dict[str, tuple[tuple[object, ...], Make]] = {
        "all_reduce": ((n, dtype, reduction), lambda c: c.all_reduce(ones(n), reduction)),
        "reduce": ((n, dtype, reduction, root), lambda c: c.reduce(ones(n), root, reduction)),
        "broadcast": ((n, dtype, root), lambda c: c.broadcast(ones(n), root)),
        "gather": ((n, dtype, root), lambda c: c.gather_single(None, ones(n), root)),
        "scatter": (
            (n, dtype, root),
            lambda c: c.scatter_single(ones(n), ones(n * c.size) if c.rank == root else None, root),
        ),
        "all_gather": ((n, dtype), lambda c: c.all_gather_single(None, ones(n))),
        "all_gather_v": ((n, dtype), lambda c: c.all_gather_v(None, ones(n + c.rank), uneven(c, n))),
        "reduce_scatter": (
            (n, dtype, reduction),
            lambda c: c.reduce_scatter_single(None, ones(n * c.size), reduction),
        ),
        "all_to_all": ((n, dtype), lambda c: c.all_to_all_single(ones(n * c.size), ones(n * c.size))),
        "barrier": ((), lambda c: c.barrier()),
        "object": ((root,), lambda c: c.broadcast_object("x" * n if c.rank == root else None, root)),
        "coalesced": ((n, dtype), lambda c: c.all_reduce_coalesced([ones(n), ones(2)], ReduceOp.MAX)),
        "tagged": ((n, dtype), lambda c: c.all_reduce(ones(n), ReduceOp.MAX, tag="tag")),
    }
    details, make = calls[kind]
    return f"{kind}{details}", make


@pytest.mark.parametrize("seed", some(range(200), 6))
@pytest.mark.ranks([2, 3], backend="gloo", timeout=120)
async def test_different_calls_are_named_on_every_rank(comm: Comm, seed: int) -> None:
    """With and without a program that predicts the call; the odd rank may be any, and may call early or late."""
    choose = random.Random(f"{seed} of {comm.size}")
    (text, usual), (other_text, other) = call_of(choose, comm.size), call_of(choose, comm.size)
    if text == other_text:
        return
    odd = choose.randrange(comm.size)
    warm = choose.choice([0, 5])
    late = choose.choice([None, *range(comm.size)])
    case = f"seed {seed}: {text}, but {other_text} on rank {odd}, after {warm} calls, rank {late} late"
    async with new_comm("gloo", name=f"case {seed}", timeout=20) as one:
        for _ in range(warm):
            await usual(one)
        if comm.rank != late:
            work = (other if comm.rank == odd else usual)(one)
        await comm.barrier()
        if comm.rank == late:
            work = (other if comm.rank == odd else usual)(one)
    error = work.exception()
    assert isinstance(error, CollectiveMismatchError), f"{case}: {error!r}"
    said = await comm.all_gather_object(str(error).partition("\n")[0])
    assert len(set(said)) == 1, case


@pytest.mark.parametrize("seed", some(range(100), 4))
@pytest.mark.ranks(2, backend="gloo", timeout=120)
async def test_messages_of_another_size_or_dtype_are_named(comm: Comm, seed: int) -> None:
    sizes = [0, 1, SHORT // 4, SHORT // 4 + 1, 300_000]
    choose = random.Random(seed)
    sent, expected = choose.sample([(n, dtype) for n in sizes for dtype in DTYPES], 2)
    before, early = choose.randrange(3), choose.random() < 0.5
    source = choose.choice([0, None])
    async with new_comm("gloo", name=f"messages {seed}", timeout=20) as one:
        for _ in range(before):
            await (one.send(torch.ones(9), 1) if comm.rank == 0 else one.recv(torch.ones(9), source))
        if comm.rank == 0:
            if early:
                await comm.barrier()
            work = one.send(torch.ones(sent[0], dtype=sent[1]), 1)
            if not early:
                await comm.barrier()
            with pytest.raises(BrokenError):
                await one.barrier()
            assert isinstance(work.exception(), (CollectiveMismatchError, type(None))), "a short message is sent"
        else:
            output = torch.zeros(expected[0], dtype=expected[1])
            if not early:
                await comm.barrier()
            work = one.recv(output, source)
            if early:
                await comm.barrier()
            with pytest.raises(CollectiveMismatchError, match=rf"send\(.*\[{sent[0]}\].*recv\(.*\[{expected[0]}\]"):
                await work
            assert not output.any(), "no data is taken"
