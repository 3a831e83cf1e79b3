"""Shared memory on real processes: the conformance suite, and what is shm's own."""

import asyncio
import gc
import logging
import logging.handlers
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch
import uvloop

from asynccomm import Comm, new_comm
from asynccomm.testing import check_backend
from asynccomm.testing.conformance import CHECKS
from tests.sampling import exhaustive, some
from tests.waiting import until

from ..conformance import MANY_RANKS, OF_EVERY_KIND, OF_THREE_RANKS, of_modules  # noqa: TID252


def executor(*kinds: str) -> pytest.MarkDecorator:
    """Ranks with the executor in C, in Python, or every other one ("mixed"); usually the first of ``kinds``."""
    return pytest.mark.parametrize("kind", some([*kinds, *sorted({"core", "reference", "mixed"} - {*kinds})], 1))


@asynccontextmanager
async def executors(kind: str) -> AsyncIterator[None]:
    """New comms of this process have an executor of this kind."""
    with pytest.MonkeyPatch.context() as patched:
        if kind == "reference" or (kind == "mixed" and int(os.environ["RANK"]) % 2):
            patched.setenv("ASYNCCOMM_EXECUTOR", "reference")
        yield


# Of what depends on the number of ranks most, the checks that take long on eight.
ON_FIVE_RANKS = ["scatter_and_gather_every_root", "two_hundred_operations_of_all_kinds_in_flight"]
# On shm by tests/windows/test_window.py and tests/comm/methods/test_memory.py.
ELSEWHERE = of_modules("windows", "memory")


@executor("core")
@pytest.mark.ranks(some([3, 1, 2], 1), backend="shm", timeout=240)
async def test_conformance(kind: str) -> None:
    async with executors(kind):
        only = None if exhaustive() else [name for name in MANY_RANKS if name in OF_THREE_RANKS]
        await check_backend(lambda name: new_comm("shm", name=name, timeout=50), only=only)


@executor("core")
@pytest.mark.ranks(2, backend="shm", timeout=240)
async def test_conformance_of_every_kind(kind: str) -> None:
    """What takes the same way for every dtype, reduction and form on two ranks as on three."""
    async with executors(kind):
        only = [name for name in CHECKS if name in OF_EVERY_KIND or name not in {*OF_THREE_RANKS, *ELSEWHERE}]
        await check_backend(lambda name: new_comm("shm", name=name, timeout=50), only=only)


@executor("mixed")
@pytest.mark.ranks(some([5, 4], 1), backend="shm", timeout=240)
async def test_conformance_on_more_ranks(kind: str) -> None:
    async with executors(kind):
        # all of them run on two or three ranks as well
        only = MANY_RANKS if exhaustive() else [*some(MANY_RANKS, 8), *ON_FIVE_RANKS]
        await check_backend(lambda name: new_comm("shm", name=name, timeout=50), only=only)


@executor("reference")
@pytest.mark.ranks(8, backend="shm", timeout=240)
async def test_many_ranks(kind: str) -> None:
    """What depends on their number most."""
    only = ["all_reduce_is_bitwise_identical", "all_to_all_single_in_and_out_of_place"]
    if exhaustive():
        only += ["reduce_scatter_list_and_single", *ON_FIVE_RANKS]
    async with executors(kind):
        await check_backend(lambda name: new_comm("shm", name=name, timeout=50), only=only)


@pytest.mark.timeout(300)  # thousands of messages of 1 KiB, on cores that other tests use as well
@pytest.mark.ranks(some([2, 3], 1), backend="shm", timeout=240)
@executor("core")
@pytest.mark.parametrize("all_checks", [exhaustive()])
async def test_conformance_with_tiny_slots_and_everything_on_the_worker(all_checks: bool, kind: str) -> None:
    hints = {"chunk_bytes": "1024", "whole_bytes": "64", "inline_bytes": "0", "message_bytes": "1024"}
    only = None if os.environ["WORLD_SIZE"] == "2" and all_checks else some(MANY_RANKS, 20)
    async with executors(kind):
        await check_backend(lambda name: new_comm("shm", name=name, timeout=50, hints=hints), only=only)


@executor("core", "reference")
@pytest.mark.ranks(2)
async def test_messages_that_were_not_received_are_named_at_the_end(kind: str) -> None:
    """Their senders have gone on, so no error tells of them."""
    async with executors(kind):
        handler = logging.handlers.BufferingHandler(10)
        logger = logging.getLogger("asynccomm")
        logger.addHandler(handler)
        comm = await new_comm("shm", name="leftovers")
        if comm.rank == 0:
            for tag in range(3):
                await comm.send(torch.ones(2), 1, tag=tag)
            await comm.send_object("x", 1, tag=7)
        await comm.barrier()
        if comm.rank == 1:
            await comm.recv(torch.zeros(2), 0, tag=1)
        await comm.aclose()
        logger.removeHandler(handler)
        texts = [record.getMessage() for record in handler.buffer]
        named = "comm 'leftovers' was closed with messages that were not received: "
        content = r"float32\[2\] of rank 0; float32\[2\] of rank 0, tag=2; an object of \d+ bytes of rank 0, tag=7"
        assert len(texts) == comm.rank
        assert all(re.fullmatch(named + content, text) for text in texts), texts


def eventfds() -> int:
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(path) and os.readlink(path).endswith("[eventfd]") for path in paths)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_comm_that_is_dropped_after_its_loop_leaves_no_eventfd(run: Callable[..., Comm]) -> None:
    async def made() -> Comm:
        comm = await new_comm("shm", alone=True)
        await comm.all_reduce(torch.ones(1))
        return comm

    def drop() -> None:
        comm = run(made())
        with pytest.warns(ResourceWarning, match="never closed"):
            del comm
            gc.collect()

    drop()  # the progress thread of the process stays, and has an eventfd
    before = eventfds()
    drop()
    asyncio.run(until(lambda: eventfds() <= before))
