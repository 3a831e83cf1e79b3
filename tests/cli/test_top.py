"""``asynccomm top``: the lines between two snapshots, and a real job with a straggler."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from asynccomm.cli.main import main
from asynccomm.cli.top import JobSnapshot, lines_of, table_of
from asynccomm.control.diagnosis import Diagnosis, PendingOp, RankState

DEADLINE = 60.0
SCRIPT = """
import asyncio, os, asynccomm, torch

async def main():
    async with asynccomm.new_comm(name="main", hints={"metrics": "on"}) as comm:
        step = 0
        while not (await comm.broadcast_object(os.path.exists("stop"), 0)):
            if comm.rank == 1:
                await asyncio.sleep(0.02)
            await comm.all_reduce(torch.ones(1000))
            step += 1
            if step == 60 and comm.rank == 0:
                open("begun", "w").close()

asynccomm.run(main())
"""


def state(rank: int, collectives: int, nbytes: int = 0, pending: PendingOp | None = None) -> RankState:
    last = PendingOp("barrier()", collectives - 1, 0.1, "")
    ops = () if pending is None else (pending,)
    return RankState(
        rank, True, state="open", collectives=collectives, nbytes=nbytes, last=last, pending=ops, pid=10 + rank
    )


def test_rates_and_the_ranks_that_a_rank_waits_for() -> None:
    waiting = PendingOp("all_reduce(float32[4], SUM)", 5, 0.1, "")
    before = JobSnapshot(1.0, [Diagnosis("main", (state(0, 2), state(1, 2)))])
    now = JobSnapshot(3.0, [Diagnosis("main", (state(0, 6, 4_000_000_000, waiting), state(1, 5)))])
    first, second = lines_of(before, now)
    assert (first.op, first.busy, first.waits_for) == ("all_reduce(float32[4], SUM) #5", True, (1,))
    assert (first.per_second, first.gb_per_second) == (2.0, 2.0)
    assert (second.op, second.busy, second.waits_for) == ("barrier() #4", False, ())


def test_a_wait_in_a_window_is_not_for_the_ranks_with_fewer_collectives() -> None:
    waiting = PendingOp("wait_signal(0 >= 1, window=0)", 5, 0.1, "", p2p=True)
    now = JobSnapshot(1.0, [Diagnosis("main", (state(0, 6, pending=waiting), state(1, 5)))])
    assert lines_of(now, now)[0].waits_for == ()


def test_comms_with_the_same_name_are_counted_apart() -> None:
    busy, idle = (replace(state(0, calls), pid=pid) for calls, pid in ((1000, 10), (0, 20)))
    shot = [Diagnosis("main/tp", (busy,)), Diagnosis("main/tp", (idle,))]
    assert [line.per_second for line in lines_of(JobSnapshot(1.0, shot), JobSnapshot(2.0, shot))] == [0.0, 0.0]


def test_a_rank_that_does_not_answer_has_its_reason() -> None:
    gone = RankState(1, False, gone="killed")
    (line,) = lines_of(JobSnapshot(0.0, []), JobSnapshot(1.0, [Diagnosis("main", (gone,))]))
    assert (line.op, line.per_second) == ("is gone: killed", 0.0)
    pytest.importorskip("rich")
    assert table_of("run", [line]).row_count == 1


def test_a_straggler_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = f"top-{os.getpid()}"
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", "2", "--run-id", run, "script.py"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        try:
            end = time.monotonic() + DEADLINE
            while not (tmp_path / "begun").exists():
                assert time.monotonic() < end
                time.sleep(0.01)
            while True:  # the ranks exchange the times of their calls twice a second
                assert main(["top", run, "--once", "--json", "--interval", "0.2"]) == 0
                lines = {line["rank"]: line for line in json.loads(capsys.readouterr().out)}
                assert time.monotonic() < end
                if lines[0]["straggler"] == 1 and lines[0]["per_second"] > 0:
                    break
            assert lines[0]["gb_per_second"] > 0
            assert main(["top", run, "--once", "--interval", "0.1"]) == 0
            assert "waits for" in capsys.readouterr().out
        finally:
            (tmp_path / "stop").touch()
        assert process.wait(DEADLINE) == 0


def test_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "no such run", "--json"])
    assert "there is no run of yours" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["top", "--interval", "0"])
    assert "argument --interval: must be positive seconds, got 0.0" in capsys.readouterr().err
