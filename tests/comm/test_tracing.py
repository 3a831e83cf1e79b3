"""Traces of real comms; the format is tested in tests/observe/test_chrome.py."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asynccomm import Comm, new_comm
from asynccomm.cli.main import main
from asynccomm.comm.tracing import TraceScope
from asynccomm.observe.chrome import DIRECTORY
from asynccomm.testing.local import loopback_world
from tests.observe.test_chrome import check_format


def names(trace: dict[str, Any], phase: str = "X") -> set[tuple[int, str]]:
    return {(event["pid"], event["name"]) for event in trace["traceEvents"] if event["ph"] == phase}


@pytest.mark.ranks(2)
async def test_the_trace_of_all_ranks_names_the_straggler(comm: Comm, tmp_path: Path) -> None:
    path = Path(await comm.broadcast_object(str(tmp_path), 0, expect=str)) / "out.json"
    async with comm.trace(path):
        for _ in range(3):
            if comm.rank == 1:
                await asyncio.sleep(0.02)  # the straggler
            await comm.all_reduce(torch.ones(4))
        async with comm.coalesce():
            works = [comm.all_reduce(torch.ones(4)) for _ in range(2)]
        await asyncio.gather(*works)
    assert comm._submitter.counts.noted_calls == 0
    await comm.barrier()
    if comm.rank == 0:
        trace = json.loads(path.read_text())
        check_format(trace)
        assert {(0, "all_reduce"), (1, "all_reduce"), (0, "batch of 2"), (0, "wait for rank 1")} <= names(trace)
        waits = [event["dur"] for event in trace["traceEvents"] if event["name"] == "wait for rank 1"]
        assert sum(wait > 15_000 for wait in waits) == 3
        assert {pid for pid, _ in names(trace, "C")} == {0, 1}, "the lag of each loop"
        assert {pid for pid, _ in names(trace, "s")} >= {1}
        clocks = json.loads(trace["otherData"]["clocks"])
        assert [clock["offset"] for clock in clocks] == [0.0, 0.0], "one host has one clock"


async def test_each_rank_writes_its_own_without_a_collective_and_they_can_be_merged(tmp_path: Path) -> None:
    async with loopback_world(2) as comms:

        async def body(comm: Comm) -> None:
            with comm.trace(tmp_path / "out.json"):
                await comm.all_reduce(torch.ones(2))

        await asyncio.gather(*map(body, comms))
    files = [tmp_path / f"out.rank{rank}.json" for rank in range(2)]
    for rank, path in enumerate(files):
        trace = json.loads(path.read_text())
        check_format(trace)
        assert names(trace) == {(rank, "all_reduce")}
    whole = tmp_path / "whole.json"
    assert main(["trace", "merge", *map(str, files), "--out", str(whole)]) == 0
    check_format(json.loads(whole.read_text()))
    assert names(json.loads(whole.read_text())) >= {(0, "all_reduce"), (1, "all_reduce")}


async def test_a_thread_may_trace(tmp_path: Path) -> None:
    asyncio.get_running_loop().set_debug(True)  # refuses timers and tasks from other threads

    def program(comm: Comm) -> None:
        with comm.trace(tmp_path / "out.json") as scope:
            comm.all_reduce(torch.ones(2)).wait()
            with pytest.raises(RuntimeError, match="has begun already"):
                scope.__enter__()

    async with loopback_world(1) as (comm,):
        await asyncio.to_thread(program, comm)
    assert names(json.loads((tmp_path / "out.rank0.json").read_text())) == {(0, "all_reduce")}


async def test_a_body_that_raises_leaves_the_own_trace(tmp_path: Path) -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(ValueError, match="of the body"):
            async with comm.trace(tmp_path / "out.json"):
                await comm.barrier()
                raise ValueError("of the body")
        scope = comm.trace(tmp_path / "other.json")
        with scope:
            pass
        with pytest.raises(RuntimeError, match="has begun already"), scope:
            pass
    assert names(json.loads((tmp_path / "out.rank0.json").read_text())) == {(0, "barrier")}


async def test_a_trace_that_was_cancelled_at_its_begin_is_over(tmp_path: Path) -> None:
    async with loopback_world(1) as (comm,):

        async def traced() -> None:
            async with comm.trace(tmp_path / "out.json"):
                raise AssertionError("was not cancelled")

        task = asyncio.create_task(traced())
        await asyncio.sleep(0)
        (recorder,) = comm._submitter.watchers.all
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not comm._submitter.watchers.all
        assert recorder._timer is None


async def test_no_path_of_a_file_is_refused_at_the_call(tmp_path: Path) -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(ValueError, match=f"path must be a file, and '{tmp_path}' is a folder"):
            comm.trace(tmp_path)
        with pytest.raises(ValueError, match=r"^path must be a file, got ''$"):
            comm.trace("")
        with pytest.raises(ValueError, match=f"^path must be in a folder that exists, and '{tmp_path}/no' is none$"):
            comm.trace(tmp_path / "no" / "out.json")
        path: Any
        for path in (3, None, b"out.json"):
            with pytest.raises(TypeError, match=rf"^path must be a str or an os.PathLike\[str\], got {path!r}$"):
                comm.trace(path)


async def test_only_rank_0_needs_the_folder_at_the_call(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    async with loopback_world(2) as (a, b):

        async def traced(scope: TraceScope, comm: Comm) -> None:
            async with scope:
                await comm.barrier()

        early = b.trace(folder / "out.json")
        folder.mkdir()
        await asyncio.gather(traced(a.trace(folder / "out.json"), a), traced(early, b))
    assert [path.name for path in folder.iterdir()] == ["out.json"]


async def test_waits_for_room_are_in_the_trace(tmp_path: Path) -> None:
    async with loopback_world(2, max_ops=1) as (a, b):
        with a.trace(tmp_path / "out.json"):
            work = a.all_reduce(torch.ones(2))
            ready = asyncio.create_task(a.ready())
            await asyncio.sleep(0)
            await asyncio.gather(work, b.all_reduce(torch.ones(2)), ready)
    assert (0, "ready()") in names(json.loads((tmp_path / "out.rank0.json").read_text()))


async def test_every_comm_of_a_traced_run_writes_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    async with new_comm(alone=True, name="one") as one, await one.dup() as two:
        await one.barrier()
        await two.all_reduce(torch.ones(1))
    parts = [json.loads(path.read_text())["asynccommPart"] for path in tmp_path.iterdir()]
    assert {(part["comm"], len(part["ops"])) for part in parts} >= {("one", 1)}
    assert len(parts) == 2
