"""Collectives on lists of tensors, one Work each, values, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import CollectiveMismatchError, Comm, ReduceOp, Work, new_comm
from tests.comm.methods.argument_matrix import SIZE, on_all


def mixed(rank: int, factor: int = 1) -> list[Tensor]:
    """Of several shapes and dtypes."""
    return [
        torch.full((3 * factor, 2), 10.0**rank),
        torch.full((3 * factor,), rank, dtype=torch.int64),
        torch.full((6 * factor,), 2.0**rank),
        torch.zeros(0, 4),
        torch.full((3 * factor, 1), complex(rank, 1)),
    ]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.equal(b) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("make", [list, tuple])
async def test_all_reduce(comms: list[Comm], make: Callable[[list[Tensor]], Any]) -> None:
    given = [make(mixed(r)) for r in range(SIZE)]
    found = await on_all(comms, lambda c, r: c.all_reduce_coalesced(given[r]))
    assert all(a is b for a, b in zip(found, given, strict=True))
    total = [torch.stack(parts).sum(0) for parts in zip(*map(mixed, range(SIZE)), strict=True)]
    assert all(same(list(tensors), total) for tensors in given)


async def test_broadcast(comms: list[Comm]) -> None:
    given = [mixed(r) for r in range(SIZE)]
    found = await on_all(comms, lambda c, r: c.broadcast_coalesced(given[r], 2))
    assert all(a is b for a, b in zip(found, given, strict=True))
    assert all(same(tensors, mixed(2)) for tensors in given)


@pytest.mark.parametrize("allocated", [False, True])
async def test_all_gather(comms: list[Comm], allocated: bool) -> None:
    given: list[Any] = [[[torch.zeros_like(x) for x in mixed(0)] for _ in range(SIZE)] for _ in range(SIZE)]
    found = await on_all(comms, lambda c, r: c.all_gather_coalesced(None if allocated else given[r], mixed(r)))
    for rank in range(SIZE):
        assert allocated or found[rank] is given[rank]
        assert all(same(share, mixed(r)) for r, share in enumerate(found[rank]))


@pytest.mark.parametrize("allocated", [False, True])
async def test_reduce_scatter(comms: list[Comm], allocated: bool) -> None:
    total = [torch.stack(parts).sum(0) for parts in zip(*map(mixed, range(SIZE)), strict=True)]
    shares = [[x.chunk(SIZE)[r] if len(x) else x for x in total] for r in range(SIZE)]
    given: list[Any] = [[torch.zeros_like(x) for x in share] for share in shares]
    found = await on_all(comms, lambda c, r: c.reduce_scatter_coalesced(None if allocated else given[r], mixed(r)))
    for rank in range(SIZE):
        assert allocated or found[rank] is given[rank]
        assert same(found[rank], shares[rank])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
async def test_all_gather_v(comms: list[Comm], known: bool, dim: int) -> None:
    sizes = [2, 0, 3]

    def parts(rank: int) -> list[Tensor]:
        shape = (sizes[rank], 2) if dim == 0 else (2, sizes[rank])
        return [torch.full(shape, float(rank)), torch.full((sizes[rank],), rank, dtype=torch.uint8)]

    expected = [torch.cat(list(xs), dim) for xs in zip(*map(parts, range(SIZE)), strict=True)]
    given = [torch.zeros_like(x) for x in expected]
    found = await on_all(
        comms,
        lambda c, r: c.all_gather_v_coalesced(given if r == 1 else None, parts(r), sizes if known else None, dim),
    )
    assert found[1] is given
    assert all(same(tensors, expected) for tensors in found)


async def test_reduce_scatter_v(comms: list[Comm]) -> None:
    sizes = [2, 0, 1]
    total = [torch.stack(parts).sum(0) for parts in zip(*map(mixed, range(SIZE)), strict=True)]
    expected = [total[0].split(sizes), total[1].split(sizes), total[4].split(sizes)]
    inputs = [[tensors[i] for i in (0, 1, 4)] for tensors in map(mixed, range(SIZE))]
    given = [torch.zeros_like(parts[2]) for parts in expected]
    found = await on_all(comms, lambda c, r: c.reduce_scatter_v_coalesced(given if r == 2 else None, inputs[r], sizes))
    assert found[2] is given
    assert all(same(found[r], [parts[r] for parts in expected]) for r in range(SIZE))


async def test_lists_must_agree(comms: list[Comm]) -> None:
    """The same number of elements in all, and divided in another way."""
    shapes = [(2, 3), (3, 2), (2, 3)]
    works = [c.all_reduce_coalesced([torch.zeros(n) for n in shapes[r]]) for r, c in enumerate(comms)]
    for work in works:
        with pytest.raises(CollectiveMismatchError):
            await work


MOVES: list[Callable[[Comm, Tensor], Work[Any]]] = [
    lambda comm, x: comm.broadcast_coalesced([x, x], 0),
    lambda comm, x: comm.all_gather_coalesced(None, [x, x]),
    lambda comm, x: comm.all_gather_v_coalesced(None, [x, x], [2, 2]),
    lambda comm, x: comm.dispatch(x, None, [x], [2, 2]),
]
OTHERS: list[Callable[[Comm, Tensor], Work[Any]]] = [  # of several dtypes
    lambda comm, x: comm.broadcast_coalesced([torch.ones(2, 1, dtype=torch.float64), x], 0),
    lambda comm, x: comm.dispatch(torch.ones(2, 1, dtype=torch.float64), None, [x], [2, 2]),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["shm", "gloo", "hierarchical"])
async def test_dtypes_must_agree(backend: str) -> None:
    """As many bytes in each tensor."""
    for i, call in enumerate([*MOVES, *OTHERS]):
        async with new_comm(backend, name=f"dtypes {i}", timeout=20) as comm:
            tensor = torch.ones(2, 2, dtype=[torch.float32, torch.int32][comm.rank])
            with pytest.raises(CollectiveMismatchError) as caught:
                await call(comm, tensor)
                await comm.barrier()  # the root of a broadcast need not wait for the others
            text = str(caught.value)
            if i < len(MOVES):
                assert "float32[" in text, text
                assert "int32[" in text, text
            else:
                assert "of other sizes or dtypes" in text, text


@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PREMUL_SUM(2)])
async def test_other_reductions(comms: list[Comm], op: ReduceOp) -> None:
    given = [[torch.full((2,), 3.0 * r), torch.full((3,), 3 * r)] for r in range(SIZE)]
    await on_all(comms, lambda c, r: c.all_reduce_coalesced(given[r], op))
    expected = {"AVG": 3, "MAX": 6}.get(str(op), 18)
    assert all(x.eq(expected).all() for tensors in given for x in tensors)
