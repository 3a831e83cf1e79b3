"""Dumps of flight recorders: reading, and the findings."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from asynccomm.observe.analysis import DumpError, analyze, dump_files, joined, load_dump


def entry(seq: int, *, at: float = 0.0, name: str = "shm:all_reduce", state: str = "completed", **rest: Any) -> Any:
    return {
        "process_group": ("main", "main"),
        "collective_seq_id": seq,
        "is_p2p": False,
        "profiling_name": name,
        "input_dtypes": ["float32"],
        "output_dtypes": ["float32"],
        "state": state,
        "time_created_ns": int(at * 1e9),
        "frames": [{"name": "f", "filename": "x.py", "line": 3}],
        **rest,
    }


def dump(*entries: Any, ranks: str = "[0, 1, 2]", **described: Any) -> Any:
    return {
        "pg_config": {"main": {"name": "main", "desc": "main", "ranks": ranks, **described}},
        "pg_status": {},
        "entries": list(entries),
    }


def test_the_first_collective_that_a_rank_did_not_call_is_named() -> None:
    (found,) = analyze(
        {
            0: dump(entry(0), entry(1, state="started"), entry(2, state="started")),
            1: dump(entry(0)),
            2: dump(entry(0), entry(1, state="started")),
        }
    )
    assert found.suspect is not None
    assert (found.suspect.seq, found.suspect.problem, found.suspect.ranks) == (1, "missing", (1,))
    assert "collective #1 was not called by rank 1" in str(found)
    assert "    rank 0: shm:all_reduce, started at x.py:3" in str(found)


def test_a_rank_that_called_something_else_is_named() -> None:
    (found,) = analyze(
        {rank: dump(entry(0, name=f"shm:{'barrier' if rank == 2 else 'all_reduce'}")) for rank in range(3)}
    )
    assert found.suspect is not None
    assert (found.suspect.problem, found.suspect.ranks) == ("different", (2,))


def test_a_collective_that_differs_in_more_than_its_kind_is_named() -> None:
    (found,) = analyze({rank: dump(entry(0), entry(1, signature=[1, 2 + (rank == 1)])) for rank in range(3)})
    assert found.suspect is not None
    assert (found.suspect.seq, found.suspect.problem, found.suspect.ranks) == (1, "different", (1,))


def test_groups_with_the_same_name_are_compared_apart() -> None:
    calls = {0: 3, 1: 3, 2: 4, 3: 3}
    dumps = {
        rank: dump(*map(entry, range(count)), ranks="[0, 1]" if rank < 2 else "[2, 3]") for rank, count in calls.items()
    }
    hung, fine = analyze(dumps)
    assert (hung.ranks, fine.ranks, fine.suspect) == ((2, 3), (0, 1), None)
    assert hung.suspect is not None
    assert (hung.suspect.seq, hung.suspect.problem, hung.suspect.ranks) == (3, "missing", (3,))


def test_a_rank_that_has_not_such_a_comm_has_no_dump_of_it() -> None:
    dumps = {0: dump(entry(0), ranks="[0, 1]"), 1: {"pg_config": {}, "pg_status": {}, "entries": []}}
    (found,) = analyze(dumps)
    assert (found.absent, found.suspect) == ((1,), None)


def test_a_collective_that_all_called_and_some_did_not_complete() -> None:
    (found,) = analyze({rank: dump(entry(0, state="started" if rank else "completed")) for rank in range(3)})
    assert found.suspect is not None
    assert (found.suspect.problem, found.suspect.ranks) == ("unfinished", (1, 2))


def test_a_ring_that_has_dropped_its_oldest_calls_is_no_difference() -> None:
    (found,) = analyze(
        {0: dump(*map(entry, range(10))), 1: dump(*map(entry, range(4, 10))), 2: dump(*map(entry, range(10)))}
    )
    assert found.suspect is None
    assert found.compared == 6
    assert "all collectives match" in str(found)


@pytest.mark.parametrize(("called", "missing"), [(5, ()), (4, (1,)), (0, (1,))])
def test_a_ring_of_messages_only_is_behind_if_its_rank_has_called_less(called: int, missing: tuple[int, ...]) -> None:
    messages = [entry(0, is_p2p=True)]
    whole = dump(*map(entry, range(5)), ranks="[0, 1]", collectives=5)
    (found,) = analyze({0: whole, 1: dump(*messages, ranks="[0, 1]", collectives=called)})
    assert (() if found.suspect is None else found.suspect.ranks) == missing
    assert found.suspect is None or found.suspect.seq == called


def test_the_slowest_rank_is_named_with_its_lateness() -> None:
    (found,) = analyze(
        {
            rank: dump(*[entry(seq, at=seq + (0.02 if rank == 1 else 0.001 * rank)) for seq in range(5)])
            for rank in range(3)
        }
    )
    assert (found.slowest, found.last_times) == (1, 5)
    assert found.behind == pytest.approx(0.02)
    assert "slowest: rank 1, last in 5 of 5 collectives, then 20 ms after the first rank" in str(found)
    json.dumps(found.as_json())


def test_a_rank_without_a_dump_is_absent() -> None:
    (found,) = analyze({0: dump(entry(0)), 1: dump(entry(0))})
    assert found.absent == (2,)
    assert "no dump of ranks [2]" in str(found)


def test_several_comms_of_a_process_become_one_dump() -> None:
    other = dump(entry(0, at=1.0))
    whole = joined([other, dump(entry(1, at=0.5))])
    assert [each["pg_id"] for each in whole["entries"]] == [1, 0]
    assert [each["record_id"] for each in whole["entries"]] == [0, 1]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


DAMAGED: list[Any] = [
    [1],
    {"entries": []},
    {"pg_config": ["main"], "entries": 5},
    {"pg_config": {"main": {}}, "entries": []},
    {"pg_config": {"main": {"ranks": "x"}}, "entries": []},
    {"pg_config": {"main": {"ranks": "[null]"}}, "entries": []},
    {"pg_config": {}, "entries": [{}]},
    {"pg_config": {}, "entries": [{**entry(0), "process_group": ()}]},
    {"pg_config": {}, "entries": [{**entry(0), "frames": ["x.py"]}]},
]


@pytest.mark.parametrize("content", [b"", b"x" * 100, pickle.dumps(Evil()), *map(pickle.dumps, DAMAGED)])
def test_a_file_that_is_no_dump_is_refused(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(content)
    with pytest.raises(DumpError, match="rank_0 is no dump of a flight recorder"):
        load_dump(path)
    assert not capsys.readouterr().out


def test_a_frame_without_a_line_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps(dump({**entry(0), "state": "started", "frames": [{"name": "f"}]})))
    (found,) = analyze({0: load_dump(path)})
    assert found.suspect is not None
    assert found.suspect.calls[0].endswith("started")


def test_files_are_found_by_the_rank_at_the_end_of_their_names(tmp_path: Path) -> None:
    for name in ("rank_10", "rank_2", "notes"):
        (tmp_path / name).touch()
    assert dump_files([tmp_path]) == {2: tmp_path / "rank_2", 10: tmp_path / "rank_10"}
    (tmp_path / "copy_2").touch()
    with pytest.raises(DumpError, match="of the same rank"):
        dump_files([tmp_path])
    with pytest.raises(DumpError, match="notes has no rank"):
        dump_files([tmp_path / "notes"])
    with pytest.raises(DumpError, match="missing does not exist"):
        dump_files([tmp_path / "missing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match="no dump of a rank"):
        dump_files([tmp_path / "empty"])
