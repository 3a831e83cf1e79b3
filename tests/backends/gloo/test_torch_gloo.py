"""What we rely on in torch's gloo, as it behaves and not as it is documented."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from asynccomm import ReduceOp, StoreClient
from asynccomm.backends.gloo.torch_gloo import POISON_TAG, GlooGroup
from asynccomm.ops.validation import MAX_TAG
from asynccomm.store.torch_store import TorchStoreView


async def connect(size: int, *, threads: int = 1, timeout: float = 20.0) -> tuple[GlooGroup, int, StoreClient]:
    """A bare group of the ranks of this test."""
    rank = int(os.environ["RANK"])
    client = await StoreClient.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=20)
    store = TorchStoreView(client.prefix(os.environ["TORCHELASTIC_RUN_ID"]), asyncio.get_running_loop(), 20)
    options: dict[str, Any] = {"address": "127.0.0.1", "threads": threads, "timeout": timeout}
    gloo = await asyncio.to_thread(GlooGroup, store, rank, size, **options)
    return gloo, rank, client


def start_all(gloo: GlooGroup, rank: int) -> list[Any]:
    """Something of everything, in works that have not been waited for."""
    x = torch.ones(2)
    parts = [torch.zeros(2), torch.zeros(2)]
    message = gloo.recv(torch.zeros(1 << 20), 1, 5) if rank == 0 else gloo.send(torch.ones(1 << 20), 0, 5)
    answer = gloo.send(torch.ones(1 << 20), 1, 6) if rank == 0 else gloo.recv(torch.zeros(1 << 20), 0, 6)
    return [
        message,
        answer,
        gloo.all_reduce(torch.ones(2), ReduceOp.SUM),
        gloo.reduce(torch.ones(2), 0, ReduceOp.SUM),
        gloo.broadcast(torch.ones(2), 1),
        gloo.all_gather([torch.zeros(2), torch.zeros(2)], x),
        gloo.all_gather_single(torch.zeros(4), x),
        gloo.gather([torch.zeros(2), torch.zeros(2)] if rank == 0 else [], x, 0),
        gloo.scatter(torch.zeros(2), parts if rank == 1 else [], 1),
        gloo.all_to_all_single(torch.zeros(2), x),
        gloo.barrier(),
    ]


def test_nobody_sends_under_the_poison_tag() -> None:
    assert POISON_TAG > MAX_TAG


@pytest.mark.ranks(2)
async def test_nothing_is_registered_with_torch_distributed() -> None:
    gloo, _, client = await connect(2)
    gloo.barrier().wait()
    assert not dist.is_initialized()
    await client.aclose()


@pytest.mark.ranks(2)
async def test_everything_may_take_longer_than_connecting() -> None:
    limit = 0.5
    gloo, rank, client = await connect(2, threads=16, timeout=limit)
    place = client.prefix(f"{os.environ['TORCHELASTIC_RUN_ID']}/long")
    if rank == 1:
        await place.wait(["started"], 20)
        await asyncio.sleep(2 * limit)  # that time passes is the point: there is no other condition
    works = start_all(gloo, rank)
    await place.set("started", b"1")
    await asyncio.gather(*(asyncio.to_thread(work.wait) for work in works))
    await client.aclose()


@pytest.mark.ranks(3)
async def test_ranks_may_come_later_than_a_connection_may_take() -> None:
    limit = 0.5
    if os.environ["RANK"] == "1":
        await asyncio.sleep(2 * limit)  # as above
    gloo, _, client = await connect(3, timeout=limit)
    gloo.barrier().wait()
    await client.aclose()


@pytest.mark.ranks(3)
async def test_poison_wakes_everything_here_and_on_the_peers() -> None:
    gloo, rank, client = await connect(3)
    gloo.barrier().wait()
    failures: list[str] = []

    def wait(work: object) -> None:
        try:
            work.wait()  # type: ignore[attr-defined]
        except RuntimeError as exc:
            failures.append(str(exc))

    if rank == 0:
        works = [gloo.all_reduce(torch.ones(3), ReduceOp.SUM), gloo.recv(torch.ones(3), 1, 5)]
    else:
        try:
            works = [gloo.recv(torch.ones(3), 0, 5)]
        except RuntimeError as exc:  # rank 0 was quicker
            works = []
            failures.append(str(exc))
    threads = [threading.Thread(target=wait, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    if rank == 0:
        start = time.monotonic()
        await asyncio.to_thread(gloo.poison)
        assert time.monotonic() - start < 5
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()
    assert len(failures) == (2 if rank == 0 else 1)
    gloo.poison()  # of a dead group: nothing to do
    await client.aclose()


@pytest.mark.ranks(1)
async def test_a_group_of_one_has_nobody_to_poison() -> None:
    gloo, _, client = await connect(1)
    gloo.barrier().wait()
    gloo.poison()
    gloo.barrier().wait()
    await client.aclose()


@pytest.mark.ranks(2)
async def test_one_thread_calls_back_between_one_collective_and_the_next() -> None:
    gloo, rank, client = await connect(2)
    tensor = torch.zeros(1000)
    seen: list[float] = []

    def next_one(i: int) -> Callable[[object], None]:
        def fill(_: object) -> None:
            seen.append(tensor[-1].item())
            time.sleep(0.002)  # the next would have begun meanwhile
            tensor.fill_(i + 1 if rank == 0 else -1)

        return fill

    works = []
    for i in range(50):
        works.append(gloo.broadcast(tensor, 0))  # always the same memory
        works[-1].get_future().add_done_callback(next_one(i))
    for work in works:
        await asyncio.to_thread(work.wait)
    assert seen == [float(i) for i in range(50)]
    await client.aclose()


@pytest.mark.ranks(3)
async def test_exchange_of_nothing_with_some() -> None:
    gloo, rank, client = await connect(3)
    for target in range(3):
        receives, sends = [4 * (rank == target)] * 3, [4 * (r == target) for r in range(3)]
        received = torch.zeros(sum(receives), dtype=torch.uint8)
        gloo.all_to_all_single(received, torch.full((4,), rank, dtype=torch.uint8), receives, sends).wait()
        assert received.tolist() == ([0] * 4 + [1] * 4 + [2] * 4 if rank == target else [])
    await client.aclose()


@pytest.mark.ranks(2)
async def test_a_message_that_is_let_go_of_keeps_its_place() -> None:
    """Or the next one of its tag would be taken for it, which ends the process if that is shorter."""
    gloo, rank, client = await connect(2)
    if rank == 0:
        gloo.recv(torch.zeros(1000), 1, 5)
        short = torch.zeros(10)
        second = gloo.recv(short, 1, 5)
        gloo.send(torch.full((1000,), 2.0), 1, 6)
        gloo.send(torch.full((10,), 3.0), 1, 6)
    gloo.barrier().wait()
    if rank == 0:
        second.wait()
        assert short.eq(1).all()
    else:
        gloo.send(torch.zeros(1000), 0, 5)
        gloo.send(torch.ones(10), 0, 5)
        for size, value in ((1000, 2), (10, 3)):
            found = torch.zeros(size)
            gloo.recv(found, 0, 6).wait()
            assert found.eq(value).all()
    gloo.barrier().wait()
    assert len(gloo._messages) == {0: 3, 1: 2}[rank], "those that nobody has waited for"
    gloo.let_go()
    assert not gloo._messages
    await client.aclose()
