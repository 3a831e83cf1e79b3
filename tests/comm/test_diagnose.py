"""Asking what the ranks are at, whatever they are at; and what the control channel sees by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from asynccomm import (
    BrokenError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Comm,
    Diagnosis,
    MemoryStore,
    ReduceOp,
    new_comm,
)
from asynccomm.testing.local import loopback_world

HERE = Path(__file__).name


# -- on loopback ------------------------------------------------------------------------------------------------------


async def test_while_a_collective_hangs() -> None:
    async with loopback_world(3) as comms:
        works = [comm.all_reduce(torch.ones(2)) for comm in comms[:2]]
        found = await comms[2].diagnose()
        assert isinstance(found, Diagnosis)
        assert found.comm == "test"
        assert [state.rank for state in found.ranks] == [0, 1, 2]
        assert all(state.answered and state.state == "open" and state.pid == os.getpid() for state in found.ranks)
        assert found.behind == (2,)
        for state in found.ranks[:2]:
            (waits,) = state.pending
            assert waits.op == "all_reduce(float32[2], SUM)"
            assert waits.seq == 0
            assert HERE in waits.site
            assert state.last is not None
            assert state.last.site == waits.site
        assert found.ranks[2].last is None
        assert "behind: ranks [2]" in str(found)
        comms[2].all_reduce(torch.ones(2))
        await asyncio.gather(*works)
        found = await comms[0].diagnose(timeout=timedelta(seconds=5))
        assert found.behind == ()
        assert "which is done" in str(found)


async def test_stacks_is_a_bool() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(TypeError, match="stacks must be True or False, got 'no'"):
            await comm.diagnose(stacks="no")  # type: ignore[arg-type]


async def test_with_stacks() -> None:
    async with loopback_world(2) as (a, b):

        async def waits_here() -> None:
            await a.barrier()

        task = asyncio.ensure_future(waits_here())
        await asyncio.sleep(0)
        found = await b.diagnose(stacks=True)
        assert "waits_here" in found.ranks[0].stacks
        assert "waiting for <Work #0 barrier()" in found.ranks[0].stacks
        assert (await b.diagnose()).ranks[0].stacks == ""
        b.barrier()
        await task


async def test_on_a_broken_comm() -> None:
    async with loopback_world(2) as (a, b):
        work = a.barrier()
        b.abort("enough")
        with pytest.raises(BrokenError):
            await work
        found = await a.diagnose()
        assert [state.state for state in found.ranks] == ["broken: aborted by rank 1: enough"] * 2


async def test_a_comm_that_other_ranks_have_closed() -> None:
    async with loopback_world(2) as (a, b):
        await b.aclose()
        found = await a.diagnose()
        assert found.ranks[1].gone == ""
        assert "rank 1 has left" in str(found)
    with pytest.raises(ClosedError):
        await a.diagnose()


async def test_a_child_that_other_ranks_have_closed() -> None:
    async with loopback_world(2) as (a, b):
        one, other = await asyncio.gather(a.dup("child"), b.dup("child"))
        await other.aclose()
        found = await one.diagnose()
        assert (found.ranks[1].answered, found.ranks[1].state) == (True, "closed")
        await one.aclose()


@pytest.mark.parametrize("timeout", [0, -1, "1"])
async def test_bad_time_limits(timeout: object) -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises((TypeError, ValueError), match="timeout"):
            await comm.diagnose(timeout=timeout)  # type: ignore[arg-type]


async def test_on_another_loop() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, comm.diagnose())


@pytest.mark.parametrize("off", [{0}, {1}, {0, 1, 2}])
async def test_where_the_control_channel_is_off(off: set[int]) -> None:
    store = MemoryStore()
    comms = await asyncio.gather(
        *(
            new_comm(
                "loopback", store=store, rank=rank, size=3, hints={"control": "off" if rank in off else "on"}
            )._connect()
            for rank in range(3)
        )
    )
    tensors = [torch.ones(2) for _ in comms]
    await asyncio.gather(*(comm.all_reduce(tensor) for comm, tensor in zip(comms, tensors, strict=True)))
    assert all(tensor.tolist() == [3, 3] for tensor in tensors)
    for rank, comm in enumerate(comms):
        if rank in off:
            with pytest.raises(RuntimeError, match="no control channel here"):
                await comm.diagnose()
        else:
            found = await comm.diagnose()
            assert [state.answered for state in found.ranks] == [other not in off for other in range(3)]
            assert all("has no control channel" in found.ranks[other].doing for other in off)
    await asyncio.gather(*(comm.aclose() for comm in comms))


# -- on processes -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3, backend="gloo")
async def test_ranks_on_processes_while_gloo_hangs(comm: Comm) -> None:
    if comm.rank != 2:
        work = comm.all_reduce(torch.ones(4))
        if comm.rank == 0:
            found = await comm.diagnose(stacks=True)
            while found.ranks[1].collectives < 1 or found.ranks[2].collectives:
                found = await comm.diagnose(stacks=True)
            assert found.behind == (2,)
            assert len({state.pid for state in found.ranks}) == 3
            assert "all_reduce(float32[4], SUM)" in str(found.ranks[1].pending[0])
            assert "test_ranks_on_processes_while_gloo_hangs" in found.ranks[1].stacks
            await comm.send(torch.ones(1), 2)
        await work
    else:
        await comm.recv(torch.ones(1), 0)
        await comm.all_reduce(torch.ones(4))


@pytest.mark.ranks(2, backend="gloo")
async def test_a_blocked_loop_answers_and_is_named(comm: Comm, tmp_path: Path) -> None:
    release = tmp_path / "release"
    await comm.barrier()
    if comm.rank == 1:
        while not release.exists():
            time.sleep(0.001)  # as a step of training that lasts, on the loop
        await comm.barrier()
        return
    try:
        async with asyncio.timeout(30):
            while not (found := await comm.diagnose()).ranks[1].blocked:
                pass
        assert "its event loop is blocked" in found.ranks[1].doing
        assert not found.ranks[0].blocked
    finally:
        release.touch()
    await comm.barrier()


@pytest.mark.ranks(3, backend="gloo")
async def test_another_collective_is_named_on_all_ranks_with_both_places(comm: Comm) -> None:
    await comm.barrier()
    start = time.monotonic()
    with pytest.raises(CollectiveMismatchError) as caught:
        if comm.rank == 1:
            await comm.all_reduce(torch.ones(4), ReduceOp.MAX)
        else:
            await comm.all_reduce(torch.ones(4))
    error = caught.value
    assert time.monotonic() - start < 10
    assert error.seq == 1
    assert 1 in (error.rank, error.other_rank)
    assert {error.op, error.other_op} == {"all_reduce(float32[4], SUM)", "all_reduce(float32[4], MAX)"}
    assert HERE in error.site
    assert HERE in error.other_site
    assert error.site != error.other_site


@pytest.mark.ranks(2, backend="gloo")
async def test_batches_that_end_elsewhere_are_named(comm: Comm) -> None:
    with pytest.raises(CollectiveMismatchError) as caught:
        if comm.rank == 0:
            async with comm.coalesce():
                works = [comm.broadcast(torch.ones(n), 1) for n in (3, 5)]
        else:
            works = [comm.broadcast(torch.ones(n), 1) for n in (3, 5)]
        await asyncio.gather(*works)
    assert caught.value.seq == 0


@pytest.mark.ranks(2, backend="gloo")
async def test_uneven_sizes_are_no_difference(comm: Comm) -> None:
    for turn in range(3):
        mine = comm.rank + 1 + turn
        got = await comm.all_gather_v(None, torch.full((mine,), float(comm.rank)))
        assert len(got) == 3 + 2 * turn
        await comm.gather_v(None, torch.ones(mine), root=0)
        await comm.all_gather_object(["x"] * mine)
        parts = [torch.ones(1 + comm.rank + other) for other in range(2)]
        await comm.all_to_all(None, parts)
        await comm.broadcast_object("x" * 100 if comm.rank == 0 else None, 0)
        async with comm.coalesce():
            comm.all_reduce(torch.ones(2))
            comm.all_reduce(torch.ones(3))
    await asyncio.sleep(0.2)  # for the last fingerprints to be compared
    found = await comm.diagnose()
    assert all(state.state == "open" for state in found.ranks)
    await comm.barrier()


@pytest.mark.ranks(2, backend="gloo")
async def test_a_stopped_rank_is_silent(comm: Comm) -> None:
    if comm.rank == 1:
        with pytest.raises(BrokenError):
            await comm.all_gather(None, torch.tensor(os.getpid()))
            while True:
                await comm.barrier()
        return
    pids = await comm.all_gather(None, torch.tensor(os.getpid()))
    os.kill(int(pids[1]), signal.SIGSTOP)
    try:
        with pytest.raises(CollectiveTimeoutError) as caught:
            while True:  # it may have called some before it was stopped
                await comm.barrier(timeout=0.5)
        assert "rank 1: does not answer" in str(caught.value)
        assert HERE in caught.value.site
        found = await comm.diagnose(timeout=0.2)
        assert not found.ranks[1].answered
        assert found.ranks[1].gone is None
        assert "it is stopped, or something holds its interpreter lock" in str(found)
    finally:
        os.kill(int(pids[1]), signal.SIGCONT)


@pytest.mark.ranks(2, backend="gloo", hints={"control": "off"})
async def test_collectives_without_a_control_channel(comm: Comm) -> None:
    tensor = torch.ones(2)
    await comm.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="no control channel"):
        await comm.diagnose()


KILLED = """
import asyncio, asynccomm, os, signal, time, torch
async def main():
    async with asynccomm.new_comm("gloo", name="t", store=STORE, timeout=60) as comm:
        try:
            await comm.barrier()  # may also end with the error: rank 1 is not the last one to leave it
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            await comm.recv(torch.ones(1), 2 - comm.rank)  # from who lives: the transport has nothing to say
        except asynccomm.PeerLostError as exc:
            print("lost", exc.rank, exc, flush=True)
            raise SystemExit(0)
asyncio.run(main())
"""


def test_a_killed_rank_is_named_on_all_others(tmp_path: Path) -> None:
    code = KILLED.replace("STORE", repr(f"file://{tmp_path}/store"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert outputs[rank][0].startswith("lost 1 rank 1 was lost"), outputs
        assert processes[rank].returncode == 0
