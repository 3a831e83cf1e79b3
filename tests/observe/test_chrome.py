"""Traces in the trace event format: its rules, and the slices. Real traces are in tests/comm/test_tracing.py."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from asynccomm.observe.chrome import PART, merged, read_part, read_parts, write_trace

PHASES = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "ts", "pid", "tid", "args"},
}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def check_format(trace: dict[str, Any]) -> None:
    """Raise AssertionError unless ``trace`` follows the rules of the trace event format.

    The rules: an object with ``traceEvents``; known phases with their fields; times that are not negative; metadata
    with their argument; slices of a thread that nest; each flow has one begin and one end, which is not earlier, and
    both lie in slices; counters have numbers.
    """
    trace = json.loads(json.dumps(trace))
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] in ("ms", "ns")
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert event.keys() >= PHASES[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0, event
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        else:
            assert isinstance(event["id"], int)  # Perfetto refuses text
            flows[event["id"]].append(event)
    for place, found in slices.items():
        open_until: list[float] = []
        for begin, end in found:  # in the order of the file, by begin
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, (place, begin, end, open_until)
            open_until.append(end)
    for pair in flows.values():
        begin, end = pair
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        assert begin["ts"] <= end["ts"]
        begins = []
        for each in pair:
            around = [a for a, b in slices[each["pid"], each["tid"]] if a <= each["ts"] <= b]
            assert around, each
            begins.append(max(around))  # of the innermost slice
        assert begins[0] <= begins[1], "Perfetto turns the arrow around otherwise"


def op(seq: int, started: float, finished: float | None, **rest: Any) -> dict[str, Any]:
    return {
        "op": "all_reduce(float32[4], SUM)",
        "kind": "all_reduce",
        "p2p": False,
        "seq": seq,
        "bytes": 16,
        "site": "x.py:1 in f",
        "started": started,
        "finished": finished,
        "error": "",
        **rest,
    }


def part(rank: int, *ops: dict[str, Any], offset: float = 0.0, **rest: Any) -> dict[str, Any]:
    found = {
        "comm": "main",
        "key": "k",
        "rank": rank,
        "size": 2,
        "process": rank,
        "host": "h",
        "pid": 10 + rank,
        "offset": offset,
    }
    found |= {"uncertainty": 1e-5, "ops": list(ops), "batches": [], "waits": [], "lags": [], "dropped": 0}
    return found | rest


def slices(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == category and event["ph"] == "X"]


def test_comms_with_the_same_name_do_not_wait_for_each_other() -> None:
    other = part(0, op(0, 5.0, 5.1), key="other", process=2, pid=12)
    trace = merged([part(0, op(0, 1.0, 1.021)), part(1, op(0, 1.02, 1.021)), other])
    (wait,) = slices(trace, "wait")
    assert (wait["name"], wait["pid"]) == ("wait for rank 1", 0)


def test_each_process_is_one_in_the_trace_by_its_own_number_if_no_other_one_has_it() -> None:
    parts = [part(1, op(0, 1.0, 1.1), pid=7), part(0, op(0, 2.0, 2.1), key="pair", process=1, pid=7)]
    trace = merged([*parts, part(1, op(0, 3.0, 3.1), key="other run", pid=9)])
    check_format(trace)
    assert [(each["pid"], each["tid"]) for each in slices(trace, "collective")] == [(1, 1000), (1, 2000), (2, 1000)]
    names = {each["pid"]: each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "process_name"}
    assert names == {1: "rank 1 (h, pid 7)", 2: "rank 1 (h, pid 9)"}
    assert [each["process"] for each in json.loads(trace["otherData"]["clocks"])] == [1, 1, 2]


def test_the_wait_for_the_last_rank_is_a_slice_within_the_operation() -> None:
    trace = merged([part(0, op(0, 1.0, 1.021)), part(1, op(0, 1.02, 1.021))])
    check_format(trace)
    (wait,) = slices(trace, "wait")
    assert (wait["name"], wait["pid"], wait["ts"]) == ("wait for rank 1", 0, 0)
    assert wait["dur"] == pytest.approx(20_000)
    (exchange,) = slices(trace, "exchange")
    assert (exchange["pid"], exchange["tid"], exchange["ts"]) == (0, wait["tid"], pytest.approx(20_000))
    assert exchange["dur"] == pytest.approx(1_000, abs=0.01)
    arrows = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert [(event["ph"], event["pid"]) for event in arrows] == [("s", 1), ("f", 0)]


def test_clocks_are_aligned_by_the_offsets_which_stand_in_the_metadata() -> None:
    trace = merged([part(0, op(0, 1.0, 1.1)), part(1, op(0, 500.05, 500.1), offset=-499.0)])
    check_format(trace)
    first, second = slices(trace, "collective")
    assert (first["ts"], second["ts"]) == (0, pytest.approx(50_000))
    clocks = json.loads(trace["otherData"]["clocks"])
    assert [(each["process"], each["offset"]) for each in clocks] == [(0, 0.0), (1, -499.0)]


def test_operations_at_the_same_time_have_rows_of_their_own() -> None:
    trace = merged([part(0, op(0, 1.0, 3.0), op(1, 2.0, 4.0), op(2, 3.0, 5.0))])
    check_format(trace)
    assert [event["tid"] for event in slices(trace, "collective")] == [1000, 1001, 1000]
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["main", "main (2)"]


def test_batches_waits_and_lags() -> None:
    trace = merged(
        [part(0, op(0, 1.0, 2.0), batches=[(1.0, 1.5, 3), (1.2, 1.7, 2)], waits=[(2.0, 2.5)], lags=[(1.5, 0.001)])]
    )
    check_format(trace)
    assert [event["name"] for event in slices(trace, "batch")] == ["batch of 3", "batch of 2"]
    assert [event["dur"] for event in slices(trace, "backpressure")] == [pytest.approx(500_000)]
    (lag,) = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert lag["args"] == {"ms": 1.0}


def test_operations_that_failed_or_had_not_ended() -> None:
    trace = merged(
        [
            part(0, op(0, 1.0, 2.0, error="PeerLostError"), op(1, 1.5, None)),
            part(1, op(0, 1.2, 2.0, error="PeerLostError")),
        ]
    )
    check_format(trace)
    failed, other, open_ = slices(trace, "collective")
    assert failed["args"]["error"] == other["args"]["error"] == "PeerLostError" or open_["args"]["open"]
    assert not [event for event in trace["traceEvents"] if event["ph"] in "sf"], "no arrow leads to a failure"


def test_a_part_in_a_file_can_be_merged_and_a_merged_trace_cannot(tmp_path: Path) -> None:
    single, whole = tmp_path / "rank0.json", tmp_path / "whole.json"
    write_trace(single, [part(0, op(0, 1.0, 2.0))])
    assert read_part(single)["rank"] == 0
    write_trace(whole, [read_part(single), part(1, op(0, 1.0, 2.0))])
    check_format(json.loads(whole.read_text()))
    with pytest.raises(ValueError, match=r"whole\.json is no trace of a single rank"):
        read_part(whole)


def test_a_damaged_part_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    whole = part(0, op(0, 1.0, 2.0))
    damaged = [{**whole, "ops": [{}]}, {**whole, "host": 1}, {**whole, "lags": [[1.0]]}, {"rank": 0}, [], None]
    for text in ["[" * 100_000, "[]", "x", *(json.dumps({PART: each}) for each in damaged)]:
        path.write_text(text)
        with pytest.raises(ValueError, match=r"rank0\.json is no trace of a single rank: ."):
            read_part(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1e308", "-1e308", "1" + "0" * 400])
def test_a_part_with_a_number_that_is_no_time_is_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "rank0.json"
    whole = part(0, op(0, 7.5, 8.0), batches=[[1.0, 7.5, 2]], waits=[[7.5, 2.0]], lags=[[1.0, 7.5]], offset=7.5)
    text = json.dumps({PART: whole | {"uncertainty": 7.5}})
    pieces = text.split("7.5")
    assert len(pieces) == 7
    for place in range(1, len(pieces)):
        path.write_text("7.5".join(pieces[:place]) + number + "7.5".join(pieces[place:]))
        with pytest.raises(ValueError, match=r"rank0\.json is no trace of a single rank: .*`\$\.asynccommPart\."):
            read_part(path)


def test_fields_of_a_part_that_are_not_known_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({PART: part(0, op(0, 1.0, 2.0, odd=float("nan")), odd=float("inf"))}))
    write_trace(path, [read_part(path)])
    assert "odd" not in path.read_text()
    check_format(json.loads(path.read_text()))


def test_an_operation_in_two_files_is_refused_and_two_traces_of_a_comm_are_not(tmp_path: Path) -> None:
    first, copy, later, other = (tmp_path / f"{name}.json" for name in ("first", "copy", "later", "other"))
    write_trace(first, [part(0, op(0, 1.0, 2.0))])
    write_trace(copy, [part(0, op(0, 1.0, 2.0), op(1, 2.0, 3.0))])
    write_trace(later, [part(0, op(1, 2.0, 3.0))])
    write_trace(other, [part(1, op(0, 1.0, 2.0))])
    assert [each["rank"] for each in read_parts([first, later, other])] == [0, 0, 1]
    for again in (first, copy):
        with pytest.raises(ValueError, match=f"^{again} and {first} hold the same operations of rank 0$"):
            read_parts([first, other, again])


def test_a_folder_is_no_place_for_a_trace(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        write_trace(tmp_path, [])
    assert not list(tmp_path.parent.glob("*.new"))


def test_a_trace_goes_where_a_link_leads_and_spares_the_files_beside_it(tmp_path: Path) -> None:
    target, link, other = tmp_path / "target.json", tmp_path / "out.json", tmp_path / "out.json.new"
    link.symlink_to(target)
    other.write_text("of the user")
    write_trace(link, [])
    assert link.is_symlink()
    check_format(json.loads(target.read_text()))
    assert other.read_text() == "of the user"


def test_an_error_of_writing_names_the_path_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "out.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_trace(path, [])
    assert caught.value.filename == str(path)


def test_nothing_is_a_trace_too() -> None:
    check_format(merged([]))
