"""Collectives on tensors that differ in size between ranks, on loopback: like torch.cat and torch.split."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm import CollectiveMismatchError, Comm, PayloadError, ReduceOp
from asynccomm.testing.conformance.data import everyones, reduced, sample, sentinel
from asynccomm.testing.local import loopback_world
from tests.comm.methods.argument_matrix import on_all
from tests.sampling import examples

MOVED = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]
REDUCED = [d for d in MOVED if d != torch.bool]
SUM = ReduceOp.SUM

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
LARGEST = 4  # comm
LARGE_ENOUGH = examples(120)


class World:
    """Comms of all sizes, made once for a test."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._comms: dict[int, list[Comm]] = {}
        for size in range(1, LARGEST + 1):
            self.run(size, lambda comm, rank: comm.barrier())

    def run(self, size: int, call: Callable[[Comm, int], Any]) -> list[Any]:
        """What each rank's call gives; in any order, they are done when the last has called."""

        async def main() -> list[Any]:
            if size not in self._comms:
                comms = await self._stack.enter_async_context(loopback_world(size, name=f"of {size}"))
                self._comms[size] = comms
            return await on_all(self._comms[size], call)

        return self._runner.run(main())

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    found = World()
    yield found
    found.close()


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Small integers, of which any dtype holds the sum of a few; laid out in this way or that."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2 if dtype == torch.bool else 12, list(shape), generator=generator)
    tensor = values.to(torch.complex64) * (1 - 2j) if dtype.is_complex else values
    tensor = tensor.to(dtype)
    if seed % 3 == 1 and tensor.dim() > 1:  # not contiguous
        order = list(reversed(range(tensor.dim())))
        tensor = tensor.permute(order).contiguous().permute(order)
    elif seed % 3 == 2 and tensor.dim():
        tensor = torch.stack([tensor, tensor], -1)[..., 0]
    return tensor


def summed(tensors: Sequence[Tensor]) -> Tensor:
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    total = torch.stack([x.to(wide) for x in tensors]).sum(0)
    return total.to(tensors[0].dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    """Shapes, dtypes and values."""
    if found.shape != expected.shape or found.dtype != expected.dtype or found.requires_grad:
        return False
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected.resolve_conj())
    return found.to(torch.float64).equal(expected.to(torch.float64))


@st.composite
def cases(draw: st.DrawFn, dtypes: list[torch.dtype]) -> tuple[int, torch.dtype, list[int], int, list[int], int]:
    """How many ranks, the dtype, the shape, a dimension of it, an extent there for each rank, and a seed."""
    size = draw(st.integers(1, LARGEST))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    extents = draw(
        st.one_of(
            st.lists(st.integers(0, 5), min_size=size, max_size=size),
            st.integers(0, 4).map(lambda n: [n] * size),
        )
    )
    return size, draw(st.sampled_from(dtypes)), shape, dim, extents, draw(st.integers(0, 1000))


def parts_of(shape: list[int], dim: int, extents: list[int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    parts = []
    for rank, extent in enumerate(extents):
        own = list(shape)
        own[dim] = extent
        parts.append(numbers(own, dtype, seed + rank))
    return parts


def room(like: Tensor, seed: int) -> Tensor | None:
    """Where a result may go; every other time None."""
    return None if seed % 2 else numbers(like.shape, like.dtype, seed + 50)


def landed(results: list[Any], outputs: list[Any]) -> bool:
    return all(out is None or result is out for result, out in zip(results, outputs, strict=True))


@LARGE_ENOUGH
@given(case=cases(MOVED), known=st.booleans())
def test_all_gather_v(world: World, case: Any, known: bool) -> None:
    size, dtype, shape, dim, extents, seed = case
    parts = parts_of(shape, dim, extents, dtype, seed)
    expected = torch.cat(parts, dim)
    outs = [room(expected, seed + rank) for rank in range(size)]
    sizes = extents if known else None
    found = world.run(size, lambda c, r: c.all_gather_v(outs[r], parts[r], sizes, dim))
    assert landed(found, outs)
    assert all(same(x, expected) for x in found)


@LARGE_ENOUGH
@given(case=cases(REDUCED))
def test_reduce_scatter_v(world: World, case: Any) -> None:
    size, dtype, shape, dim, extents, seed = case
    shape[dim] = sum(extents)
    inputs = [numbers(shape, dtype, seed + rank) for rank in range(size)]
    before = [x.clone() for x in inputs]
    expected = summed(inputs).split(extents, dim)
    outs = [room(expected[rank], seed + rank) for rank in range(size)]
    found = world.run(size, lambda c, r: c.reduce_scatter_v(outs[r], inputs[r], extents, SUM, dim))
    assert landed(found, outs)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert all(same(a, b) for a, b in zip(inputs, before, strict=True))


@LARGE_ENOUGH
@given(case=cases(MOVED))
def test_all_gather_single_and_gather_single(world: World, case: Any) -> None:
    size, dtype, shape, dim, _, seed = case
    parts = [numbers(shape, dtype, seed + rank) for rank in range(size)]
    expected = torch.cat(parts, dim)
    outs = [room(expected, seed + rank) for rank in range(size)]
    found = world.run(size, lambda c, r: c.all_gather_single(outs[r], parts[r], dim))
    assert landed(found, outs)
    assert all(same(x, expected) for x in found)
    root = seed % size
    outs = [room(expected, seed) if rank == root else None for rank in range(size)]
    found = world.run(size, lambda c, r: c.gather_single(outs[r], parts[r], root, dim))
    assert landed(found, outs)
    assert same(found[root], expected)
    assert all(x is None for rank, x in enumerate(found) if rank != root)


@LARGE_ENOUGH
@given(case=cases(REDUCED))
def test_reduce_scatter_single_and_scatter_single(world: World, case: Any) -> None:
    size, dtype, shape, dim, _, seed = case
    shape[dim] *= size
    inputs = [numbers(shape, dtype, seed + rank) for rank in range(size)]
    extent = shape[dim] // size
    expected = summed(inputs).split([extent] * size, dim)
    outs = [room(expected[rank], seed + rank) for rank in range(size)]
    found = world.run(size, lambda c, r: c.reduce_scatter_single(outs[r], inputs[r], SUM, dim))
    assert landed(found, outs)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    root = seed % size
    whole = inputs[root]
    expected = whole.split([extent] * size, dim)
    outs = [room(x, 0) if rank != root else room(x, seed) for rank, x in enumerate(expected)]
    found = world.run(size, lambda c, r: c.scatter_single(outs[r], whole if r == root else None, root, dim))
    assert landed(found, outs)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@LARGE_ENOUGH
@given(case=cases(MOVED), known=st.booleans(), data=st.data())
def test_all_to_all_v_single(world: World, case: Any, known: bool, data: st.DataObject) -> None:
    size, dtype, shape, _, _, seed = case
    sends = [data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)) for _ in range(size)]
    even = data.draw(st.booleans())
    if even:
        sends = [[n[0]] * size for n in sends]
    spare = data.draw(st.integers(0, 2)) if not even else 0
    inputs = [numbers([sum(n) + spare, *shape[1:]], dtype, seed + rank) for rank, n in enumerate(sends)]
    pieces = [x[: sum(n)].split(n) for x, n in zip(inputs, sends, strict=True)]
    expected = [torch.cat([pieces[s][r] for s in range(size)]) for r in range(size)]
    outs: list[Tensor | None] = []
    for rank, x in enumerate(expected):
        more = (seed + rank) % 3
        outs.append(None if (seed + rank) % 2 else numbers([len(x) + more, *shape[1:]], dtype, seed))
    rest = [None if out is None else out[len(x) :].clone() for out, x in zip(outs, expected, strict=True)]

    def call(comm: Comm, rank: int) -> Any:
        receives = [n[rank] for n in sends] if known else None
        return comm.all_to_all_v_single(outs[rank], inputs[rank], receives, None if even else sends[rank])

    found = world.run(size, call)
    assert landed(found, outs)
    for result, x, left in zip(found, expected, rest, strict=True):
        assert same(result[: len(x)], x)
        assert left is None or same(result[len(x) :], left), "what is left over stays as it was"


@st.composite
def any_tensors(draw: st.DrawFn) -> list[Tensor]:
    """One for each rank, of shapes and dtypes of their own."""
    size = draw(st.integers(1, LARGEST))
    return [
        numbers(draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.sampled_from(MOVED)), draw(st.integers(0, 1000)))
        for _ in range(size)
    ]


@LARGE_ENOUGH
@given(tensors=any_tensors(), root=st.integers(0, 3), allocated=st.booleans())
def test_gather_v_and_scatter_v(world: World, tensors: list[Tensor], root: int, allocated: bool) -> None:
    size = len(tensors)
    root %= size
    given_list = None if allocated else [torch.zeros_like(x) for x in tensors]
    found = world.run(size, lambda c, r: c.gather_v(given_list if r == root else None, tensors[r], root))
    assert allocated or found[root] is given_list
    assert all(same(a, b) for a, b in zip(found[root], tensors, strict=True))
    assert all(x is None for rank, x in enumerate(found) if rank != root)
    outs = [None if allocated else torch.zeros_like(x) for x in tensors]
    found = world.run(size, lambda c, r: c.scatter_v(outs[r], tensors if r == root else None, root))
    assert landed(found, outs)
    assert all(same(a, b) for a, b in zip(found, tensors, strict=True))


# -- what does not fit


async def test_data_that_does_not_fit_fails_one_work_only() -> None:
    async with loopback_world(3) as comms:
        works = [comm.all_gather_v(torch.zeros(5) if r == 1 else None, torch.ones(r)) for r, comm in enumerate(comms)]
        with pytest.raises(PayloadError, match=r"output must have shape \(3,\) for all parts, got \(5,\)"):
            await works[1]
        assert (await works[0]).tolist() == [1, 1, 1]
        works = [
            comm.gather_v([torch.zeros(2)] * 3 if r == 0 else None, torch.ones(2 + r), 0)
            for r, comm in enumerate(comms)
        ]
        with pytest.raises(PayloadError, match=r"rank 1 sent torch.float32 of shape \(3,\), which does not fit"):
            await works[0]
        works = [
            comm.scatter_v(None if r == 0 else torch.zeros(2), [torch.ones(r + 1)] * 3 if r == 0 else None, 0)
            for r, comm in enumerate(comms)
        ]
        with pytest.raises(PayloadError, match=r"rank 0 sent torch.float32 of shape \(1,\)"):
            await works[2]
        with pytest.raises(PayloadError):
            await works[1]
        await asyncio.gather(*[comm.barrier() for comm in comms])


async def test_sizes_that_disagree_are_a_mismatch() -> None:
    async with loopback_world(2) as (a, b):
        works = [a.all_gather_v(None, torch.ones(2), [2, 3]), b.all_gather_v(None, torch.ones(4), [2, 4])]
        for work in works:
            with pytest.raises(CollectiveMismatchError, match=r"all_gather\(float32\[2, 4\]\)"):
                await work


async def test_rows_that_disagree_are_a_mismatch() -> None:
    async with loopback_world(2) as (a, b):
        works = [
            a.all_to_all_v_single(None, torch.ones(3), [1, 2], [1, 2]),
            b.all_to_all_v_single(None, torch.ones(3), [1, 2], [2, 1][::-1]),
        ]
        for work in works:
            with pytest.raises(CollectiveMismatchError):
                await work


async def test_ranks_with_different_dimensions_get_an_error() -> None:
    async with loopback_world(2) as (a, b):
        square = torch.arange(16.0).view(4, 4)
        works = [a.reduce_scatter_v(None, square, [1, 3], dim=0), b.reduce_scatter_v(None, square, [1, 3], dim=1)]
        for work in works:
            with pytest.raises(CollectiveMismatchError):
                await work


@pytest.mark.ranks([2, 3], backend=["shm", "gloo"])
async def test_an_operation_reads_the_result_of_the_one_before(comm: Comm) -> None:
    """Also if nothing is awaited in between, whether sizes are exchanged or not."""
    size = comm.size
    for n in (5, 20_011, 300_007):
        tensor = sample(comm.rank, (n,))
        total = reduced(everyones(size, (n,)), SUM)
        reducing, joining = comm.all_reduce(tensor), comm.all_gather_v(None, tensor)
        collecting, gathering = comm.gather_v(None, tensor, 0), comm.all_gather_single(None, tensor)
        whole = await joining
        assert whole.equal(torch.cat([total] * size))
        assert all(one.equal(total) for one in await collecting or ())
        assert (await gathering).equal(whole)
        assert (await reducing).equal(total)
        # and the other way round: what came is read by the next
        later = sentinel((size * n,))
        works = comm.all_gather_v(later, tensor), comm.all_reduce(later), comm.all_gather_v(None, later)
        doubled = torch.cat([size * total] * size)
        assert (await works[2]).equal(torch.cat([doubled] * size))
        for work in works:
            await work
        assert later.equal(doubled)
