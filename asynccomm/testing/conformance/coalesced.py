"""Checks of operations on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import (
    DTYPES,
    FLOATS,
    REDUCTIONS,
    SHAPES,
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

Kinds = list[tuple[tuple[int, ...], torch.dtype]]


def _mixed() -> Kinds:
    """Tensors of every shape and of mixed dtypes, every dtype more than once."""
    return [
        (shape, DTYPES[(7 * i + k) % len(DTYPES)])
        for i in range(len(DTYPES))
        for k, shape in enumerate(SHAPES[: 3 + i % 5])
    ]


def _legal(op: ReduceOp, kinds: Kinds) -> Kinds:
    def legal(dtype: torch.dtype) -> bool:
        try:
            op.check(dtype)
        except ValueError:
            return False
        return True

    return [(shape, dtype) for shape, dtype in kinds if legal(dtype)]


def _samples(rank: int, kinds: Kinds) -> list[Tensor]:
    return [sample(rank, shape, dtype, salt=i) for i, (shape, dtype) in enumerate(kinds)]


def _spread(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors, each in another memory layout."""
    spread = []
    for i, tensor in enumerate(tensors):
        choice = [t for _, t in layouts(tensor)]
        spread.append(choice[i % len(choice)])
    return spread


def _reduced_each(comm: Comm, kinds: Kinds, op: ReduceOp) -> list[Tensor]:
    everyone = [_samples(r, kinds) for r in range(comm.size)]
    return [reduced(list(tensors), op) for tensors in zip(*everyone, strict=True)]


async def all_reduce_coalesced_every_dtype_and_op(comm: Comm) -> None:
    for op in REDUCTIONS:
        kinds = _legal(op, _mixed())
        tensors = _spread(_samples(comm.rank, kinds))
        assert await comm.all_reduce_coalesced(tensors, op) is tensors
        expect_all_equal(tensors, _reduced_each(comm, kinds, op), f"all_reduce_coalesced {op}")
    kinds = [((3,), torch.float32), ((2, 2), torch.float64), ((5,), torch.float32)]
    tensors = _samples(comm.rank, kinds)
    await comm.all_reduce_coalesced(tuple(tensors), ReduceOp.PREMUL_SUM(comm.rank + 0.5))
    scaled = [[t.double() * (r + 0.5) for t in _samples(r, kinds)] for r in range(comm.size)]
    for i, tensor in enumerate(tensors):
        total = torch.stack([row[i] for row in scaled]).sum(0).to(tensor.dtype)
        expect_equal(tensor, total, "all_reduce_coalesced PREMUL_SUM")


async def all_reduce_coalesced_is_bitwise_identical(comm: Comm) -> None:
    generator = torch.Generator(comm.device).manual_seed(comm.rank)
    shapes = [(3,), (1001,), (), (17, 5), (0,), (40_003,), (2,)]
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64).mul(1e3).to(dtype)
        for shape in shapes
        for dtype in FLOATS
    ]
    await comm.all_reduce_coalesced(tensors)
    for tensor in tensors:
        for rank, theirs in enumerate(await comm.all_gather(None, tensor)):
            same = torch.equal(theirs.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
            assert same, f"all_reduce_coalesced {tensor.dtype}{list(tensor.shape)}: rank {rank} differs"


def _cut(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Consecutive pieces of ``flat``, in these shapes."""
    sizes = [torch.Size(shape) for shape in shapes]
    pieces = chunks(flat, [shape.numel() for shape in sizes])
    return [piece.clone().view(shape) for piece, shape in zip(pieces, sizes, strict=True)]


async def many_small_tensors_coalesced(comm: Comm) -> None:
    size, rank, last = comm.size, comm.rank, comm.size - 1
    shapes = [(i % 7, 1 + i % 3) for i in range(300)]
    count = sum(torch.Size(shape).numel() for shape in shapes)
    mine = _cut(sample(rank, (count,)), shapes)
    tensors = _spread(mine)
    await comm.all_reduce_coalesced(tensors)
    total = reduced(everyones(size, (count,)), ReduceOp.SUM)
    expect_all_equal(tensors, _cut(total, shapes), "all_reduce_coalesced of 300")
    copies = _spread(mine) if rank == last else [strided(sentinel(shape)) for shape in shapes]
    await comm.broadcast_coalesced(copies, last)
    expect_all_equal(copies, _cut(sample(last, (count,)), shapes), "broadcast_coalesced of 300")
    for r, share in enumerate(await comm.all_gather_coalesced(None, _spread(mine))):
        expect_all_equal(share, _cut(sample(r, (count,)), shapes), f"all_gather_coalesced of 300, of {r}")
    wide = [(size * m, n) for m, n in shapes]
    outputs = await comm.reduce_scatter_coalesced(None, _spread(_cut(sample(rank, (size * count,)), wide)))
    total = reduced(everyones(size, (size * count,)), ReduceOp.SUM)
    parts = [tensor.chunk(size)[rank] if tensor.numel() else tensor for tensor in _cut(total, wide)]
    expect_all_equal(outputs, parts, "reduce_scatter_coalesced of 300")


async def one_large_tensor_among_small_ones(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    kinds: Kinds = [((3 * size,), torch.float32), ((60_001 * size,), torch.float32), ((size, 2), torch.float32)]
    expected = _reduced_each(comm, kinds, ReduceOp.SUM)
    tensors = _samples(rank, kinds)
    await comm.all_reduce_coalesced(tensors)
    expect_all_equal(tensors, expected, "all_reduce_coalesced with a large one")
    inputs = _samples(rank, kinds)
    outputs = await comm.reduce_scatter_coalesced(None, inputs)
    parts = [t.chunk(size)[rank] for t in expected]
    expect_all_equal(outputs, parts, "reduce_scatter_coalesced with a large one")
    expect_all_equal(inputs, _samples(rank, kinds), "reduce_scatter_coalesced with a large one: inputs")
    for r, share in enumerate(await comm.all_gather_coalesced(None, inputs)):
        expect_all_equal(share, _samples(r, kinds), f"all_gather_coalesced with a large one, of {r}")
    copies = inputs if rank == 0 else [sentinel(*kind) for kind in kinds]
    await comm.broadcast_coalesced(copies, 0)
    expect_all_equal(copies, _samples(0, kinds), "broadcast_coalesced with a large one")


async def broadcast_coalesced_every_root_and_dtype(comm: Comm) -> None:
    kinds = _mixed()
    for root in range(comm.size):
        expected = _samples(root, kinds)
        tensors = _spread(expected if comm.rank == root else [sentinel(*kind) for kind in kinds])
        assert await comm.broadcast_coalesced(tensors, root) is tensors
        expect_all_equal(tensors, expected, f"broadcast_coalesced from {root}")
    frames = [GuardedOutput((2, 3)), GuardedOutput((5,), torch.int64)]
    for i, frame in enumerate(frames):
        if comm.rank == 0:
            frame.output.copy_(sample(0, frame.output.shape, frame.output.dtype, i))
    await comm.broadcast_coalesced([frame.output for frame in frames], 0)
    for i, frame in enumerate(frames):
        frame.expect(sample(0, frame.output.shape, frame.output.dtype, i), "broadcast_coalesced into frames")


async def all_gather_coalesced_every_dtype(comm: Comm) -> None:
    kinds = _mixed()
    mine = _spread(_samples(comm.rank, kinds))
    lists = [_spread([sentinel(*kind) for kind in kinds]) for _ in range(comm.size)]
    assert await comm.all_gather_coalesced(lists, mine) is lists
    made = await comm.all_gather_coalesced(None, mine)
    for r in range(comm.size):
        expect_all_equal(lists[r], _samples(r, kinds), f"all_gather_coalesced of {r}")
        expect_all_equal(made[r], _samples(r, kinds), f"all_gather_coalesced of {r}, allocated")
    expect_all_equal(mine, _samples(comm.rank, kinds), "all_gather_coalesced: inputs")
    one = [sample(comm.rank, (3,))]
    expect_all_equal([row[0] for row in await comm.all_gather_coalesced(None, one)], everyones(comm.size, (3,)), "one")


async def reduce_scatter_coalesced_every_dtype_and_op(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    shapes = [(size,), (2 * size, 3), (3, size, 2), (0,), (size, 5), (1, 20 * size)]  # some not divisible along dim 0
    for op in REDUCTIONS:
        kinds = _legal(op, [(shape, dtype) for dtype in DTYPES for shape in shapes])
        inputs = _spread(_samples(rank, kinds))
        expected = [t.reshape(size, -1)[rank] if t.numel() else t for t in _reduced_each(comm, kinds, op)]
        outputs = _spread([sentinel(t.shape, t.dtype) for t in expected])
        assert await comm.reduce_scatter_coalesced(outputs, inputs, op) is outputs
        expect_all_equal(outputs, expected, f"reduce_scatter_coalesced {op}")
        expect_all_equal(inputs, _samples(rank, kinds), f"reduce_scatter_coalesced {op}: inputs")
    kinds = [((size,), torch.float32), ((2 * size, 3), torch.int32)]
    made = await comm.reduce_scatter_coalesced(None, _samples(rank, kinds), ReduceOp.MAX)
    halves = [t.chunk(size)[rank] for t in _reduced_each(comm, kinds, ReduceOp.MAX)]
    expect_all_equal(made, halves, "reduce_scatter_coalesced, allocated")
