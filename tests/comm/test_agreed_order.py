"""The order that ranks agree on, at the seams to the submitter; whole comms are in ``batching/ordering``."""

from __future__ import annotations

import asyncio

import torch

from asynccomm import Comm, MemoryStore, new_comm
from asynccomm.comm.agreed_order import AgreedOrder
from asynccomm.core.work import UNNUMBERED


async def pair() -> list[Comm]:
    store = MemoryStore()
    made = (
        new_comm("loopback", name="test", ordering="agreed", timeout=20, store=store, rank=rank, size=2)
        for rank in range(2)
    )
    return list(await asyncio.gather(*made))


def order_of(comm: Comm) -> AgreedOrder:
    ordering = comm._session.submitter.ordering
    assert ordering is not None
    return ordering


async def test_a_call_is_outstanding_and_unnumbered_until_all_ranks_have_made_it() -> None:
    first, second = comms = await pair()
    work = first.all_reduce(torch.ones(2), tag="x")
    assert (order_of(first).outstanding("x"), order_of(second).outstanding("x")) == (1, 0)
    assert work.seq == UNNUMBERED
    await asyncio.gather(work, second.all_reduce(torch.ones(2), tag="x"))
    assert order_of(first).outstanding("x") == 0
    assert work.seq == 0
    await asyncio.gather(*(comm.aclose() for comm in comms))


async def test_calls_that_share_memory_are_batches_of_their_own() -> None:
    """The second of them needs the first's result."""
    first, second = comms = await pair()
    tensors = [torch.ones(2), torch.ones(2)]
    works = [comm.all_reduce(tensor, tag=tag) for tag in "ab" for comm, tensor in zip(comms, tensors, strict=True)]
    await asyncio.gather(*works)
    assert [tensor.tolist() for tensor in tensors] == [[4, 4], [4, 4]]
    assert [comm.statistics().batches for comm in comms] == [0, 0]
    apart = [comm.all_reduce(torch.ones(2), tag=tag) for tag in "ab" for comm in (first, second)]
    await asyncio.gather(*apart)
    assert [comm.statistics().batches for comm in comms] == [1, 1]
    await asyncio.gather(*(comm.aclose() for comm in comms))


async def test_a_scope_announces_its_collectives_and_sends_its_messages() -> None:
    first, second = comms = await pair()
    async with first.coalesce():
        reduced, sent = first.all_reduce(torch.ones(1), tag="x"), first.send(torch.ones(1), 1)
    assert (reduced.seq, sent.seq) == (UNNUMBERED, 0)
    assert order_of(first).outstanding("x") == 1
    await asyncio.gather(reduced, sent, second.recv(torch.zeros(1), 0), second.all_reduce(torch.ones(1), tag="x"))
    await asyncio.gather(*(comm.aclose() for comm in comms))
