"""Comms of two processes that meet by name."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asynccomm import BrokenError, Comm, MemoryStore, RendezvousError, pair_comm
from asynccomm.testing import loopback_world


async def pair(store: object, first: str, second: str) -> tuple[Comm, Comm]:
    a, b = (
        pair_comm(me, peer, "loopback", store=store, timeout=10)  # type: ignore[arg-type]
        for me, peer in ((first, second), (second, first))
    )
    return await asyncio.gather(a, b)  # type: ignore[return-value]


async def test_ranks_follow_the_names() -> None:
    store = MemoryStore()
    late, early = await pair(store, "zoe", "adam")
    assert (early.rank, late.rank, early.size) == (0, 1, 2)
    sending = early.send(torch.ones(2), 1)
    assert (await late.recv(torch.zeros(2), 0)).sum() == 2
    await sending
    await asyncio.gather(late.aclose(), early.aclose())


async def test_a_lost_member_breaks_its_own_pair_alone_and_may_come_again() -> None:
    store = MemoryStore()
    a = await pair(store, "hub", "worker a")
    b = await pair(store, "hub", "worker b")
    a[1].abort("lost")
    with pytest.raises(BrokenError, match="lost"):
        await a[0].barrier()
    await asyncio.gather(b[0].barrier(), b[1].barrier())
    await asyncio.gather(*(comm.aclose() for comm in a))
    again = await pair(store, "hub", "worker a")
    await asyncio.gather(again[0].barrier(), again[1].barrier())
    await asyncio.gather(*(comm.aclose() for comm in (*again, *b)))


async def test_pairs_meet_at_the_store_of_a_comm() -> None:
    async with loopback_world(2) as comms:
        made = await asyncio.gather(
            pair_comm("a", "b", "loopback", store=comms[0]), pair_comm("b", "a", "loopback", store=comms[1])
        )
        await asyncio.gather(*(comm.barrier() for comm in made))
        await asyncio.gather(*(comm.aclose() for comm in made))
        await asyncio.gather(*(comm.barrier() for comm in comms))


async def test_bad_arguments_and_a_peer_that_does_not_come() -> None:
    store = MemoryStore()
    with pytest.raises(ValueError, match="peer must be another process than me, got 'a' for both"):
        pair_comm("a", "a", store=store)
    with pytest.raises(ValueError, match="me must be a non-empty str, got ''"):
        pair_comm("", "a", store=store)
    with pytest.raises(ValueError, match="peer must be a non-empty str, got ''"):
        pair_comm("a", "", store=store)
    with pytest.raises(TypeError, match="store must be"):
        pair_comm("a", "b", store=3)  # type: ignore[arg-type]
    with pytest.raises(RendezvousError, match="pair/a/b"):
        await pair_comm("b", "a", "loopback", store=store, timeout=0.05)


async def test_names_with_slashes_meet_their_own_peers_alone() -> None:
    store = MemoryStore()
    names = [("a", "b/c"), ("a/b", "c"), ("a", "b%2Fc"), ("a", "b%252Fc"), ("a", "b")]
    pairs = await asyncio.gather(*(pair(store, first, second) for first, second in names))
    for first, second in pairs:
        await asyncio.gather(first.barrier(), second.barrier())
    assert len({first.name for first, _ in pairs}) == len(names)
    assert pairs[-1][0].name == "pair/a/b"
    strangers = [pair_comm(*names, "loopback", store=store, timeout=0.05) for names in (("x", "y/z"), ("z", "x/y"))]
    for result in await asyncio.gather(*strangers, return_exceptions=True):
        assert isinstance(result, RendezvousError)
    await asyncio.gather(*(comm.aclose() for each in pairs for comm in each))


async def test_a_pair_that_is_open_already_is_named() -> None:
    store = MemoryStore()
    both = await pair(store, "a", "b/c")
    text = "me and peer must be of no open pair of this process, got 'b/c' and 'a': close that pair before"
    with pytest.raises(ValueError, match=text):
        await pair_comm("b/c", "a", "loopback", store=store)
    await asyncio.gather(*(comm.aclose() for comm in both))


@pytest.mark.ranks(2, backend=["shm"])
async def test_on_real_ranks(comm: Comm) -> None:
    names = ["trainer", "server"]
    async with pair_comm(names[comm.rank], names[1 - comm.rank], "shm", store=comm) as pair:
        assert pair.rank == 1 - comm.rank
        await pair.barrier()
