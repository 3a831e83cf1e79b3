"""Checks of comms made of some ranks of another comm, and of monitored barriers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import torch

from asynccomm.comm.comm import Comm
from asynccomm.errors import AbortedError, MonitoredBarrierError
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import expect_equal, reduced, sample
from asynccomm.testing.conformance.objects import expect_same


async def _expect_works(comm: Comm, ranks: list[int], salt: int = 0) -> None:
    """Check that ``comm`` works and consists of the given ranks of its parent, in this order."""
    assert comm.size == len(ranks), f"{comm.name} has {comm.size} ranks instead of {ranks}"
    me = ranks[comm.rank]
    everyone = [sample(r, (70,), salt=salt) for r in ranks]
    total = sample(me, (70,), salt=salt)
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    works = [comm.all_reduce(total), comm.all_gather_single(None, sample(me, (70,), salt=salt))]
    received, sent = comm.recv(torch.zeros(70), previous, 1), comm.send(sample(me, (70,), salt=salt), following, 1)
    objects = comm.all_gather_object((me, salt))
    copied = comm.broadcast_tensor_dict({"a": everyone[-1]} if comm.rank == comm.size - 1 else None, comm.size - 1)
    assert await works[0] is total
    expect_equal(total, reduced(everyone, ReduceOp.SUM), f"all_reduce of {ranks}")
    expect_equal(await works[1], torch.cat(everyone), f"all_gather_single of {ranks}")
    expect_equal(await received, everyone[previous], f"recv in {ranks}")
    expect_same(await objects, [(r, salt) for r in ranks], f"all_gather_object of {ranks}")
    expect_same(await copied, {"a": everyone[-1]}, f"broadcast_tensor_dict of {ranks}")
    await sent
    await comm.monitored_barrier()


async def groups_in_order_and_permuted(comm: Comm) -> None:
    everybody = list(range(comm.size))
    permuted = [(r * 2 + 1) % comm.size for r in everybody] if comm.size % 2 else everybody[::-1]
    none = everybody[:0]
    assert await comm.split(none, "nobody") is None, "a group of no ranks must be None"
    for ranks in (everybody, permuted, everybody[1:], [comm.size - 1, 0][: comm.size]):
        async with comm.split(ranks if comm.rank in ranks else [], "group") as group:
            if comm.rank not in ranks:
                assert group is None
                continue
            assert group is not None
            assert group.rank == ranks.index(comm.rank), f"rank {group.rank} of {ranks}"
            assert group.parent_ranks == tuple(ranks)
            assert group.backend == comm.backend or comm.backend == "hierarchical"  # which may leave a split to a part
            await _expect_works(group, ranks)


async def disjoint_and_overlapping_groups_at_once(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    middle = size // 2
    left, right = list(range(middle + 1)), list(range(middle, size))
    apart = [r for r in range(size) if r % 2 == rank % 2]
    async with AsyncExitStack() as stack:
        connecting = [comm.split(apart, "same name")]
        memberships = [apart]
        for ranks, name in ((left, "left"), (right, "right")):
            if rank in ranks:
                connecting.append(comm.split(ranks, name))
                memberships.append(ranks)
        groups = [await stack.enter_async_context(connection) for connection in connecting]
        for salt in range(3):
            working = [
                _expect_works(group, ranks, salt)
                for group, ranks in zip(groups, memberships, strict=True)
                if group is not None
            ]
            await asyncio.gather(*working, _expect_works(comm, list(range(size)), salt))


async def subgroups_of_equal_sizes_and_by_enumeration(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for length in {1, size}:
        async with comm.subgroups(length) as group:
            first = rank // length * length
            await _expect_works(group, list(range(first, first + length)))
    if size % 2 == 0 and size > 2:
        async with comm.subgroups(2, "pairs") as group:
            await _expect_works(group, [rank // 2 * 2, rank // 2 * 2 + 1])
    lists = [[size - 1, 0], [1]] if size > 2 else [[0]]  # the other ranks are in no list
    async with comm.subgroups_by_enumeration(lists, "listed") as listed:
        mine = next((ranks for ranks in lists if rank in ranks), None)
        assert (listed is None) == (mine is None)
        if listed is not None and mine is not None:
            await _expect_works(listed, mine)


async def parents_and_children_at_once(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    async with comm.dup("child") as child, child.split(list(range(size))[::-1], "grandchild") as grandchild:
        assert grandchild is not None
        family = {"parent": comm, "child": child, "grandchild": grandchild}
        tensors = {name: [sample(rank, (500,), salt=i + len(name)) for i in range(5)] for name in family}
        order = list(family)[rank % 3 :] + list(family)[: rank % 3]  # each rank calls them in a different order
        works = [family[name].all_reduce(tensor) for name in order for tensor in tensors[name]]
        await asyncio.gather(*works)
        for name, mine in tensors.items():
            for i, tensor in enumerate(mine):
                everyone = [sample(r, (500,), salt=i + len(name)) for r in range(size)]
                expect_equal(tensor, reduced(everyone, ReduceOp.SUM), f"all_reduce of the {name}")
        await child.aclose()
        await _expect_works(grandchild, list(range(size))[::-1])
        await _expect_works(comm, list(range(size)))


async def a_child_that_is_aborted_leaves_its_parent(comm: Comm) -> None:
    async with comm.dup("to be aborted") as child:
        await child.barrier()
        await comm.barrier()
        if comm.rank == 0:
            child.abort("enough")
        try:
            await child.recv(torch.zeros(1), 0, 5)
        except AbortedError as exc:
            assert exc.rank == 0
            assert "enough" in str(exc)
        else:
            raise AssertionError("an operation of an aborted child finished")
    await _expect_works(comm, list(range(comm.size)))


async def monitored_barriers_name_who_is_missing(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    await comm.monitored_barrier()
    absent = [r for r in range(1, size) if r % 2]
    for every in (False, True):
        await comm.barrier()
        if rank not in absent:
            await _expect_missing(comm, absent if every else absent[:1], every)
        await comm.barrier()
        if rank in absent:  # too late
            await _expect_missing(comm, absent if every else absent[:1], every)
    await comm.monitored_barrier()
    await _expect_works(comm, list(range(size)))


async def _expect_missing(comm: Comm, missing: list[int], every: bool) -> None:
    try:
        await comm.monitored_barrier(timeout=0.4, wait_all_ranks=every)
    except MonitoredBarrierError as exc:
        assert exc.missing == tuple(missing), f"missing must be {missing}, got {exc.missing}"
    else:
        assert not missing, f"a monitored barrier passed without {missing}"
