"""The flight recorder: what operations leave, and what a group that breaks does with it."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import pickle
import re
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components import types as fr_types

import asynccomm.compat.c10d as dist
from asynccomm import AbortedError, BackendError, CollectiveTimeoutError, CommOptions, PayloadError
from asynccomm.comm import session
from asynccomm.compat.c10d.fake import fake_comm
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.recorder import FlightRecorder
from tests.compat.c10d.worlds import alone, run_ranks

# older ones know the names of two backends, neither of which can be had here
READS_ANY_BACKEND = hasattr(fr_types, "_UNEVEN_COLLECTIVES")
SOON = timedelta(seconds=0.1)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for what in ("BUFFER_SIZE", "DUMP_TEMP_FILE", "DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(f"TORCH_FR_{what}", raising=False)
    for what in ("TRACE_BUFFER_SIZE", "DEBUG_INFO_TEMP_FILE", "DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(f"TORCH_NCCL_{what}", raising=False)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where dumps are written."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    return tmp_path


def dumped() -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(dist._dump_fr_trace())
    return found


def last() -> dict[str, Any]:
    found: dict[str, Any] = dumped()["entries"][-1]
    return found


async def run_late() -> None:
    """Rank 0 calls what rank 1 does not, until its time is over."""

    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 1], group_desc="pair")
        await dist.all_reduce(torch.ones(3), group=pg)
        dist._set_pg_timeout(SOON, pg)
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError):
                await dist.broadcast(torch.ones(2, 3), 0, pg)
        while pg.comm()._session.error is None:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)

    await run_ranks(2, body)


# -- what operations leave --------------------------------------------------------------------------------------------


async def test_what_an_operation_leaves() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 0], timedelta(seconds=7), group_desc="pair")
        await dist.all_reduce(torch.ones(2), group=pg)
        await dist.all_reduce(torch.ones(4, 5, dtype=torch.int8), group=pg)
        dump = dumped()
        assert re.fullmatch(r"\d+\.\d+", dump["version"])
        assert dump["pg_config"]["1"] == {"name": "1", "desc": "pair", "ranks": "[0, 1]", "collectives": 2}
        assert dump["pg_status"]["1"] == {
            "last_enqueued_collective": "1",
            "last_started_collective": "1",
            "last_completed_collective": "1",
        }
        first, second = dump["entries"]
        assert (first["collective_seq_id"], first["record_id"]) == (0, 0)
        created, completed = second.pop("time_created_ns"), second.pop("time_discovered_completed_ns")
        assert first["time_created_ns"] <= created == second.pop("time_discovered_started_ns") <= completed
        assert second.pop("duration_ms") == pytest.approx((completed - created) / 1e6, abs=0.01)
        (frame,) = second.pop("frames")
        assert (frame["name"], frame["filename"]) == ("body", __file__)
        assert "torch.int8" in Path(__file__).read_text().splitlines()[frame["line"] - 1]
        assert second.pop("signature") != first["signature"]
        assert second == {
            "record_id": 1,
            "pg_id": 1,
            "process_group": ("1", "pair"),
            "collective_seq_id": 1,
            "p2p_seq_id": 0,
            "op_id": 1,
            "is_p2p": False,
            "profiling_name": "loopback:all_reduce",
            "input_sizes": [[4, 5]],
            "input_dtypes": ["int8"],
            "output_sizes": [[4, 5]],
            "output_dtypes": ["int8"],
            "state": "completed",
            "timeout_ms": 7000,
            "retired": True,
            "op": "all_reduce(int8[20], SUM)",
        }

    await run_ranks(2, body)


async def test_names_and_sizes() -> None:
    """As torch's backends record them: several tensors count as one vector."""

    async def body(rank: int) -> None:
        one, two = torch.ones(1, 3), torch.ones(2, 3)
        pair = [one.clone(), one.clone()]
        mine = pair if rank == 0 else None
        calls: list[tuple[Any, str, list[list[int]], list[list[int]]]] = [
            (lambda: dist.broadcast(one, 0), "broadcast", [[1, 3]], [[1, 3]]),
            (lambda: dist.reduce(one, 0), "reduce", [[1, 3]], [[1, 3]]),
            (lambda: dist.all_gather(pair, one), "all_gather", [[1, 3]], [[6]]),
            (lambda: dist.all_gather_into_tensor(two, one), "_all_gather_base", [[1, 3]], [[2, 3]]),
            (lambda: dist.reduce_scatter(one, pair), "reduce_scatter", [[6]], [[1, 3]]),
            (lambda: dist.reduce_scatter_tensor(one, two), "_reduce_scatter_base", [[2, 3]], [[1, 3]]),
            (lambda: dist.scatter(one, mine), "scatter", [[6]] if mine else [], [[1, 3]]),
            (lambda: dist.gather(one, mine), "gather", [[1, 3]], [[6]] if mine else []),
            (lambda: dist.all_to_all_single(two.clone(), two), "all_to_all", [[2, 3]], [[2, 3]]),
            (lambda: dist.all_to_all(pair, [one, one]), "all_to_all", [[6]], [[6]]),
            (lambda: dist.barrier(), "barrier", [], []),
            (lambda: dist.all_gather_object([None] * 2, 1), "all_gather", [[0]], [[0]]),
            (lambda: dist.broadcast_object_list([1], 0), "broadcast", [[0]], [[0]]),
            (lambda: dist.gather_object(1, [1, 2] if mine else None), "gather", [[0]], [[0]]),
            (lambda: dist.scatter_object_list([None], [1, 2] if mine else None), "scatter", [[0]], [[0]]),
        ]
        for call, name, inputs, outputs in calls:
            await call()
            entry = last()
            assert entry["profiling_name"] == f"loopback:{name}"
            assert (entry["input_sizes"], entry["output_sizes"]) == (inputs, outputs), name
            assert not entry["is_p2p"]
        assert [entry["collective_seq_id"] for entry in dumped()["entries"]] == list(range(len(calls)))

    await run_ranks(2, body)


async def test_messages_are_numbered_apart() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2])
        if rank == 0:
            return
        await dist.barrier(pg)
        tensor = torch.ones(4)
        if rank == 1:
            await dist.send(tensor, 2, pg)
            await dist.send_object_list([1], 2, pg)
            name, sizes = "send 0->1", ([[4]], [])
        else:
            await dist.recv(tensor, group=pg)
            await dist.recv_object_list([None], 1, pg)
            name, sizes = "recv 1<-0", ([], [[4]])
        _, first, second = dumped()["entries"]
        assert [each["p2p_seq_id"] for each in (first, second)] == [0, 1]
        assert first["profiling_name"] == f"loopback:{name if rank == 1 else 'recv 1<-?'}"
        assert second["profiling_name"] == f"loopback:{name}"
        assert (first["input_sizes"], first["output_sizes"]) == sizes
        assert first["is_p2p"]

    await run_ranks(3, body)


async def test_operations_that_torch_s_recorder_does_not_have_leave_nothing() -> None:
    async def body(rank: int) -> None:
        await dist.all_reduce(torch.ones(2))
        await dist.monitored_barrier()
        assert [entry["profiling_name"] for entry in dumped()["entries"]] == ["loopback:all_reduce"]

    await run_ranks(2, body)


async def test_what_is_sent_together_is_recorded_one_by_one() -> None:
    async with alone():
        ints, floats = torch.ones(1, dtype=torch.int64), torch.ones(2)
        batch = [dist.P2POp(dist.isend, floats, 0), dist.P2POp(dist.irecv, floats.clone(), 0)]
        for work in dist.batch_isend_irecv(batch):
            await work
        await dist._get_default_group().comm().all_reduce_coalesced([ints, floats])
        async with dist._coalescing_manager():
            dist.all_reduce(ints)
            dist.all_reduce(ints)
        names = [entry["op"].partition("(")[0] for entry in dumped()["entries"]]
        assert names == ["send", "recv", *["all_reduce"] * 4]
        numbers = [(entry["p2p_seq_id"], entry["collective_seq_id"]) for entry in dumped()["entries"]]
        assert numbers == [(0, 0), (1, 0), (0, 0), (0, 1), (0, 2), (0, 3)]


async def test_how_far_it_came() -> None:
    called = asyncio.Barrier(2)

    async def body(rank: int) -> None:
        pg = await dist.new_group([0, 1])
        if rank == 0:
            work = dist.all_reduce(torch.ones(1), group=pg, async_op=True)
            assert last()["state"] == "started"
            assert "duration_ms" not in last()
            assert last()["time_discovered_completed_ns"] is None
            assert not last()["retired"]
            with pg.comm().coalesce():  # type: ignore[union-attr]
                held = pg.comm().all_reduce(torch.ones(1))  # type: ignore[union-attr]
                assert (last()["state"], last()["collective_seq_id"]) == ("scheduled", -1)
                assert last()["time_discovered_started_ns"] is None
                status = dumped()["pg_status"]["1"]
                assert (status["last_enqueued_collective"], status["last_completed_collective"]) == ("0", "-1")
            assert (last()["state"], last()["collective_seq_id"]) == ("started", 1)
            assert last()["time_discovered_started_ns"] is not None
            await called.wait()
            await work
            await held
        else:
            await called.wait()
            await dist.all_reduce(torch.ones(1), group=pg)
            await dist.all_reduce(torch.ones(1), group=pg)
        assert [entry["state"] for entry in dumped()["entries"]] == ["completed"] * 2

    await run_ranks(2, body)


async def test_what_the_ranks_agree_on() -> None:
    async with alone(pg_options=CommOptions(ordering="agreed")):
        await dist.barrier()
        assert (last()["state"], last()["collective_seq_id"]) == ("completed", 0)


async def test_one_that_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """What the group breaks of later is another matter."""
    with dist.use_world(dist.World()):
        await dist.init_process_group("fake", rank=0, world_size=2)
        with pytest.raises(PayloadError):
            await dist.all_gather_object([None] * 2, 1)
        assert (last()["state"], last()["error"], last()["retired"]) == ("started", "PayloadError", True)
        dist._get_default_group().comm()._session.break_by(BackendError("no"))
        await dist.destroy_process_group()
    (said,) = [record.message for record in caplog.records if "is broken by" in record.message]
    assert said.endswith(
        ". On this rank, collective #0 of the group was called last, and no recorded collective was done; "
        "in flight: nothing"
    )


async def test_many_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    async with alone() as pg:
        for tag in range(6):
            dist.irecv(torch.ones(1), 0, tag=tag)
        pg.comm()._session.break_by(BackendError("no"))
        assert {entry["error"] for entry in dumped()["entries"]} == {"BackendError"}
    (said,) = [record.message for record in caplog.records if "is broken by" in record.message]
    assert ". On this rank, no collective of the group was called; in flight: recv(" in said
    assert said.endswith("recv(float32[1], src=0, tag=3) and 2 more")


async def test_no_tensor_is_kept() -> None:
    async with alone():
        tensor = torch.ones(1)
        kept = weakref.ref(tensor)
        await dist.all_reduce(tensor)
        del tensor
        gc.collect()
        assert kept() is None
        assert len(dumped()["entries"]) == 1


# -- the ring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
async def test_the_last_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")
    async with alone():
        for _ in range(5):
            await dist.barrier()
        assert [entry["record_id"] for entry in dumped()["entries"]] == [2, 3, 4]


async def test_there_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    async with alone() as pg:
        await dist.barrier()
        assert pg.comm()._submitter.watchers.all == ()
        dump = dumped()
        assert (dump["entries"], dump["pg_config"]) == ([], {})


async def test_a_size_that_is_no_number(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "many")
    async with alone():
        await dist.barrier()
        assert len(dumped()["entries"]) == 1
    assert "TORCH_FR_BUFFER_SIZE is 'many' and no number" in caplog.text


async def test_a_group_of_several_comms() -> None:
    """Each has numbers of its own."""
    async with alone("cpu:loopback") as one, alone("cpu:loopback") as other:
        gpu = await fake_comm("gpu", 0, 1, torch.device("cuda", 0), one.timeout)  # on none, and nothing is moved
        async with gpu:
            comms = {"cpu": other.comm(), "cuda": gpu}
            pg = ProcessGroup("x", "", [0], 0, "cpu:loopback,cuda:fake", one.config, comms, one.timeout)
            recorder = FlightRecorder()
            recorder.attach(pg)
            await pg.comm("cpu").barrier()
            await pg.comm("cuda").barrier()
            dump = recorder.dump()
            said = [(entry["process_group"][0], entry["profiling_name"]) for entry in dump["entries"]]
            assert said == [("x/cpu", "loopback:barrier"), ("x/cuda", "fake:barrier")]
            assert [entry["collective_seq_id"] for entry in dump["entries"]] == [0, 0]
            assert list(dump["pg_config"]) == ["x/cpu", "x/cuda"]
            assert list(dump["pg_status"]) == ["0", "1"]


async def test_what_is_dumped() -> None:
    async with alone():
        await dist.barrier()
        pending = dist.irecv(torch.ones(1), 0)
        dump = json.loads(dist._dump_fr_trace_json())
        assert [entry["profiling_name"] for entry in dump["entries"]] == ["loopback:barrier", "loopback:recv 0<-0"]
        assert "frames" not in dump["entries"][0]
        active = pickle.loads(dist._dump_fr_trace(includeStackTraces=False, onlyActive=True))
        assert [entry["is_p2p"] for entry in active["entries"]] == [True]
        assert "frames" not in active["entries"][0]
        assert len(json.loads(dist._dump_fr_trace_json(onlyActive=True))["entries"]) == 1
        assert "entries" not in pickle.loads(dist._dump_fr_trace(includeCollectives=False))
        assert "entries" not in json.loads(dist._dump_fr_trace_json(includeCollectives=False))
        dist.isend(torch.ones(1), 0)
        assert pending is not None
        await pending
        dist._reset_fr_trace()
        assert dumped()["entries"] == []


async def test_an_operation_without_a_time_limit() -> None:
    async with alone() as pg:
        await pg.comm().barrier(timeout=float("inf"))
        assert last()["timeout_ms"] is None


async def test_groups_that_are_over() -> None:
    async with alone():
        pg = await dist.new_group([0], group_desc="short")
        await dist.barrier(pg)
        await dist.destroy_process_group(pg)
        assert dumped()["pg_config"]["1"]["desc"] == "short"  # as long as there is something of it
        dist._reset_fr_trace()
        assert list(dumped()["pg_config"]) == ["0"]


# -- when a group breaks ----------------------------------------------------------------------------------------------


async def test_a_timeout_is_dumped_on_all_ranks(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    await run_late()
    dumps = [pickle.loads((files / f"rank_{rank}").read_bytes()) for rank in range(2)]
    entries = [[entry for entry in dump["entries"] if entry["process_group"] == ("1", "pair")] for dump in dumps]
    assert [len(each) for each in entries] == [2, 1]
    cut = entries[0][1]
    assert (cut["state"], cut["error"], cut["retired"]) == ("started", "CollectiveTimeoutError", True)
    assert (cut["profiling_name"], cut["timeout_ms"]) == ("loopback:broadcast", 100)
    for dump, called in zip(dumps, ("1", "0"), strict=True):
        status = dump["pg_status"]["1"]
        assert (status["last_enqueued_collective"], status["last_completed_collective"]) == (called, "0")
        assert "CollectiveTimeoutError: broadcast" in status["error"]
    first, second = sorted(record.message for record in caplog.records if "is broken by" in record.message)
    assert first.startswith("process group '1' is broken by AbortedError: aborted by rank 0: CollectiveTimeoutError: ")
    assert first.endswith(
        f". On this rank, collective #0 of the group was called last, and #0 was done last; in flight: nothing"
        f"; the flight recorder is in {files / 'rank_1'}"
    )
    assert second.startswith("process group '1' is broken by CollectiveTimeoutError: broadcast")
    assert second.endswith(
        f". On this rank, collective #1 of the group was called last, and #0 was done last; "
        f"in flight: broadcast(float32[6], root=0); the flight recorder is in {files / 'rank_0'}"
    )


@pytest.mark.skipif(not READS_ANY_BACKEND, reason="torchfrtrace of this torch refuses other backends than NCCL")
async def test_torch_s_tool_finds_who_is_missing(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    await run_late()
    with caplog.at_level(logging.INFO):
        fr_trace.main([str(files), "-o", str(files / "database")])
    said = [record.getMessage() for record in caplog.records]
    assert any("Not all ranks joining collective" in text for text in said)
    assert "missing ranks: {1}" in said
    assert "collective: loopback:broadcast" in said
    _, database = pickle.loads((files / "database").read_bytes())
    assert [(each.collective_name, each.pass_check) for each in database.collectives] == [
        ("loopback:all_reduce", True),
        ("loopback:broadcast", True),
    ]
    assert {group.desc for group in database.groups} == {"default_pg", "pair"}


@pytest.mark.skipif(not READS_ANY_BACKEND, reason="torchfrtrace of this torch refuses other backends than NCCL")
async def test_torch_s_tool_matches_collectives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(rank: int) -> None:
        one, two = torch.ones(1, 3), torch.ones(2, 3)
        pair = [one.clone(), one.clone()]
        mine = pair if rank == 0 else None
        await dist.broadcast(one, 0)
        await dist.reduce(one, 0)
        await dist.all_gather(pair, one)
        await dist.all_gather_into_tensor(two, one)
        await dist.reduce_scatter(one, pair)
        await dist.reduce_scatter_tensor(one, two)
        await dist.scatter(one, mine)
        await dist.gather(one, mine)
        await dist.all_to_all_single(two.clone(), two)
        await dist.all_to_all(pair, [one, one])
        await dist.all_gather_object([None] * 2, 1)
        await dist.barrier()
        (tmp_path / f"rank_{rank}").write_bytes(dist._dump_fr_trace())

    await run_ranks(2, body)
    with caplog.at_level(logging.INFO):
        fr_trace.main([str(tmp_path), "-o", str(tmp_path / "database")])
    _, database = pickle.loads((tmp_path / "database").read_bytes())
    assert len(database.collectives) == 12
    assert all(each.pass_check for each in database.collectives)
    assert not [record for record in caplog.records if "sequence number" in record.getMessage()]


async def test_an_abort_is_no_error_of_the_group(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with alone() as pg:
        work = pg.comm().recv(torch.ones(1), 0)
        pg.comm().abort("no")
        with pytest.raises(AbortedError):
            await work
        assert (last()["error"], last()["state"]) == ("AbortedError", "started")
    assert not list(files.iterdir())
    assert not [record for record in caplog.records if "is broken by" in record.message]


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"])
async def test_files_can_be_turned_off(
    name: str, files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "false")
    await run_late()
    assert not list(files.iterdir())
    assert len([record for record in caplog.records if "is broken by" in record.message]) == 2


async def test_it_is_written_before_the_process_ends(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[bool] = []
    monkeypatch.setattr(session.os, "abort", lambda: there.append((files / "rank_0").exists()))
    async with alone(pg_options=CommOptions(abort_process_on_timeout_or_error=True)) as pg:
        pg.comm()._session.break_by(BackendError("no"))
    assert there == [True]


async def test_a_file_that_cannot_be_written(
    files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(files / "nowhere" / "rank_"))
    await run_late()
    said = [record.message for record in caplog.records if "is broken by" in record.message]
    assert len(said) == 2
    assert all("the flight recorder could not be written" in text for text in said)
