"""Checks of the destinations of results: out= beside the input, and outputs within the input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.core.work import Work
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import (
    GuardedOutput,
    chunks,
    everyones,
    expect_all_equal,
    expect_equal,
    layouts,
    reduced,
    sample,
    sentinel,
    strided,
)

LENGTHS = [1, 5, 20_011]  # elements of one rank's share
MATRIX = (3, 4)


async def all_reduce_into_another_tensor(comm: Comm) -> None:
    tensor, out = sample(comm.rank, MATRIX), sentinel((2, 6))
    assert await comm.all_reduce(tensor, out=out) is out
    expected = reduced(everyones(comm.size, MATRIX), ReduceOp.SUM)
    expect_equal(out.view(MATRIX), expected, "all_reduce into out of another shape")
    for shape in (MATRIX, (40_009,), (0, 3), ()):
        expected = reduced(everyones(comm.size, shape), ReduceOp.SUM)
        for layout, tensor in layouts(sample(comm.rank, shape)):
            frame = GuardedOutput(shape)
            await comm.all_reduce(tensor, out=frame.output)
            frame.expect(expected, f"all_reduce {shape} {layout} into out")
            expect_equal(tensor, sample(comm.rank, shape), f"all_reduce {shape} {layout} into out: input")
            for name, out in layouts(sentinel(shape)) if len(shape) == 2 else []:
                await comm.all_reduce(tensor, out=out)
                expect_equal(out, expected, f"all_reduce {shape} {layout} into out, {name}")
    tensor, factor = sample(comm.rank, MATRIX), comm.rank + 2
    made = await comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(factor), out=torch.empty(MATRIX))
    scaled = [sample(r, MATRIX) * (r + 2) for r in range(comm.size)]
    expect_equal(made, reduced(scaled, ReduceOp.SUM), "all_reduce PREMUL_SUM into out")
    expect_equal(tensor, sample(comm.rank, MATRIX), "all_reduce PREMUL_SUM into out: input")
    await comm.all_reduce(tensor, out=tensor)
    expect_equal(tensor, reduced(everyones(comm.size, MATRIX), ReduceOp.SUM), "all_reduce whose out is its tensor")


async def an_expanded_tensor_into_another(comm: Comm) -> None:
    tensor = torch.tensor(comm.rank + 1.0).expand(7)  # readable, but not writable
    out = await comm.all_reduce(tensor, out=torch.empty(7))
    expect_equal(out, torch.full((7,), comm.size * (comm.size + 1) / 2), "all_reduce of an expanded tensor")


async def reduce_into_another_tensor(comm: Comm) -> None:
    for root in range(comm.size):
        for shape in (MATRIX, (), (20_011,)):
            for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG, ReduceOp.PREMUL_SUM(comm.rank + 0.5)):
                what = f"reduce {shape} {op.type} to {root} into out"
                tensor, out = sample(comm.rank, shape), sentinel(shape)
                got = await comm.reduce(tensor, root, op, out=out)
                rows = everyones(comm.size, shape)
                if op.factor is not None:
                    rows = [(row.double() * (r + 0.5)).float() for r, row in enumerate(rows)]
                expected = reduced(rows, ReduceOp.SUM if op.factor is not None else op)
                expect_equal(tensor, sample(comm.rank, shape), f"{what}: input")
                assert got is (out if comm.rank == root else None)
                expect_equal(out, expected if comm.rank == root else sentinel(shape), f"{what}: out")


async def all_gather_in_place(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for n in LENGTHS:
        expected = torch.cat(everyones(size, (n,)))
        whole = sentinel((size * n,))
        parts = list(whole.chunk(size))
        calls: dict[str, Callable[[], Work[Any]]] = {
            "all_gather_single": partial(comm.all_gather_single, whole, parts[rank]),
            "all_gather": partial(comm.all_gather, parts, parts[rank]),
            "all_gather_v": partial(comm.all_gather_v, whole, parts[rank]),
            "all_gather_v, sizes given": partial(comm.all_gather_v, whole, parts[rank], [n] * size),
        }
        for form, call in calls.items():
            whole.fill_(99)
            parts[rank].copy_(sample(rank, (n,)))
            await call()
            expect_equal(whole, expected, f"{form} of {n} in place")
    whole = sentinel((3, 2 * size))
    whole.chunk(size, 1)[rank].copy_(sample(rank, (3, 2)))
    await comm.all_gather_single(whole, whole.chunk(size, 1)[rank], 1)
    expect_equal(whole, torch.cat(everyones(size, (3, 2)), 1), "all_gather_single along 1 in place")
    sizes = [2 + r % 2 for r in range(size)]
    whole = sentinel((sum(sizes), 2))
    part = chunks(whole, sizes)[rank]
    expected = torch.cat([sample(r, (extent, 2)) for r, extent in enumerate(sizes)])
    for given in (sizes, None):
        whole.fill_(99)
        part.copy_(sample(rank, part.shape))
        await comm.all_gather_v(whole, part, given)
        expect_equal(whole, expected, f"all_gather_v of {given} in place")


async def reduce_scatter_in_place(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for n in LENGTHS:
        expected = reduced(everyones(size, (size * n,)), ReduceOp.SUM).chunk(size)[rank]
        for where in (0, size - 1, rank, (rank + 1) % size):  # each rank may have a different place
            for form in ("reduce_scatter_single", "reduce_scatter"):
                await _reduce_scatter_into(comm, form, n, where, expected)


async def _reduce_scatter_into(comm: Comm, form: str, n: int, where: int, expected: Tensor) -> None:
    """Reduce-scatter into chunk ``where`` of the input itself."""
    source = sample(comm.rank, (comm.size * n,))
    parts = source.chunk(comm.size)
    if form == "reduce_scatter":
        await comm.reduce_scatter(parts[where], parts)
    else:
        await comm.reduce_scatter_single(parts[where], source)
    correct = sample(comm.rank, (comm.size * n,))
    correct.chunk(comm.size)[where].copy_(expected)
    expect_equal(source, correct, f"{form} of {n} into chunk {where} of its input")


async def gather_in_place_at_the_root(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for root in range(size):
        for n in LENGTHS:
            expected = everyones(size, (n,))
            mine, whole, outputs = expected[rank].clone(), sentinel((size * n,)), None
            if rank == root:
                outputs = list(whole.chunk(size))
                mine = outputs[root].copy_(mine)
            await comm.gather_single(whole if rank == root else None, mine, root)
            if rank == root:
                expect_equal(whole, torch.cat(expected), f"gather_single of {n} in place")
                whole.fill_(99)
                mine.copy_(expected[rank])
            await comm.gather(outputs, mine, root)
            expect_all_equal(outputs or [], expected if outputs else [], f"gather of {n} in place")


async def scatter_in_place_at_the_root(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for root in range(size):
        for n in LENGTHS:
            whole = sample(root, (size * n,))
            parts = list(whole.chunk(size))
            for form in ("scatter_single", "scatter"):
                part = parts[root] if rank == root else sentinel((n,))
                if form == "scatter":
                    await comm.scatter(part, parts if rank == root else None, root)
                else:
                    await comm.scatter_single(part, whole if rank == root else None, root)
                expect_equal(part, sample(root, (size * n,)).chunk(size)[rank], f"{form} of {n} in place")
                expect_equal(whole, sample(root, (size * n,)), f"{form} of {n} in place: input")


async def all_to_all_in_place(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for n in LENGTHS:
        expected = torch.stack([sample(r, (size, n))[rank] for r in range(size)])
        buffer = sample(rank, (size, n))
        assert await comm.all_to_all_single(buffer, buffer) is buffer
        expect_equal(buffer, expected, f"all_to_all_single of {n} in place")
        spread = strided(sample(rank, (size, n)))
        await comm.all_to_all_single(spread, spread)
        expect_equal(spread, expected, f"all_to_all_single of {n} in place, strided")
        buffer = sample(rank, (size, n))
        await comm.all_to_all_single(buffer.view(-1), buffer)  # another view of the same memory
        expect_equal(buffer, expected, f"all_to_all_single of {n} in place, by another view")
