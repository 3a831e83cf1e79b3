"""Checks of queues, which work beside a backend of any kind."""

from __future__ import annotations

import asyncio

import torch

from asynccomm.comm.comm import Comm
from asynccomm.testing.conformance.data import expect_equal, sample


async def queues_carry_items_beside_collectives(comm: Comm) -> None:
    last = comm.size - 1
    async with comm.queue(writer=last, capacity=1 << 14) as items:
        total = torch.ones(3)
        work = comm.all_reduce(total)
        if comm.rank == last:
            for number in range(40):
                await items.put((number, sample(number, (number * 30,)).cpu()))
            await items.aclose()
        else:
            number = 0
            async for got, tensor in items:
                assert got == number, f"item {got} in place of {number}"
                expect_equal(tensor, sample(number, (number * 30,)).cpu(), f"the tensor of item {number}")
                number += 1
            assert number == 40, f"{number} items in place of 40"
        await work


async def queues_gather_items_in_the_order_of_each_writer(comm: Comm) -> None:
    if comm.size == 1:
        return
    async with comm.queue(reader=0, capacity=1 << 14) as results:
        if comm.rank:
            for number in range(40):
                await results.put((comm.rank, number, bytes(number * 20)))
        else:
            async with asyncio.timeout(60):
                got = [item async for item in results]
            for rank in range(1, comm.size):
                assert [item[1:] for item in got if item[0] == rank] == [(n, bytes(n * 20)) for n in range(40)]
