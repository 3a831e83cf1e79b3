"""Several tensors as one operation, and sizes that differ from rank to rank. On real processes but for the grouping."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import Comm, ReduceOp, Work
from asynccomm.backends.gloo import packing
from asynccomm.backends.gloo.packing import groups_of
from asynccomm.backends.regions import bytes_of
from asynccomm.ops import AllGather, AllReduce, Broadcast, Call, ReduceScatter
from asynccomm.ops.lists import all_gather_v, reduce_scatter_v
from asynccomm.testing.conformance.data import DTYPES, reduced, sample, sentinel, strided
from tests.sampling import amount, some

RANKS = pytest.mark.ranks(some([3, 1, 2, 4], 1), backend="gloo")
SHAPES = [(), (0,), (5,), (3, 4), (2, 0, 3), (1031,), (200_000,), (7,), (300_000,), (600_000,)]
FEW = [(3,), (0,), (2, 5)]


def submit(comm: Comm, call: Call) -> Work[Any]:
    return comm._submit(call, None, None)


def same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(bytes_of(found), bytes_of(expected))


def near(found: Tensor, expected: Tensor) -> None:
    """The same, but for how a complex number is divided."""
    if found.is_complex():
        found, expected = found.to(torch.complex128), expected.to(torch.complex128)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    else:
        same(found, expected)


def samples(rank: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [sample(rank, shape, dtype, salt=i) for i, shape in enumerate(shapes)]


def shared_out(i: int, tensor: Tensor) -> Tensor:
    """Every third one with gaps."""
    return strided(tensor) if i % 3 == 0 else tensor


# -- grouping ----------------------------------------------------------------------------------------------------------


def test_small_tensors_go_together_and_large_ones_alone() -> None:
    small, large = packing.SMALL, packing.SMALL + 1
    assert groups_of([1, large, 2, 3 * large, 0]) == [[0, 2, 4], [1], [3]]
    assert groups_of([small] * 5) == [[4], [0, 1, 2, 3]]
    assert groups_of([0]) == [[0]]
    assert groups_of([0, 0]) == [[0, 1]]
    assert groups_of([large]) == [[0]]


def test_no_pack_is_larger_than_allowed() -> None:
    sizes = [(i * 7919) % packing.SMALL for i in range(200)]
    groups = groups_of(sizes)
    assert sorted(i for group in groups for i in group) == list(range(200))
    assert all(sum(sizes[i] for i in group) <= packing.PACK for group in groups)
    assert len(groups) <= 2 * sum(sizes) / packing.PACK + 1


# -- equal on all ranks ------------------------------------------------------------------------------------------------


@RANKS
async def test_broadcast_of_many_shapes(comm: Comm) -> None:
    for root in range(comm.size):
        expected = samples(root, SHAPES)
        mine = samples(comm.rank, SHAPES)
        tensors = [shared_out(i, t if comm.rank == root else sentinel(t.shape)) for i, t in enumerate(mine)]
        assert await submit(comm, Broadcast.of_several(comm._group, tensors, root)) is tensors
        for found, wanted in zip(tensors, expected, strict=True):
            same(found, wanted)


@RANKS
async def test_broadcast_of_all_dtypes_at_once(comm: Comm) -> None:
    # one byte first: what follows lies askew in the pack
    expected = [sample(0, shape, dtype) for dtype in [torch.uint8, *DTYPES] for shape in FEW]
    tensors = [
        shared_out(i, t.clone() if comm.rank == 0 else sentinel(t.shape, t.dtype)) for i, t in enumerate(expected)
    ]
    await submit(comm, Broadcast.of_several(comm._group, tensors, 0))
    for found, wanted in zip(tensors, expected, strict=True):
        same(found, wanted)


@RANKS
async def test_broadcast_of_what_is_conjugated_and_of_nothing(comm: Comm) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    tensors = [values.conj(), values.clone()]
    await submit(comm, Broadcast.of_several(comm._group, tensors, 0))
    assert tensors[0].tolist() == values.conj().tolist()
    empty = [torch.zeros(0), torch.zeros(3, 0)]
    await submit(comm, Broadcast.of_several(comm._group, empty, 0))
    one = torch.full((3,), float(comm.rank))
    await submit(comm, Broadcast.of_several(comm._group, [one], comm.size - 1))
    assert one.tolist() == [comm.size - 1] * 3


@RANKS
async def test_all_reduce_of_many_shapes(comm: Comm) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        tensors = [shared_out(i, t) for i, t in enumerate(samples(comm.rank, SHAPES, dtype))]
        assert await submit(comm, AllReduce.of_several(comm._group, tensors, ReduceOp.SUM)) is tensors
        everyones = [samples(r, SHAPES, dtype) for r in range(comm.size)]
        for i, found in enumerate(tensors):
            same(found, reduced([share[i] for share in everyones], ReduceOp.SUM))


@RANKS
async def test_all_reduce_of_all_dtypes_and_kinds(comm: Comm) -> None:
    works = []
    for dtype in DTYPES:
        for kind in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            try:
                kind.check(dtype)
            except (TypeError, ValueError):
                continue
            tensors = [shared_out(i, t) for i, t in enumerate(samples(comm.rank, FEW, dtype))]
            works.append((submit(comm, AllReduce.of_several(comm._group, tensors, kind)), tensors, kind, dtype))
    for work, tensors, kind, dtype in works:
        await work
        everyones = [samples(r, FEW, dtype) for r in range(comm.size)]
        for i, found in enumerate(tensors):
            near(found, reduced([share[i] for share in everyones], kind))


@RANKS
async def test_all_reduce_with_factors_of_ones_own(comm: Comm) -> None:
    tensors = [torch.full((3,), 2.0), torch.full((2, 2), 1.0)]
    await submit(comm, AllReduce.of_several(comm._group, tensors, ReduceOp.PREMUL_SUM(comm.rank + 1.0)))
    total = sum(range(comm.size + 1))
    assert tensors[0].tolist() == [2.0 * total] * 3
    assert tensors[1].eq(total).all()


@RANKS
async def test_a_tensor_that_is_there_twice_is_reduced_once(comm: Comm) -> None:
    large = torch.ones(packing.SMALL)  # in a transfer of its own each time
    small = torch.ones(4)
    await submit(comm, AllReduce.of_several(comm._group, [large, small, large, small[1:3]], ReduceOp.SUM))
    assert large.eq(comm.size).all()
    assert small.eq(comm.size).all()


@RANKS
async def test_in_inference_mode(comm: Comm) -> None:
    for kind in (ReduceOp.SUM, ReduceOp.AVG):
        with torch.inference_mode():
            inferred = [torch.ones(3), torch.ones(2, 2).t(), torch.ones(3, dtype=torch.float32)]
        for inside in (True, False):
            with torch.inference_mode(inside):
                for tensor in inferred:
                    with torch.inference_mode():
                        tensor.fill_(1)
                await submit(comm, AllReduce.of_several(comm._group, inferred, kind))
                await submit(comm, Broadcast.of_several(comm._group, inferred, 0))
            assert all(t.eq(1 if kind is ReduceOp.AVG else comm.size).all() for t in inferred)


@RANKS
async def test_all_gather_of_many_shapes(comm: Comm) -> None:
    inputs = [shared_out(i, t) for i, t in enumerate(samples(comm.rank, SHAPES))]
    before = [t.clone() for t in inputs]
    outputs = [[shared_out(i + r, sentinel(t.shape)) for i, t in enumerate(inputs)] for r in range(comm.size)]
    assert await submit(comm, AllGather.of_several(comm._group, outputs, inputs)) is outputs
    for r, share in enumerate(outputs):
        for found, wanted in zip(share, samples(r, SHAPES), strict=True):
            same(found, wanted)
    assert all(map(torch.equal, inputs, before))


@RANKS
async def test_all_gather_of_all_dtypes_at_once(comm: Comm) -> None:
    inputs = [sample(comm.rank, shape, dtype) for dtype in [torch.uint8, *DTYPES] for shape in FEW]
    outputs = [[shared_out(i, sentinel(t.shape, t.dtype)) for i, t in enumerate(inputs)] for _ in range(comm.size)]
    await submit(comm, AllGather.of_several(comm._group, outputs, inputs))
    for r, share in enumerate(outputs):
        expected = [sample(r, shape, dtype) for dtype in [torch.uint8, *DTYPES] for shape in FEW]
        for found, wanted in zip(share, expected, strict=True):
            same(found, wanted)


@RANKS
async def test_all_gather_in_place(comm: Comm) -> None:
    """Inputs are their own outputs, lie in the outputs of another rank, or across."""
    n = packing.SMALL // 2  # floats: two megabytes, by itself
    for shift in (0, 1, comm.size - 1):
        wholes = [torch.zeros(comm.size, n), torch.zeros(comm.size, 5), torch.zeros(comm.size, n), torch.zeros(1)]
        where = (comm.rank + shift) % comm.size
        inputs = [whole[where] for whole in wholes[:3]] + [wholes[0][0, 3:4]]
        for i, tensor in enumerate(inputs[:3]):
            tensor.fill_(10 * comm.rank + i)
        last = inputs[3].clone().item()
        outputs = [[*[whole[r] for whole in wholes[:3]], torch.zeros(1)] for r in range(comm.size)]
        await submit(comm, AllGather.of_several(comm._group, outputs, inputs))
        for r in range(comm.size):
            assert all(wholes[i][r].eq(10 * r + i).all() for i in range(3))
        assert outputs[comm.rank][3].item() == last


@RANKS
async def test_reduce_scatter_of_many_shapes(comm: Comm) -> None:
    kinds = [(torch.float32, ReduceOp.SUM), (torch.bfloat16, ReduceOp.SUM), (torch.float64, ReduceOp.AVG)]
    for dtype, kind in some(kinds, 2):
        shares = [
            [shared_out(i + r, t) for i, t in enumerate(samples(comm.rank + r, SHAPES, dtype))]
            for r in range(comm.size)
        ]
        before = [[t.clone() for t in share] for share in shares]
        outputs = [shared_out(i, sentinel(shape, dtype)) for i, shape in enumerate(SHAPES)]
        assert await submit(comm, ReduceScatter.of_several(comm._group, outputs, shares, kind)) is outputs
        everyones = [samples(r + comm.rank, SHAPES, dtype) for r in range(comm.size)]
        for i, found in enumerate(outputs):
            same(found, reduced([share[i] for share in everyones], kind))
        assert all(torch.equal(a, b) for x, y in zip(shares, before, strict=True) for a, b in zip(x, y, strict=True))


@RANKS
async def test_reduce_scatter_with_factors_of_ones_own(comm: Comm) -> None:
    for dtype in (torch.float32, torch.float16, torch.complex64):
        shares = [[torch.full((3,), 2, dtype=dtype), torch.full((2, 2), 1, dtype=dtype)] for _ in range(comm.size)]
        outputs = [torch.zeros(3, dtype=dtype), torch.zeros(2, 2, dtype=dtype)]
        factor = ReduceOp.PREMUL_SUM(comm.rank + 1.0)
        await submit(comm, ReduceScatter.of_several(comm._group, outputs, shares, factor))
        total = sum(range(comm.size + 1))
        assert outputs[0].eq(2 * total).all()
        assert outputs[1].eq(total).all()


@RANKS
async def test_reduce_scatter_in_place(comm: Comm) -> None:
    n = packing.SMALL // 2
    for shift in (0, 1):
        wholes = [torch.full((comm.size, n), 1.0), torch.full((comm.size, 5), 2.0), torch.full((comm.size, n), 3.0)]
        outputs = [whole[(comm.rank + shift) % comm.size] for whole in wholes]
        if shift:  # an output that lies in the input of another tensor
            outputs[0], outputs[2] = outputs[2], outputs[0]
        shares = [[whole[r] for whole in wholes] for r in range(comm.size)]
        await submit(comm, ReduceScatter.of_several(comm._group, outputs, shares, ReduceOp.SUM))
        for i, output in enumerate(outputs):
            assert output.eq((i + 1) * comm.size).all()


@RANKS
async def test_what_lies_side_by_side_is_used_as_it_is(comm: Comm) -> None:
    n, k = 1000, 4
    whole = torch.zeros(comm.size, k * n)
    inputs = list(whole[comm.rank].split(n))
    for i, tensor in enumerate(inputs):
        tensor.fill_(10 * comm.rank + i)
    await submit(comm, AllGather.of_several(comm._group, [list(row.split(n)) for row in whole], inputs))
    expected = torch.tensor([[10.0 * r + i for i in range(k)] for r in range(comm.size)]).repeat_interleave(n, 1)
    assert torch.equal(whole, expected)


# -- sizes of their own ------------------------------------------------------------------------------------------------


def extents_of(size: int) -> list[list[int]]:
    last = size - 1
    return [
        [3 + r for r in range(size)],
        [0] * last + [7],  # padding would be waste
        [5] + [0] * last,
        [r % 2 for r in range(size)],
        [2] * size,
        [400_000 + r for r in range(size)],
        [0] * last + [700_000],
        [0] * size,
    ]


@RANKS
async def test_all_gather_of_sizes_of_their_own(comm: Comm) -> None:
    for dtype in some((torch.float32, torch.bool, torch.float8_e5m2, torch.complex32), 2):
        for counts in extents_of(comm.size):
            source = shared_out(counts[0], sample(comm.rank, (counts[comm.rank],), dtype))
            outputs = [shared_out(r, sentinel((n,), dtype)) for r, n in enumerate(counts)]
            assert await submit(comm, AllGather.of(comm._group, outputs, source)) is outputs
            for r, (found, n) in enumerate(zip(outputs, counts, strict=True)):
                same(found, sample(r, (n,), dtype))


@RANKS
async def test_all_gather_of_sizes_of_their_own_in_place(comm: Comm) -> None:
    for counts in extents_of(comm.size):
        for offset in (0, 1):
            whole = torch.full((sum(counts) + 1,), -1.0)
            starts = [sum(counts[:r]) for r in range(comm.size)]
            outputs = [whole[start : start + n] for start, n in zip(starts, counts, strict=True)]
            source = whole[starts[comm.rank] + offset :][: counts[comm.rank]]
            source.copy_(sample(comm.rank, source.shape))
            await submit(comm, AllGather.of(comm._group, outputs, source))
            for r, output in enumerate(outputs):
                same(output, sample(r, output.shape))


@RANKS
async def test_reduce_scatter_of_sizes_of_their_own(comm: Comm) -> None:
    for dtype, kind in [(torch.float32, ReduceOp.SUM), (torch.bfloat16, ReduceOp.AVG), (torch.bool, ReduceOp.MAX)]:
        for counts in extents_of(comm.size):
            inputs = [shared_out(r, sample(comm.rank + r, (n,), dtype)) for r, n in enumerate(counts)]
            output = shared_out(comm.rank, sentinel((counts[comm.rank],), dtype))
            assert await submit(comm, ReduceScatter.of(comm._group, output, inputs, kind)) is output
            same(output, reduced([sample(r + comm.rank, output.shape, dtype) for r in range(comm.size)], kind))


@RANKS
async def test_several_of_sizes_of_their_own_along_any_dimension(comm: Comm) -> None:
    for dim in (0, 1):
        for extents in some(extents_of(comm.size), 5):
            mine = extents[comm.rank]
            shapes = [((n, 3), (n, 1), (n, 0))[i] for n in extents for i in range(3)]
            shapes = [shape[::-1] if dim else shape for shape in shapes]
            by_rank = [shapes[3 * r : 3 * r + 3] for r in range(comm.size)]
            inputs = samples(comm.rank, by_rank[comm.rank])
            assert inputs[0].shape[dim] == mine
            found = await submit(comm, all_gather_v(comm._group, None, inputs, extents, dim))
            for i, whole in enumerate(found):
                same(whole, torch.cat([samples(r, by_rank[r])[i] for r in range(comm.size)], dim))
            calls, outputs = reduce_scatter_v(comm._group, None, found, extents, ReduceOp.SUM, dim)
            for call in calls:
                await submit(comm, call)
            for output, tensor in zip(outputs, inputs, strict=True):
                same(output, tensor * comm.size)


# -- and all together --------------------------------------------------------------------------------------------------


@RANKS
async def test_many_in_flight(comm: Comm) -> None:
    group, size, rank = comm._group, comm.size, comm.rank
    works: list[Work[Any]] = []
    checks = []
    for i in range(amount(8, 4)):
        shapes = SHAPES[i % 7 :: 2] + FEW
        moved = samples(rank, shapes)
        works.append(submit(comm, Broadcast.of_several(group, moved, i % size)))
        checks.append((moved, samples(i % size, shapes)))
        summed = samples(rank, shapes)
        works.append(submit(comm, AllReduce.of_several(group, summed, ReduceOp.MAX)))
        checks.append(
            (
                summed,
                [reduced(list(t), ReduceOp.MAX) for t in zip(*[samples(r, shapes) for r in range(size)], strict=True)],
            )
        )
        plain = sample(rank, (1000 * i,))
        works.append(comm.all_reduce(plain, ReduceOp.MAX))
        checks.append(([plain], [reduced([sample(r, plain.shape) for r in range(size)], ReduceOp.MAX)]))
    await asyncio.gather(*works)
    for found, expected in checks:
        assert all(map(torch.equal, found, expected))
