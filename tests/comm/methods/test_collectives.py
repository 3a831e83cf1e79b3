"""Collectives on tensors whose sizes all ranks know, on loopback: values, and that what comes back is what was given.

What is said about wrong arguments is in test_base.py and tests/ops/test_validation.py; every backend is tried by
conformance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import CollectiveMismatchError, Comm, ReduceOp
from asynccomm.testing.local import loopback_world
from tests.comm.methods.argument_matrix import SIZE, on_all


def mine(rank: int, *shape: int) -> Tensor:
    """Of each rank something else."""
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) * 10**rank


ALL = [0, 1, 2]


@pytest.mark.parametrize("root", ALL)
async def test_results_are_the_tensors_passed_in(comms: list[Comm], root: int) -> None:
    given: list[Any] = [torch.zeros(6) for _ in ALL]
    lists: list[Any] = [[torch.zeros(6) for _ in ALL] for _ in ALL]
    wide: list[Any] = [torch.zeros(18) for _ in ALL]
    at_root = [root == r for r in ALL]
    calls: list[tuple[Callable[[Comm, int], Any], list[Any]]] = [
        (lambda c, r: c.all_reduce(given[r]), given),
        (lambda c, r: c.all_reduce(mine(r, 6), out=given[r]), given),
        (lambda c, r: c.broadcast(given[r], root), given),
        (lambda c, r: c.reduce(given[r], root), [given[r] if at_root[r] else None for r in ALL]),
        (lambda c, r: c.reduce(mine(r, 6), root, out=given[r]), [given[r] if at_root[r] else None for r in ALL]),
        (lambda c, r: c.all_gather(lists[r], mine(r, 6)), lists),
        (lambda c, r: c.all_gather_single(wide[r], mine(r, 6)), wide),
        (lambda c, r: c.reduce_scatter(given[r], lists[r]), given),
        (lambda c, r: c.reduce_scatter_single(given[r], wide[r]), given),
        (lambda c, r: c.scatter(given[r], lists[r] if at_root[r] else None, root), given),
        (
            lambda c, r: c.gather(lists[r] if at_root[r] else None, given[r], root),
            [lists[r] if at_root[r] else None for r in ALL],
        ),
        (
            lambda c, r: c.gather_single(wide[r] if at_root[r] else None, given[r], root),
            [wide[r] if at_root[r] else None for r in ALL],
        ),
        (lambda c, r: c.scatter_single(given[r], wide[r] if at_root[r] else None, root), given),
        (lambda c, r: c.all_to_all(lists[r], [mine(r, 6)] * SIZE), lists),
        (lambda c, r: c.all_to_all_single(given[r], mine(r, 6)), given),
        (lambda c, r: c.barrier(), [None] * SIZE),
    ]
    for number, (call, expected) in enumerate(calls):
        found = await on_all(comms, call)
        assert all(a is b for a, b in zip(found, expected, strict=True)), number


async def test_all_reduce_elsewhere_leaves_its_input(comms: list[Comm]) -> None:
    tensors, outs = [mine(r, 2, 2) for r in ALL], [torch.zeros(4) for _ in ALL]
    await on_all(comms, lambda c, r: c.all_reduce(tensors[r], out=outs[r]))
    for rank in ALL:
        assert tensors[rank].equal(mine(rank, 2, 2))
        assert outs[rank].tolist() == [111, 222, 333, 444]


async def test_some_ranks_in_place_and_others_not(comms: list[Comm]) -> None:
    out = torch.zeros(2)
    tensors = [mine(r, 2) for r in ALL]
    await on_all(comms, lambda c, r: c.all_reduce(tensors[r], out=out if r == 1 else None))
    assert [x.tolist() for x in (tensors[0], tensors[1], out)] == [[111, 222], [10, 20], [111, 222]]


async def test_reduce_elsewhere(comms: list[Comm]) -> None:
    tensors, outs = [mine(r, 2) for r in ALL], [torch.zeros(2) for _ in ALL]
    await on_all(comms, lambda c, r: c.reduce(tensors[r], 2, out=outs[r]))
    assert [x.tolist() for x in outs] == [[0, 0], [0, 0], [111, 222]]
    assert all(x.equal(mine(r, 2)) for r, x in enumerate(tensors))


async def test_uneven_lists(comms: list[Comm]) -> None:
    counts = [2, 0, 3]
    lists = [[torch.zeros(n) for n in counts] for _ in ALL]
    await on_all(comms, lambda c, r: c.all_gather(lists[r], mine(r, counts[r])))
    for found in lists:
        assert [x.tolist() for x in found] == [[1, 2], [], [100, 200, 300]]
    outs = await on_all(comms, lambda c, r: c.reduce_scatter(None, [mine(r, n) for n in counts]))
    assert [x.tolist() for x in outs] == [[111, 222], [], [111, 222, 333]]


async def test_uneven_lists_must_agree(comms: list[Comm]) -> None:
    counts = [[2, 0, 3], [2, 0, 4], [2, 0, 3]]
    works = [
        comm.all_gather([torch.zeros(n) for n in counts[r]], torch.zeros(counts[r][r])) for r, comm in enumerate(comms)
    ]
    for work in works:
        with pytest.raises(CollectiveMismatchError, match=r"all_gather\(float32\[2, 0, 4\]\)"):
            await work


async def test_complex_and_its_parts(comms: list[Comm]) -> None:
    """Rank by rank in another way, and the same on the wire."""
    number = [torch.tensor([complex(r, -r)]) for r in ALL]
    pairs = [torch.zeros(2) for _ in ALL]
    lists: list[list[Tensor]] = [pairs, [torch.zeros(1, dtype=torch.complex64) for _ in ALL], [torch.zeros(2)] * 3]
    await on_all(comms, lambda c, r: c.all_gather(lists[r], torch.view_as_real(number[r]) if r == 1 else number[r]))
    assert [x.tolist() for x in pairs] == [[0, 0], [1, -1], [2, -2]]
    assert [x.item() for x in lists[1]] == [0, 1 - 1j, 2 - 2j]


async def test_all_to_all_with_new_tensors(comms: list[Comm]) -> None:
    outs = await on_all(comms, lambda c, r: c.all_to_all(None, [mine(r, d, r) for d in ALL]))
    for rank, found in enumerate(outs):
        assert [x.tolist() for x in found] == [mine(s, rank, s).tolist() for s in ALL]


@pytest.mark.parametrize("dim", [0, 1, -1])
async def test_along_a_dim(comms: list[Comm], dim: int) -> None:
    whole = torch.cat([mine(r, 3, 3) for r in ALL], dim)
    assert all(x.equal(whole) for x in await on_all(comms, lambda c, r: c.all_gather_single(None, mine(r, 3, 3), dim)))
    found = await on_all(comms, lambda c, r: c.gather_single(None, mine(r, 3, 3), 1, dim))
    assert found[1].equal(whole)
    assert found[0] is found[2] is None
    total = mine(0, 3, 3) * 111
    found = await on_all(comms, lambda c, r: c.reduce_scatter_single(None, mine(r, 3, 3), dim=dim))
    assert torch.cat(found, dim).equal(total)
    outs: list[Any] = [None, torch.zeros_like(total.chunk(3, dim)[1]), torch.zeros_like(total.chunk(3, dim)[2])]
    found = await on_all(comms, lambda c, r: c.scatter_single(outs[r], total if r == 0 else None, 0, dim))
    assert torch.cat(found, dim).equal(total)


async def test_in_place_in_a_chunk(comms: list[Comm]) -> None:
    wholes = [torch.zeros(6, 2) for _ in ALL]
    for rank, whole in enumerate(wholes):
        whole[2 * rank : 2 * rank + 2] = mine(rank, 2, 2)
    expected = torch.cat([mine(r, 2, 2) for r in ALL])
    await on_all(comms, lambda c, r: c.all_gather_single(wholes[r], wholes[r][2 * r : 2 * r + 2]))
    assert all(x.equal(expected) for x in wholes)
    await on_all(comms, lambda c, r: c.reduce_scatter_single(wholes[r][:2], wholes[r]))
    assert all(x[:2].equal(3 * mine(r, 2, 2)) for r, x in enumerate(wholes))


@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.PREMUL_SUM(4)])
async def test_alone_reductions_still_count(op: ReduceOp) -> None:
    factor = 1 if op is ReduceOp.AVG else 4
    async with loopback_world(1) as (comm,):
        tensor = torch.ones(2, 3)
        assert (await comm.all_reduce(tensor.clone(), op)).equal(tensor * factor)
        assert (await comm.reduce(tensor, 0, op, out=torch.zeros(6))).tolist() == [factor] * 6
        assert (await comm.reduce_scatter(None, [tensor], op)).equal(tensor * factor)
        assert (await comm.reduce_scatter_single(None, tensor, op, 1)).equal(tensor * factor)
        assert (await comm.reduce_scatter_v(None, tensor, [3], op, 1)).equal(tensor * factor)
        assert (await comm.reduce_scatter_coalesced(None, [tensor], op))[0].equal(tensor * factor)
        assert tensor.eq(1).all()
