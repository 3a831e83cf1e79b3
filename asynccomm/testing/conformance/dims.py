"""Checks of the single-tensor forms along every dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import (
    DTYPES,
    GuardedOutput,
    chunks,
    combinations,
    everyones,
    expect_equal,
    layouts,
    reduced,
    sample,
    sentinel,
    strided,
)

SHAPES = [(2, 3, 4), (3, 1, 2, 2), (2, 0, 3)]
LONG = (3, 20_000)  # larger than any transport's chunk


def _every_dim() -> Iterator[tuple[tuple[int, ...], int]]:
    for shape in SHAPES:
        for dim in range(-len(shape), len(shape)):
            yield shape, dim
    yield LONG, 1
    yield (5,), -1


def _times(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """``shape``, ``size`` times as long along ``dim``."""
    dim %= len(shape)
    return (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])


def _part(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    return chunks(tensor, [tensor.shape[dim] // size] * size, dim)[rank]


async def all_gather_single_along_every_dim(comm: Comm) -> None:
    for shape, dim in _every_dim():
        what = f"all_gather_single {shape} along {dim}"
        mine, expected = sample(comm.rank, shape), torch.cat(everyones(comm.size, shape), dim)
        frame = GuardedOutput(expected.shape)
        assert await comm.all_gather_single(frame.output, mine, dim) is frame.output
        frame.expect(expected, what)
        expect_equal(mine, sample(comm.rank, shape), f"{what}: input")
        expect_equal(await comm.all_gather_single(None, strided(mine), dim), expected, f"{what}, allocated")


async def reduce_scatter_single_along_every_dim(comm: Comm) -> None:
    for part, dim in _every_dim():
        shape = _times(part, dim, comm.size)
        what = f"reduce_scatter_single {shape} along {dim}"
        mine = sample(comm.rank, shape)
        expected = _part(reduced(everyones(comm.size, shape), ReduceOp.SUM), dim, comm.rank, comm.size)
        frame = GuardedOutput(part)
        assert await comm.reduce_scatter_single(frame.output, mine, dim=dim) is frame.output
        frame.expect(expected, what)
        expect_equal(mine, sample(comm.rank, shape), f"{what}: input")
        made = await comm.reduce_scatter_single(None, strided(mine), dim=dim)
        expect_equal(made, expected, f"{what}, allocated")


async def gather_single_along_every_dim(comm: Comm) -> None:
    for root in range(comm.size):
        for shape, dim in _every_dim():
            what = f"gather_single {shape} along {dim} at {root}"
            mine, expected = sample(comm.rank, shape), torch.cat(everyones(comm.size, shape), dim)
            frame = GuardedOutput(expected.shape)
            got = await comm.gather_single(frame.output if comm.rank == root else None, mine, root, dim)
            made = await comm.gather_single(None, strided(mine), root, dim)
            expect_equal(mine, sample(comm.rank, shape), f"{what}: input")
            if comm.rank != root:
                assert got is None, f"{what}: off the root"
                assert made is None, f"{what}: off the root"
                continue
            assert got is frame.output
            assert made is not None
            frame.expect(expected, what)
            expect_equal(made, expected, f"{what}, allocated")


async def scatter_single_along_every_dim(comm: Comm) -> None:
    for root in range(comm.size):
        at_root = comm.rank == root
        for part, dim in _every_dim():
            shape = _times(part, dim, comm.size)
            what = f"scatter_single {shape} along {dim} from {root}"
            source = sample(root, shape)
            expected = _part(sample(root, shape), dim, comm.rank, comm.size)
            frame = GuardedOutput(part)
            assert await comm.scatter_single(frame.output, source if at_root else None, root, dim) is frame.output
            frame.expect(expected, what)
            expect_equal(source, sample(root, shape), f"{what}: input")
            given = None if at_root else sentinel(part)
            made = await comm.scatter_single(given, strided(source) if at_root else None, root, dim)
            expect_equal(made, expected, f"{what}, allocated at the root")


async def every_dtype_along_a_dim(comm: Comm) -> None:
    size, rank, shape = comm.size, comm.rank, (2, 3)
    root = size - 1
    for dtype in DTYPES:
        mine = sample(rank, shape, dtype)
        expected = torch.cat([t.view(torch.uint8) for t in everyones(size, shape, dtype)], 1).view(dtype)
        expect_equal(await comm.all_gather_single(None, mine, 1), expected, f"all_gather_single {dtype} along 1")
        made = await comm.gather_single(None, mine, root, 1)
        if made is not None:
            expect_equal(made, expected, f"gather_single {dtype} along 1")
        output = await comm.scatter_single(
            sentinel(shape, dtype), expected if rank == root else None, root, torch.tensor(-1)
        )
        expect_equal(output, mine, f"scatter_single {dtype} along -1")
    for dtype, op in combinations():
        shape = (2, 3 * size)
        expected = _part(reduced(everyones(size, shape, dtype), op), 1, rank, size)
        made = await comm.reduce_scatter_single(None, sample(rank, shape, dtype), op, 1)
        expect_equal(made, expected, f"reduce_scatter_single {dtype} {op} along 1")


async def premul_sum_along_a_dim(comm: Comm) -> None:
    shape, op = (2, 3 * comm.size), ReduceOp.PREMUL_SUM(comm.rank + 0.5)
    made = await comm.reduce_scatter_single(None, sample(comm.rank, shape), op, 1)
    total = sum(sample(r, shape).double() * (r + 0.5) for r in range(comm.size))
    assert isinstance(total, Tensor)
    expect_equal(made, _part(total.float(), 1, comm.rank, comm.size), "reduce_scatter_single PREMUL_SUM along 1")


async def every_layout_along_a_dim(comm: Comm) -> None:
    size, rank, shape = comm.size, comm.rank, (3, 4)
    whole_shape = _times(shape, 1, size)
    for dtype in (torch.float32, torch.complex64):
        together = torch.cat(everyones(size, shape, dtype), 1)
        for layout, mine in layouts(sample(rank, shape, dtype)):
            lay = _layout(layout)
            what = f"{dtype} {layout} along 1"
            whole = await comm.all_gather_single(lay(sentinel(whole_shape, dtype)), mine, 1)
            expect_equal(whole, together, f"all_gather_single {what}")
            output = lay(sentinel(whole_shape, dtype)) if rank == 0 else None
            if await comm.gather_single(output, mine, 0, 1) is not None:
                assert output is not None
                expect_equal(output, together, f"gather_single {what}")
            output = lay(sentinel(shape, dtype))
            await comm.scatter_single(output, lay(together) if rank == 0 else None, 0, 1)
            expect_equal(output, sample(rank, shape, dtype), f"scatter_single {what}")
            source = lay(sample(rank, whole_shape, dtype))
            output = await comm.reduce_scatter_single(lay(sentinel(shape, dtype)), source, dim=1)
            total = reduced(everyones(size, whole_shape, dtype), ReduceOp.SUM)
            expect_equal(output, _part(total, 1, rank, size), f"reduce_scatter_single {what}")
            expect_equal(source, sample(rank, whole_shape, dtype), f"reduce_scatter_single {what}: input")


def _layout(name: str) -> Callable[[Tensor], Tensor]:
    return lambda tensor: next(t for layout, t in layouts(tensor) if layout == name)
