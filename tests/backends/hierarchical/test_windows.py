"""Windows on pretended hosts: both ways to one memory, in order; hosts without memory, and ranks that die."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, BrokenError, new_comm
from asynccomm.backends.base import UnsuitableError
from asynccomm.backends.gloo.windows import GlooWindow
from asynccomm.backends.hierarchical.windows import HierarchicalWindow
from asynccomm.backends.shm import bootstrap
from asynccomm.backends.shm.windows import ShmWindow
from asynccomm.core.hosts import PRETENDED
from asynccomm.core.work import Work
from asynccomm.errors import BackendError
from asynccomm.testing import check_backend
from asynccomm.testing.conformance import windows
from asynccomm.testing.conformance.suite import _checks
from tests.forkserver import Nursery
from tests.pretended_hosts import HINTS, LAYOUTS, comm_on, pretend

CHECKS = [check.__name__ for check in _checks(windows)]


@pytest.mark.parametrize("layout", ["2x2", "3+1"])
@pytest.mark.ranks(4, timeout=120)
async def test_conformance(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    pretend(monkeypatch, LAYOUTS[layout])
    await check_backend(lambda name: new_comm("hierarchical", name=name, timeout=50, hints=HINTS), only=CHECKS)


@pytest.mark.parametrize(
    ("hosts", "kinds"),
    [
        ("aab", [HierarchicalWindow, HierarchicalWindow, GlooWindow]),
        ("aaa", [ShmWindow] * 3),
        ("abc", [GlooWindow] * 3),
    ],
)
@pytest.mark.ranks(3)
async def test_memory_is_shared_with_the_ranks_of_the_host_only(
    monkeypatch: pytest.MonkeyPatch, hosts: str, kinds: list[type]
) -> None:
    async with comm_on(monkeypatch, hosts) as comm, await comm.window(64) as window:
        assert type(window._backend) is kinds[comm.rank]
        for rank in range(3):
            assert window.can_map(rank) is (hosts[rank] == hosts[comm.rank])
            if window.can_map(rank):
                assert window.tensor(rank).numel() == 64
            else:
                with pytest.raises(ValueError, match=rf"can be mapped here, got {rank}: use get\(\) and put\(\)"):
                    window.tensor(rank)


@pytest.mark.parametrize("executor", ["native", "reference"])
@pytest.mark.ranks(4)
async def test_both_ways_meet_in_one_memory(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    if executor == "reference":
        monkeypatch.setenv("ASYNCCOMM_EXECUTOR", executor)
    async with comm_on(monkeypatch, LAYOUTS["mixed"]) as comm, await comm.window(4 * 4000, signals=2) as window:
        tensor, turns = torch.ones(2000), 25  # above the size of a request
        for _ in range(turns):
            for target in range(comm.size):
                window.accumulate(tensor, target, 7)
                window.signal(target, 1, add=True)
        await window.wait_signal(1, turns * comm.size)  # behind the accumulates of all
        memory = window.tensor(None, (2000,), torch.float32, 7)
        assert memory.unique().tolist() == [turns * comm.size]
        assert window.signal_value(1) == turns * comm.size
        mine = torch.tensor([float(comm.rank)])
        for target in range(comm.size):
            window.put(mine, target, comm.rank)
        await window.fence()
        await comm.barrier()
        assert window.tensor(None, (4,), torch.float32).tolist() == [0, 1, 2, 3]
        for target in range(comm.size):
            out = torch.empty(4)
            await window.get(out, target)
            assert out.tolist() == [0, 1, 2, 3]


@pytest.mark.ranks(3)
async def test_a_fence_waits_on_both_ways_and_a_signal_keeps_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, "aab") as comm, await comm.window(1 << 24) as window:
        inside = window._backend._inside if comm.rank < 2 else None  # type: ignore[attr-defined]
        if comm.rank == 1:
            lock = inside._parts[1].memory_lock
            lock.take()
            assert lock.held()
        await comm.barrier()
        if comm.rank == 0:
            held = window.accumulate(torch.ones(2), 1)
            behind, fence, remote = window.signal(1), window.fence(), window.fence(2)
            await remote
            assert not any(work.done() for work in (held, behind, fence))
        await comm.barrier()
        if comm.rank == 1:
            assert window.signal_value() == 0
            lock.leave()
            await window.wait_signal()
        if comm.rank == 0:
            await fence
            assert held.done()
            large = window.put(torch.ones(1 << 22), 2)
            await window.fence()
            assert large.done()


@pytest.mark.ranks(4)
async def test_a_host_without_memory_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, LAYOUTS["2x2"]) as comm:
        made = bootstrap.create

        def full(nbytes: int) -> int:
            raise BackendError("no shared memory to be had")

        if comm.rank == 2:
            monkeypatch.setattr(bootstrap, "create", full)
        with pytest.raises(UnsuitableError, match=r"on the host of ranks 2, 3: .*rank 2 .*no shared memory to be had"):
            await comm.window(64)
        monkeypatch.setattr(bootstrap, "create", made)
        async with await comm.window(64) as window:  # the comm goes on
            await window.put(torch.ones(1), (comm.rank + 1) % 4)


@pytest.mark.ranks(4)
async def test_a_loop_that_is_blocked_is_served_and_a_thread_waits_for_ranks_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with comm_on(monkeypatch, LAYOUTS["2x2"]) as comm, await comm.window(8) as window:
        peer = comm.rank ^ 2  # on the other host

        def run() -> None:
            for turn in range(1, 10):
                window.signal(peer, 0, turn).wait()
                window.wait_signal(0, turn).wait()

        thread = threading.Thread(target=run)
        thread.start()
        if comm.rank < 2:
            thread.join(20)  # blocks the loop
        while thread.is_alive():
            await asyncio.sleep(0.001)
        assert window.signal_value() == 9


@pytest.mark.ranks(3)
async def test_windows_leave_no_descriptor_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, "aab") as comm:
        counts = []
        for _ in range(6):
            async with await comm.window(1 << 13) as window:
                await window.put(torch.ones(1), (comm.rank + 1) % 3)
            del window
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[5] <= counts[4], counts  # others may have closed meanwhile


@pytest.mark.ranks(3)
async def test_an_abort_ends_waits_and_puts_on_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = await comm_on(monkeypatch, "aab")
    window = await comm.window(3 << 22)
    view = window.tensor()
    waits = [window.wait_signal(slot) for slot in range(3)]
    await comm.barrier()
    if comm.rank == 0:
        tensor = torch.ones(3 << 20)
        works = [window.put(tensor, rank) for _ in range(4) for rank in (1, 2)]
        works_of_all: list[Work[Any]] = [*works, window.fence()]
        comm.abort("enough")
        for work in works_of_all:
            try:
                await work  # on a slow machine it may be done before the abort
            except AbortedError as exc:
                assert "enough" in str(exc)
    for wait in waits:
        with pytest.raises(AbortedError, match="enough"):
            await wait
    with pytest.raises(AbortedError):
        await window.put(torch.ones(1), 0)
    await window.aclose()
    await comm.aclose()
    view.fill_(1)  # still memory


async def lose_a_rank(rank: int, victim: int) -> list[object]:
    """A rank dies within puts to the other host; the others wait for its signal."""
    os.environ[PRETENDED] = f"host-{rank // 2}"
    comm = await new_comm("hierarchical", name="loss", timeout=30, hints=HINTS)
    window = await comm.window(1 << 24)
    view, tensor = window.tensor(), torch.ones(1 << 22)
    await comm.barrier()
    error = ""
    try:
        if rank == victim:
            threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                await asyncio.gather(window.put(tensor, rank ^ 2), window.accumulate(tensor, rank ^ 1))
        await window.wait_signal()
    except BrokenError as exc:
        error = f"{type(exc).__name__} {getattr(exc, 'rank', '')}"
    try:
        window.put(tensor, rank ^ 2)
    except BrokenError:
        error += " again"
    await comm.aclose()
    view.fill_(1)  # still memory
    return [error]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery(__file__)
    yield found
    found.close()


def test_the_death_of_a_rank_fails_the_waits_on_all_hosts(nursery: Nursery) -> None:
    found = nursery.run(lose_a_rank, 4, 3)
    assert found == {rank: ["PeerLostError 3 again"] for rank in range(3)}
