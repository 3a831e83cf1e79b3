"""What we rely on in torch's gloo, as it behaves and not as it is documented."""

import asyncio
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import distributed as dist

from asynccomm import ReduceOp, StoreClient
from asynccomm.backends.gloo.torch_gloo import POISON_TAG, Gloo
from asynccomm.checks import MAX_TAG
from asynccomm.store.torch_store import AsTorchStore


async def connect(size: int) -> tuple[Gloo, int, StoreClient]:
    """A bare group of the ranks of this test."""
    rank = int(os.environ["RANK"])
    client = await StoreClient.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=20)
    store = AsTorchStore(client.prefix(os.environ["TORCHELASTIC_RUN_ID"]), asyncio.get_running_loop(), 20)
    gloo = await asyncio.to_thread(Gloo, store, rank, size, hostname="127.0.0.1", interface=None, threads=1)
    return gloo, rank, client


def test_nobody_sends_under_the_poison_tag() -> None:
    assert POISON_TAG > MAX_TAG


@pytest.mark.ranks(2)
async def test_nothing_is_registered_with_torch_distributed() -> None:
    gloo, _, client = await connect(2)
    gloo.barrier().wait()
    assert not dist.is_initialized()
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
        works = [gloo.recv(torch.ones(3), 0, 5)]
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
    assert len(failures) == len(works)
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
