"""Checks of the collectives on tensors whose sizes differ between ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.core.work import Work
from asynccomm.errors import PayloadError
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import (
    DTYPES,
    GuardedOutput,
    chunks,
    combinations,
    everyones,
    expect_all_equal,
    expect_equal,
    layouts,
    reduced,
    sample,
    sentinel,
    strided,
)


def _divisions(size: int) -> list[list[int]]:
    """Extents of all ranks: various, some zero, all equal, all zero, all on one rank, large."""
    return [
        [1 + (2 * r) % 4 for r in range(size)],
        [r % 3 for r in range(size)],
        [2] * size,
        [0] * size,
        [5 if r == size - 1 else 0 for r in range(size)],
        [0 if r == 1 else 9_000 + 700 * r for r in range(size)],
    ]


def _shape(dim: int, extent: int) -> tuple[int, ...]:
    shape = [2, 3, 2]
    shape[dim] = extent
    return tuple(shape)


def _inputs(sizes: list[int], dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [sample(r, _shape(dim, extent), dtype) for r, extent in enumerate(sizes)]


async def all_gather_v_with_and_without_sizes(comm: Comm) -> None:
    for sizes in _divisions(comm.size):
        for dim in (0, 1, -1) if max(sizes) < 100 else (0, 1):
            everyone = _inputs(sizes, dim)
            mine, expected = everyone[comm.rank].clone(), torch.cat(everyone, dim)
            for given in (sizes, tuple(sizes), None):
                what = f"all_gather_v {sizes} along {dim}, {'sizes exchanged' if given is None else 'sizes given'}"
                frame = GuardedOutput(expected.shape)
                assert await comm.all_gather_v(frame.output, mine, given, dim) is frame.output
                frame.expect(expected, what)
                expect_equal(mine, everyone[comm.rank], f"{what}: input")
                made = await comm.all_gather_v(None, strided(mine), given, dim)
                expect_equal(made, expected, f"{what}, allocated")


async def reduce_scatter_v_with_and_without_sizes(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for sizes in _divisions(size):
        for dim in (0, 1, -1) if max(sizes) < 100 else (0, 1):
            shape = _shape(dim, sum(sizes))
            expected = chunks(reduced(everyones(size, shape), ReduceOp.SUM), sizes, dim)[rank]
            for given in (sizes, None) if len(set(sizes)) == 1 else (sizes,):
                what = f"reduce_scatter_v {given} along {dim}"
                source, frame = sample(rank, shape), GuardedOutput(expected.shape)
                assert await comm.reduce_scatter_v(frame.output, source, given, dim=dim) is frame.output
                frame.expect(expected, what)
                expect_equal(source, sample(rank, shape), f"{what}: input")
                made = await comm.reduce_scatter_v(None, strided(source), given, ReduceOp.SUM, dim)
                expect_equal(made, expected, f"{what}, allocated")


async def uneven_sizes_of_every_dtype(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    sizes = _divisions(size)[0]
    for dtype in DTYPES:
        everyone = [sample(r, (extent,), dtype) for r, extent in enumerate(sizes)]
        joined = torch.cat([t.view(torch.uint8) for t in everyone]).view(dtype)
        expect_equal(await comm.all_gather_v(None, everyone[rank], sizes), joined, f"all_gather_v {dtype}, given")
        expect_equal(await comm.all_gather_v(None, everyone[rank]), joined, f"all_gather_v {dtype}, exchanged")
        outputs = [sentinel((extent,), dtype) for extent in sizes]
        expect_all_equal(await comm.all_gather(outputs, everyone[rank]), everyone, f"uneven all_gather {dtype}")
    shape = (2, sum(sizes))
    for dtype, op in combinations():
        expected = chunks(reduced(everyones(size, shape, dtype), op), sizes, 1)
        source = sample(rank, shape, dtype)
        made = await comm.reduce_scatter_v(None, source, sizes, op, 1)
        expect_equal(made, expected[rank], f"reduce_scatter_v {dtype} {op}")
        made = await comm.reduce_scatter(None, chunks(source, sizes, 1), op)
        expect_equal(made, expected[rank], f"uneven reduce_scatter {dtype} {op}")
        expect_equal(source, sample(rank, shape, dtype), f"uneven reduce_scatter {dtype} {op}: inputs")


async def uneven_lists(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for sizes in _divisions(size):
        everyone = [sample(r, (extent, 2)) for r, extent in enumerate(sizes)]
        for layout, mine in layouts(everyone[rank]):
            what = f"{sizes} {layout}"
            outputs = [_laid_out(sentinel((extent, 2)), layout) for extent in sizes]
            assert await comm.all_gather(outputs, mine) is outputs
            expect_all_equal(outputs, everyone, f"all_gather {what}")
            expect_equal(mine, everyone[rank], f"all_gather {what}: input")
            rows = [[sample(r, (extent, 2), salt=k) for k, extent in enumerate(sizes)] for r in range(size)]
            inputs = [_laid_out(t, layout) for t in rows[rank]]
            output = _laid_out(sentinel((sizes[rank], 2)), layout)
            assert await comm.reduce_scatter(output, inputs) is output
            expected = reduced([row[rank] for row in rows], ReduceOp.SUM)
            expect_equal(output, expected, f"reduce_scatter {what}")
            expect_all_equal(inputs, rows[rank], f"reduce_scatter {what}: inputs")


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    return next(t for name, t in layouts(tensor) if name == layout)


def _count(source: int, destination: int) -> int:
    """The count from one rank to another: various, often zero."""
    return (3 * source + 2 * destination + 1) % 5


async def all_to_all_of_lists(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for unit in (1, 6_000):  # multiples of 5 x 1 x 4 bytes, and of 120 kB
        shapes = [[(_count(s, d), unit) for d in range(size)] for s in range(size)]
        sent = [[sample(s, shapes[s][d], salt=d) for d in range(size)] for s in range(size)]
        expected = [sent[s][rank] for s in range(size)]
        for layout in ("contiguous", "transposed", "strided", "negated"):
            inputs = [_laid_out(t, layout) for t in sent[rank]]
            outputs = [_laid_out(sentinel(shapes[s][rank]), layout) for s in range(size)]
            assert await comm.all_to_all(outputs, inputs) is outputs
            expect_all_equal(outputs, expected, f"all_to_all {layout}")
            expect_all_equal(inputs, sent[rank], f"all_to_all {layout}: inputs")
            expect_all_equal(await comm.all_to_all(None, inputs), expected, f"all_to_all {layout}, allocated")
    for dtype in DTYPES:
        inputs = [sample(rank, (1 + (rank + d) % 3,), dtype, d) for d in range(size)]
        expected = [sample(s, (1 + (s + rank) % 3,), dtype, rank) for s in range(size)]
        outputs = [sentinel(t.shape, dtype) for t in expected]
        expect_all_equal(await comm.all_to_all(outputs, inputs), expected, f"all_to_all {dtype}")
    frames = [GuardedOutput((2,)) for _ in range(size)]
    await comm.all_to_all([frame.output for frame in frames], [sample(rank, (2,), salt=d) for d in range(size)])
    for s, frame in enumerate(frames):
        frame.expect(sample(s, (2,), salt=rank), f"all_to_all of {s}")


def _kinds(size: int, shift: int = 0) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """A shape and a dtype for each rank."""
    kinds: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((2, 3), torch.float32),
        ((), torch.bool),
        ((0, 4), torch.int64),
        ((70_001,), torch.uint8),
        ((1, 2, 2), torch.complex64),
        ((5,), torch.bfloat16),
        ((3,), torch.float8_e5m2),
        ((2, 0, 3), torch.complex32),
    ]
    return [kinds[(r + shift) % len(kinds)] for r in range(size)]


async def all_to_all_of_any_shapes_and_dtypes(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for shift in range(0, 8, 3):
        inputs = [sample(rank, shape, dtype, d) for d, (shape, dtype) in enumerate(_kinds(size, rank + shift))]
        expected = [sample(s, *_kinds(size, s + shift)[rank], salt=rank) for s in range(size)]
        expect_all_equal(await comm.all_to_all(None, inputs), expected, "all_to_all of any shapes and dtypes")


async def all_to_all_v_single_with_and_without_splits(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for row in ((), (3,), (2, 400), (0, 2)):
        for uneven in (True, False):  # False: a rank sends equally many rows to all ranks
            counts = [[_count(s, d) if uneven else s % 3 for d in range(size)] for s in range(size)]
            sends, receives = counts[rank], [counts[s][rank] for s in range(size)]
            rows = [chunks(sample(s, (sum(counts[s]), *row)), counts[s]) for s in range(size)]
            expected = torch.cat([rows[s][rank] for s in range(size)])
            source = sample(rank, (sum(sends), *row))
            for output_splits in (receives, None):
                for input_splits in (sends,) if uneven else (sends, None):
                    what = f"all_to_all_v_single {row} {output_splits} {input_splits}"
                    frame = GuardedOutput(expected.shape)
                    got = await comm.all_to_all_v_single(frame.output, source, output_splits, input_splits)
                    assert got is frame.output
                    frame.expect(expected, what)
                    expect_equal(source, sample(rank, source.shape), f"{what}: input")
                    made = await comm.all_to_all_v_single(None, strided(source), output_splits, input_splits)
                    expect_equal(made, expected, f"{what}, allocated")


async def all_to_all_v_single_with_room_to_spare(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for dtype in DTYPES:
        counts = [[_count(s, d) for d in range(size)] for s in range(size)]
        sends, receives = counts[rank], [counts[s][rank] for s in range(size)]
        rows = [chunks(sample(s, (sum(counts[s]) + 2, 3), dtype), [*counts[s], 2]) for s in range(size)]
        came = torch.cat([rows[s][rank].contiguous().view(torch.uint8) for s in range(size)]).view(dtype)
        source = sample(rank, (sum(sends) + 2, 3), dtype)
        for output_splits in (receives, None):
            output = sentinel((sum(receives) + 3, 3), dtype)
            await comm.all_to_all_v_single(output, source, output_splits, sends)
            what = f"all_to_all_v_single {dtype} {output_splits}"
            expect_equal(output[: sum(receives)], came, what)
            expect_equal(output[sum(receives) :], sentinel((3, 3), dtype), f"{what}: rows to spare")
            expect_equal(source, sample(rank, source.shape, dtype), f"{what}: input")


async def gather_v_of_any_shapes_and_dtypes(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for root in range(size):
        for shift in range(0, 8, 3):
            kinds = _kinds(size, root + shift)
            expected = [sample(r, shape, dtype) for r, (shape, dtype) in enumerate(kinds)]
            for lay in (torch.clone, strided):
                what = f"gather_v of {[dtype for _, dtype in kinds]} at {root}"
                mine = lay(expected[rank])
                outputs = [lay(sentinel(shape, dtype)) for shape, dtype in kinds] if rank == root else None
                got, made = await comm.gather_v(outputs, mine, root), await comm.gather_v(None, mine, root)
                expect_equal(mine, expected[rank], f"{what}: input")
                if rank != root:
                    assert got is None, f"{what}: off the root"
                    assert made is None, f"{what}: off the root"
                    continue
                assert got is outputs
                assert got is not None
                assert made is not None
                expect_all_equal(got, expected, what)
                expect_all_equal(made, expected, f"{what}, allocated")


async def scatter_v_of_any_shapes_and_dtypes(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for root in range(size):
        for shift in range(0, 8, 3):
            kinds = _kinds(size, root + shift)
            everyone = [sample(r, shape, dtype) for r, (shape, dtype) in enumerate(kinds)]
            for lay in (torch.clone, strided):
                what = f"scatter_v of {[dtype for _, dtype in kinds]} from {root}"
                inputs = [lay(tensor) for tensor in everyone] if rank == root else None
                output = lay(sentinel(*kinds[rank]))
                assert await comm.scatter_v(output, inputs, root) is output
                expect_equal(output, everyone[rank], what)
                expect_equal(await comm.scatter_v(None, inputs, root), everyone[rank], f"{what}, allocated")
                expect_all_equal(inputs or [], everyone if inputs else [], f"{what}: inputs")


async def what_does_not_fit_is_refused(comm: Comm) -> None:
    size, rank, last = comm.size, comm.rank, comm.size - 1
    if size == 1:
        return
    # one tensor at the root is too small for its payload; the other ranks succeed
    outputs = [sentinel((3,)) for _ in range(size)] if rank == 0 else None
    await _refused(comm.gather_v(outputs, sample(rank, (4 if rank == last else 3,)), 0), rank == 0, "gather_v")
    inputs = [sample(r, (3,), torch.int32) for r in range(size)] if rank == 0 else None
    output = sentinel((3,), torch.float32 if rank == last else torch.int32)
    await _refused(comm.scatter_v(output, inputs, 0), rank == last, "scatter_v")
    # the last rank's rows have another length: a mismatch on all ranks
    await _refused(comm.all_gather_v(None, sample(rank, (2, 5 if rank == last else 4))), True, "all_gather_v")
    # the output of one rank is too small for the received rows
    wide = sentinel((2 * size - 1 if rank == last else 2 * size, 3))
    await _refused(comm.all_to_all_v_single(wide, sample(rank, (2 * size, 3))), rank == last, "all_to_all_v_single")
    tensor = sample(rank, (7,))
    await comm.all_reduce(tensor)
    expect_equal(tensor, reduced(everyones(size, (7,)), ReduceOp.SUM), "all_reduce after payloads that were refused")


async def _refused(work: Work[Any], expected: bool, what: str) -> None:
    try:
        await work
    except PayloadError:
        assert expected, f"{what} was refused where it fits"
    else:
        assert not expected, f"{what} was taken where it does not fit"


async def experts_get_tokens_and_give_them_back(comm: Comm) -> None:
    """Mixture of experts: ranks have different numbers of tokens; each token goes to one expert, and comes back."""
    size, rank, width = comm.size, comm.rank, 6
    for tokens in (7 + 3 * rank, 0 if rank == size - 1 else 4, 1_500 + rank):
        mine = sample(rank, (tokens, width))
        experts = torch.arange(tokens).mul(7).add(rank).div(3, rounding_mode="floor") % size
        order = torch.argsort(experts, stable=True)
        sends = torch.bincount(experts, minlength=size)
        receives = await comm.all_to_all_single(None, sends)
        dispatched = await comm.all_to_all_v_single(None, mine[order], receives.tolist(), sends.tolist())
        assert len(dispatched) == int(receives.sum())
        known = await comm.all_to_all_v_single(None, mine[order], None, sends.tolist())
        expect_equal(known, dispatched, "tokens dispatched without telling how many")
        done = dispatched * 10 + rank  # the expert's computation
        combined = torch.empty_like(mine)
        combined[order] = await comm.all_to_all_v_single(None, done, sends.tolist(), receives.tolist())
        expect_equal(combined, mine * 10 + experts[:, None], "tokens combined")


async def gathered_tokens_are_given_back(comm: Comm) -> None:
    """Mixture of experts as with data parallel attention: each rank gathers all tokens, and the results are summed."""
    size, rank = comm.size, comm.rank
    for sizes in _divisions(size):
        counts = (await comm.all_gather_single(None, torch.tensor([sizes[rank]]))).tolist()
        assert counts == sizes
        hidden, logits = sample(rank, (sizes[rank], 4)), sample(rank, (sizes[rank], 2), torch.bfloat16)
        all_hidden, all_logits = await asyncio.gather(
            comm.all_gather_v(None, hidden, counts), comm.all_gather_v(None, logits, counts)
        )
        expected = torch.cat([sample(r, (n, 2), torch.bfloat16) for r, n in enumerate(sizes)])
        expect_equal(all_logits, expected, f"logits of {sizes} tokens")
        # the experts of each rank contribute a part of each token's result
        combined = await comm.reduce_scatter_v(None, all_hidden * (rank + 1), counts)
        expect_equal(combined, hidden * (size * (size + 1) // 2), f"combine of {sizes} tokens")
        average = await comm.reduce_scatter_v(None, all_hidden, counts, ReduceOp.AVG)
        expect_equal(average, hidden, f"combine of {sizes} tokens is the inverse of their dispatch")
