"""Collectives of parcels, on real processes."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

import pytest
import torch

from asynccomm import BackendError, BrokenError, CollectiveMismatchError, Comm, PayloadError, ReduceOp, new_comm
from asynccomm.backends.gloo import payloads
from asynccomm.ops import Parcel, Parcels
from tests.sampling import amount, some

from .parcels import Shelf, collective, data, joined, recv, send

RANKS = pytest.mark.ranks(some([3, 1, 2, 4], 1), backend="gloo")
TWO_OR_MORE = pytest.mark.ranks(some([2, 1, 3, 4], 1), backend="gloo")
EVERYBODY = Parcels("all_gather_object")
SIZES = [0, 1, 4000, 5000, 300_000, 5 << 20, 17_000_001]


def parcel_of(rank: int, nbytes: int, head: int = 10) -> Parcel:
    return Parcel(bytes([rank]) * head, (data(nbytes // 2, rank), data(nbytes - nbytes // 2, rank + 1)))


def check(shelf: Shelf, sources: Sequence[int], parcels: Mapping[int, Parcel]) -> None:
    lengths = {source: parcels[source].nbytes for source in sources}
    assert shelf.calls == [(source, parcels[source].head, lengths) for source in sources], "in rank order"
    for source in sources:
        assert torch.equal(shelf.got(source), joined(parcels[source].tensors))


@TWO_OR_MORE
@pytest.mark.parametrize("nbytes", SIZES)
async def test_from_all_to_all(comm: Comm, nbytes: int) -> None:
    parcels = {rank: parcel_of(rank, max(0, nbytes - rank)) for rank in range(comm.size)}
    shelf = Shelf()
    await collective(comm, EVERYBODY, [parcels[comm.rank]], shelf)
    check(shelf, [rank for rank in range(comm.size) if rank != comm.rank], parcels)


@TWO_OR_MORE
@pytest.mark.parametrize("head", [0, 4080, 4097, 3 << 20])
async def test_heads_of_any_length(comm: Comm, head: int) -> None:
    parcels = {rank: parcel_of(rank, 10 if rank % 2 else 9000, head) for rank in range(comm.size)}
    shelf = Shelf()
    await collective(comm, EVERYBODY, [parcels[comm.rank]], shelf)
    check(shelf, [rank for rank in range(comm.size) if rank != comm.rank], parcels)


@RANKS
async def test_each_its_own(comm: Comm) -> None:
    def between(source: int, target: int) -> Parcel:
        return Parcel(b"%d>%d" % (source, target), (data(1 << (3 * source + 5 * target), source),))

    shelf = Shelf()
    mine = [between(comm.rank, target) for target in range(comm.size)]
    await collective(comm, Parcels("all_to_all", shared=False), mine, shelf)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    check(shelf, others, {source: between(source, comm.rank) for source in others})


@RANKS
async def test_one_gives_or_one_takes(comm: Comm) -> None:
    for root in range(comm.size):
        for shared in (True, False):
            for nbytes in (5, 100_000):
                shelf = Shelf()
                op = Parcels("broadcast_object", shared=shared, giver=root)
                given = [parcel_of(root, nbytes)] * (1 if shared else comm.size)
                await collective(comm, op, given, shelf)
                check(shelf, [root] if comm.rank != root else [], {root: parcel_of(root, nbytes)})
                shelf = Shelf()
                op = Parcels("gather_object", taker=root)
                await collective(comm, op, [parcel_of(comm.rank, nbytes)], shelf)
                others = [rank for rank in range(comm.size) if rank != root] if comm.rank == root else []
                check(shelf, others, {rank: parcel_of(rank, nbytes) for rank in others})


@RANKS
async def test_nobody_but_oneself(comm: Comm) -> None:
    """Rank 0 gives to itself: nothing moves but the frames."""
    for nbytes in (9, 9000):
        await collective(comm, Parcels("nothing", giver=0, taker=0), [parcel_of(0, nbytes)], Shelf())


@RANKS
async def test_many_in_flight_with_everything_else(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    everybody = [r for r in range(size) if r != rank]
    works, checks = [], []
    for i in range(amount(15, 10)):
        nbytes = 5 << 20 if i == 7 else SIZES[i % 5]
        shelf = Shelf()
        parcels = {r: parcel_of(r + i, nbytes) for r in range(size)}
        works.append(collective(comm, EVERYBODY, [parcels[rank]], shelf))
        checks.append((shelf, everybody, parcels))
        tensor = torch.full((10_000 * i,), float(rank))
        works.append(comm.all_reduce(tensor, ReduceOp.SUM))
        for peer in everybody:
            works.append(send(comm, parcel_of(rank, nbytes), peer, i % 3))
            shelf = Shelf()
            works.append(recv(comm, shelf, peer, i % 3))
            checks.append((shelf, [peer], {peer: parcel_of(peer, nbytes)}))
        giver = i % size
        shelf = Shelf()
        works.append(collective(comm, Parcels("broadcast_object", giver=giver), [parcel_of(giver, nbytes)], shelf))
        checks.append((shelf, [giver] if giver != rank else [], {giver: parcel_of(giver, nbytes)}))
    await asyncio.gather(*works)
    for shelf, sources, parcels in checks:
        check(shelf, sources, parcels)


@TWO_OR_MORE
async def test_refused_on_one_rank_alone(comm: Comm) -> None:
    for nbytes in (0, 5000, 17_000_001):
        shelf = Shelf(None if comm.rank else lambda n: [torch.zeros(n + 1, dtype=torch.uint8)])
        parcels = {rank: parcel_of(rank, nbytes) for rank in range(comm.size)}
        work = collective(comm, EVERYBODY, [parcels[comm.rank]], shelf)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        if comm.rank == 0 and comm.size > 1:
            with pytest.raises(PayloadError, match=f"rank 1 sent {nbytes} bytes where {nbytes + 1} fit"):
                await work
        else:
            await work
            check(shelf, others, parcels)
    await comm.barrier()


@pytest.mark.ranks(2, backend="gloo")
async def test_collectives_that_differ_are_named(comm: Comm) -> None:
    op = EVERYBODY if comm.rank == 0 else Parcels("all_to_all_v", shared=False)
    work = collective(comm, op, [parcel_of(0, 5)] * 2, Shelf())
    with pytest.raises(CollectiveMismatchError, match=r"all_gather_object\(\).*all_to_all_v\(\)"):
        await work


@pytest.mark.ranks(2, backend="gloo", hints={"control": "off"})  # which would tell of it, too
async def test_another_order_is_a_difference(comm: Comm) -> None:
    works = []
    for root in (comm.rank, 1 - comm.rank):
        with contextlib.suppress(CollectiveMismatchError):  # of the first, if that is noticed before the second call
            works.append(collective(comm, Parcels("broadcast_object", giver=root), [parcel_of(0, 5)], Shelf()))
    assert works
    for work in works:
        with pytest.raises(CollectiveMismatchError, match=r"#0 differs: rank 0 .*\(root=0\).* rank 1 .*\(root=1\)"):
            await work


@pytest.mark.ranks(3, backend="gloo", timeout=30)
async def test_abort_ends_what_waits(comm: Comm) -> None:
    if comm.rank == 0:
        await asyncio.gather(*(comm.recv(torch.zeros(1), rank) for rank in (1, 2)))  # they have called it
        comm.abort("enough")
        return
    work = collective(comm, EVERYBODY, [parcel_of(comm.rank, 5 << 20)], Shelf())
    with pytest.raises(BrokenError, match="enough"):
        await comm.send(torch.zeros(1), 0)
        await work


@pytest.mark.ranks(2, backend="gloo")
async def test_what_one_has_not_taken_is_not_taken_for_the_next(comm: Comm) -> None:
    """A shorter message in its place would end the process."""
    with pytest.MonkeyPatch.context() as patch:  # on this rank, which runs other tests, too
        if comm.rank == 1:
            patch.setattr(payloads, "MAX_HEAD", 100_000)
        async with new_comm("gloo", name="unread", timeout=60) as other:
            tensors = {"large": torch.ones(200_000), "small": torch.ones(12)} if comm.rank == 0 else None
            works = [
                collective(other, EVERYBODY, [parcel_of(comm.rank, 0, 200_000)], Shelf()),
                other.broadcast_tensor_dict(tensors, 0),
            ]
            for work in works if comm.rank == 1 else []:
                with pytest.raises(BackendError, match="rank 0 sent a head of 200000 bytes; 100000 are allowed"):
                    await work
    for work in works:
        work.exception()  # of rank 0, too, which does not await them
    await comm.barrier()
