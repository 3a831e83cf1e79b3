"""The flight recorder of comms: its records, and when it is written."""

import asyncio
import logging
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, CollectiveMismatchError, CollectiveTimeoutError, Comm, new_comm, pair_comm
from asynccomm.comm import flight, session
from asynccomm.comm.flight import calls_of, dump_comms, packed, write_dump
from asynccomm.observe.analysis import analyze, load_dump, unpacked
from asynccomm.testing.local import loopback_world
from tests.waiting import until


def entries(comm: Comm) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dump_comms([(comm._submitter, [0, 1])])["entries"]
    return found


async def test_the_last_calls_are_kept_with_their_ends() -> None:
    async with loopback_world(2) as (a, b):
        await asyncio.gather(a.all_reduce(torch.ones(2)), b.all_reduce(torch.ones(2)))
        pending = a.all_gather_single(torch.empty(6), torch.ones(3))
        done, flying = entries(a)
        assert (done["state"], done["collective_seq_id"], done["profiling_name"]) == (
            "completed",
            0,
            "loopback:all_reduce",
        )
        assert done["frames"][0]["filename"] == __file__
        assert done["duration_ms"] > 0
        assert (flying["state"], flying["profiling_name"]) == ("started", "loopback:_all_gather_base")
        assert (flying["input_sizes"], flying["output_sizes"], flying["input_dtypes"]) == ([[3]], [[6]], ["float32"])
        await asyncio.gather(pending, b.all_gather_single(torch.empty(6), torch.ones(3)))
        assert entries(a)[1]["state"] == "completed"


async def test_the_hint_sets_the_number_of_records() -> None:
    async with loopback_world(1, hints={"recorder": "3"}) as (comm,):
        for _ in range(5):
            await comm.barrier()
        assert [record.number_on_comm for record in calls_of(comm._submitter)] == [2, 3, 4]
    with pytest.raises(ValueError, match="hint 'recorder' must be an integer from 1 to 1048576, got '0'"):
        new_comm(alone=True, hints={"recorder": "0"})


async def test_a_packed_dump_leaves_out_the_oldest_where_it_would_be_too_long() -> None:
    async with loopback_world(1) as (comm,):
        for _ in range(64):
            await comm.barrier()
        whole = packed(comm._submitter, [0], 1 << 20)
        assert len(unpacked(whole)["entries"]) == 64
        part = unpacked(packed(comm._submitter, [0], len(whole) * 3 // 4))["entries"]
        assert 0 < len(part) < 64
        assert part[-1]["collective_seq_id"] == 63
        assert unpacked(packed(comm._submitter, [0], 0))["entries"] == []


async def test_a_failure_writes_the_dumps_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(flight.DIRECTORY, str(tmp_path))
    async with loopback_world(2) as (a, b):
        await asyncio.gather(a.barrier(), b.barrier())
        with pytest.raises(CollectiveTimeoutError):
            await a.all_reduce(torch.ones(1), timeout=0.05)
        await until(lambda: (tmp_path / "rank_0").exists() and (tmp_path / "rank_1").exists())
        await until(lambda: len(caplog.records) >= 2)
    found = next(each for each in analyze({rank: load_dump(tmp_path / f"rank_{rank}") for rank in range(2)}))
    assert found.suspect is not None
    assert any("the flight recorder is in" in record.getMessage() for record in caplog.records)


async def test_a_split_comm_names_the_dump_by_its_rank_in_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flight.DIRECTORY, str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    async with loopback_world(3) as comms:
        a, b = await asyncio.gather(*(comm.split([1, 2], "pair") for comm in comms[1:]))
        with pytest.raises(CollectiveTimeoutError):
            await b.all_reduce(torch.ones(1), timeout=0.05)
        await until(lambda: sorted(path.name for path in tmp_path.iterdir()) == ["rank_1", "rank_2"])
        await asyncio.gather(a.aclose(), b.aclose())


async def test_ranks_keep_the_numbers_of_their_processes_in_comms_that_replace_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    async with loopback_world(3) as comms:
        pair = await asyncio.gather(*(comm.reconfigure([1, 2]) for comm in comms[1:]))
        pending = pair[1].barrier()
        files = [write_dump([(comm._submitter, comm._session.identity.numbers)], tmp_path) for comm in pair]
        assert [path.name for path in files] == ["rank_1", "rank_2"]
        (found,) = analyze({number: load_dump(path) for number, path in enumerate(files, 1)})
        assert (found.ranks, found.absent) == ((1, 2), ())
        assert found.suspect is not None
        assert (found.suspect.problem, found.suspect.ranks) == ("missing", (1,))
        await asyncio.gather(pending, pair[0].barrier(), *(comm.aclose() for comm in pair))


@pytest.mark.ranks(3)
async def test_a_pair_has_the_numbers_of_the_launcher(comm: Comm) -> None:
    if comm.rank > 0:
        async with pair_comm(f"p{comm.rank}", f"p{3 - comm.rank}", store=comm) as pair:
            assert pair._session.identity.numbers == comm._session.identity.numbers[1:] == [1, 2]
    await comm.barrier()


async def test_a_comm_that_another_one_has_replaced_is_no_part_of_the_dump() -> None:
    async with loopback_world(1) as (comm,):
        assert [each for each, _ in session._recorded()] == [comm._submitter]
        new = await comm.reconfigure([0])
        assert [each for each, _ in session._recorded()] == [new._submitter]
        await new.aclose()


async def test_records_of_messages_do_not_hide_the_number_of_collectives() -> None:
    async with loopback_world(1, hints={"recorder": "2"}) as (comm,):
        await comm.barrier()
        for _ in range(3):
            await asyncio.gather(comm.send(torch.ones(1), 0), comm.recv(torch.ones(1), 0))
        dump = dump_comms([(comm._submitter, [0])])
        assert dump["pg_config"]["test"]["collectives"] == 1
        assert set(dump["pg_status"]["0"].values()) == {"0"}


async def test_a_monitored_barrier_is_no_collective_of_the_dump() -> None:
    async with loopback_world(2) as (a, b):
        await asyncio.gather(a.barrier(), b.barrier())
        work = a.monitored_barrier()
        assert [entry["is_p2p"] for entry in entries(a)] == [False, True]
        await asyncio.gather(work, b.monitored_barrier())


async def test_collectives_that_differ_in_their_root_or_shape_are_told_apart() -> None:
    async with loopback_world(2) as (a, b):
        works = [a.broadcast(torch.ones(2), 0), b.broadcast(torch.ones(2), 1)]
        dumps = {comm.rank: dump_comms([(comm._submitter, [0, 1])]) for comm in (a, b)}
        (found,) = analyze(dumps)
        assert found.suspect is not None
        assert (found.suspect.seq, found.suspect.problem) == (0, "different")
        for work in works:
            with pytest.raises(CollectiveMismatchError):
                await work


async def test_the_own_abort_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flight.DIRECTORY, str(tmp_path))
    async with loopback_world(1) as (comm,):
        work = comm.recv(torch.ones(1), 0)
        comm.abort("no")
        with pytest.raises(AbortedError):
            await work
    assert not list(tmp_path.iterdir())


async def test_a_signal_writes_the_dump_and_calls_the_former_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flight.DIRECTORY, str(tmp_path))
    monkeypatch.setenv(flight.SIGNAL, "USR2")
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        async with loopback_world(1) as (comm,):
            await comm.all_reduce(torch.ones(1))
            os.kill(os.getpid(), signal.SIGUSR2)
            await until(lambda: (tmp_path / "rank_0").exists())
            assert seen == [signal.SIGUSR2]
            dump = load_dump(tmp_path / "rank_0")
            assert [entry["op"] for entry in dump["entries"]] == ["all_reduce(float32[1], SUM)"]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_comms_on_other_threads_alone_have_no_handler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with loopback_world(2):
            pass

    monkeypatch.setenv(flight.SIGNAL, "USR2")
    flight._say_missing.cache_clear()
    before = signal.getsignal(signal.SIGUSR2)
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGUSR2) is before
    text = "SIGUSR2 writes no dump, despite ASYNCCOMM_DUMP_SIGNAL: no comm was made on the main thread"
    assert caplog.text.count(text) == 1


async def test_another_signal_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(flight.SIGNAL, "KILL")
    with caplog.at_level(logging.WARNING):
        async with loopback_world(1):
            pass
    assert "ASYNCCOMM_DUMP_SIGNAL is 'KILL': it must be one of USR1, USR2" in caplog.text


@pytest.mark.ranks(2)
async def test_calls_of_the_fast_path_are_recorded(comm: Comm) -> None:
    tensor = torch.ones(2)
    for _ in range(3):
        await comm.all_reduce(tensor)
    async with comm.coalesce():
        for _ in range(2):
            comm.all_reduce(torch.ones(4))
    await comm.barrier()
    records = calls_of(comm._submitter)[-6:]
    assert all(record.finished is not None and record.finished >= record.started for record in records)
    numbers = [record.number_on_comm for record in records]
    assert numbers == list(range(numbers[0], numbers[0] + 6))
    pickle.dumps(dump_comms([(comm._submitter, [0, 1])]))
