"""Traces in the trace event format, which Perfetto and Chromium show: a row for each rank and comm.

Pure, and free of torch. The parts of all ranks are brought to one clock by their offsets, which stand in the metadata.
Operations that overlap on a rank lie in rows of their own, because slices of one row must nest. An operation that waits
for a later rank has two slices within it: the wait, and the exchange of the data. An arrow leads from the last rank's
call to the exchange on each other rank; Perfetto turns an arrow around if its target has begun before its source.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from asynccomm.control.transport.schema import decode
from asynccomm.core.files import write_whole

Part = Mapping[str, Any]  # of one comm on one rank, as ``tracing.TraceRecorder.part`` makes it
Slice = dict[str, Any]
_Process = tuple[int, str, int]  # its number, which several may have, its host and pid
_Collectives = defaultdict[tuple[str, str, int], dict[int, Slice]]  # by the comm's name and key, and number; by rank
DIRECTORY: Final = "ASYNCCOMM_TRACE_DIR"  # the variable with the folder for the parts of a traced run
PART: Final = "asynccommPart"  # the key of a single part in its file, so that files can be merged
LANES: Final = 1000  # rows of a comm
EDGE: Final = 0.001  # microseconds by which an arrow ends inside of its slice


# JSON has no other numbers than finite ones, and the sum of two times in microseconds has to be finite, too
_Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class _Op(msgspec.Struct):
    op: str
    kind: str
    p2p: bool
    seq: int
    bytes: int
    site: str
    started: _Seconds
    finished: _Seconds | None
    error: str


class _Part(msgspec.Struct):
    """The fields of a part in a file."""

    comm: str
    key: str
    rank: int
    process: int
    host: str
    pid: int
    offset: _Seconds
    uncertainty: _Seconds | None
    ops: list[_Op]
    batches: list[tuple[_Seconds, _Seconds, int]]
    waits: list[tuple[_Seconds, _Seconds]]
    lags: list[tuple[_Seconds, _Seconds]]
    dropped: int


class _PartFile(msgspec.Struct):
    part: _Part = msgspec.field(name=PART)


def merged(parts: Sequence[Part]) -> dict[str, Any]:
    """The trace of the parts of any ranks and comms, as an object of the trace event format."""
    origin = min((_begin(part) for part in parts), default=0.0)
    events: list[Slice] = []
    slices: _Collectives = defaultdict(dict)
    numbers_of = _numbers_of({_process(part) for part in parts})
    rows: dict[int, int] = defaultdict(int)  # comms of each process so far
    for part in sorted(parts, key=lambda part: (_process(part), _begin(part))):
        number = numbers_of[_process(part)]
        rows[number] += 1
        events += _of_part(part, number, rows[number] * LANES, origin, slices)
    numbers = itertools.count(1)
    for (comm, _, seq), by_rank in slices.items():
        events += _arrows(comm, seq, by_rank, numbers)
    events += [_wait(by_rank, each) for by_rank in slices.values() for each in by_rank if _waits(by_rank, each)]
    # slices of one row in the order of their begin, an outer one first; metadata have no time
    events.sort(key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))
    clocks = [
        {key: part[key] for key in ("comm", "host", "pid", "offset", "uncertainty", "dropped")}
        | {"process": numbers_of[_process(part)]}
        for part in parts
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": json.dumps(clocks)}}


def _process(part: Part) -> _Process:
    return part["process"], part["host"], part["pid"]


def _numbers_of(processes: Collection[_Process]) -> dict[_Process, int]:
    """The number of each process in the trace: its own, unless another one has that, as after a restart."""
    found: dict[_Process, int] = {}
    others = itertools.count(max((number for number, *_ in processes), default=0) + 1)
    taken: set[int] = set()
    for process in sorted(processes):
        found[process] = next(others) if process[0] in taken else process[0]
        taken.add(process[0])
    return found


def _begin(part: Part) -> float:
    times = [op["started"] for op in part["ops"]] + [when - lag for when, lag in part["lags"]]
    times += [begin for begin, *_ in (*part["waits"], *part["batches"])]
    return float(min(times, default=0.0)) + float(part["offset"])


def _of_part(part: Part, process: int, row: int, origin: float, slices: _Collectives) -> Iterator[Slice]:
    offset = float(part["offset"])

    def at(seconds: float) -> float:
        return max(0.0, (seconds + offset - origin) * 1e6)

    def named(kind: str, number: int, name: object) -> Slice:
        key = "sort_index" if kind.endswith("sort_index") else "name"
        return {"ph": "M", "name": kind, "pid": process, "tid": number, "args": {key: name}}

    def sliced(name: str, category: str, number: int, begin: float, end: float, **values: Any) -> Slice:
        start = at(begin)
        place = {"ph": "X", "pid": process, "tid": number, "ts": start, "dur": max(0.0, at(end) - start)}
        return {"name": name, "cat": category, **place, "args": values}

    yield named("process_name", row, f"rank {part['process']} ({part['host']}, pid {part['pid']})")
    yield named("process_sort_index", row, process)
    last = max([op["finished"] or op["started"] for op in part["ops"]], default=0.0)
    ends: list[float] = []  # of the rows of operations
    for op in part["ops"]:
        end = last if op["finished"] is None else op["finished"]  # open: it had not ended with the trace
        lane = next((lane for lane, busy in enumerate(ends) if busy <= op["started"]), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = end
        values = {key: op[key] for key in ("op", "seq", "bytes", "site", "error") if op[key] not in ("", None)}
        found = sliced(op["kind"], "message" if op["p2p"] else "collective", row + lane, op["started"], end, **values)
        if op["finished"] is None:
            found["args"]["open"] = True
        if not op["p2p"] and op["seq"] >= 0:
            slices[part["comm"], part["key"], op["seq"]][part["rank"]] = found
        yield found
    for lane in range(len(ends)):
        yield named("thread_name", row + lane, f"{part['comm']}{f' ({lane + 1})' if lane else ''}")
        yield named("thread_sort_index", row + lane, row + lane)
    yield from _around(part, row, named, sliced)
    for when, lag in part["lags"]:
        name = f"loop lag of {part['comm']}"
        yield {"ph": "C", "name": name, "pid": process, "tid": row, "ts": at(when), "args": {"ms": lag * 1e3}}


def _around(part: Part, row: int, named: Any, sliced: Any) -> Iterator[Slice]:
    """Batches and waits of a comm, each in rows of their own."""
    waits = [("ready()", "backpressure", begin, end) for begin, end in part["waits"]]
    batches = [(f"batch of {count}", "batch", begin, end) for begin, end, count in part["batches"]]
    for offset, title, items in ((LANES // 2, "batches", batches), (LANES * 3 // 4, "back-pressure", waits)):
        ends: list[float] = []
        for name, category, begin, end in sorted(items, key=lambda item: item[2]):
            lane = next((lane for lane, busy in enumerate(ends) if busy <= begin), len(ends))
            if lane == len(ends):
                ends.append(0.0)
                yield named("thread_name", row + offset + lane, f"{part['comm']} {title}")
                yield named("thread_sort_index", row + offset + lane, row + offset + lane)
            ends[lane] = end
            yield sliced(name, category, row + offset + lane, begin, end)


def _last(by_rank: Mapping[int, Slice]) -> int:
    return max(by_rank, key=lambda rank: by_rank[rank]["ts"])


def _waits(by_rank: Mapping[int, Slice], rank: int) -> bool:
    """Whether ``rank`` has waited for a later one."""
    return len(by_rank) > 1 and by_rank[_last(by_rank)]["ts"] > by_rank[rank]["ts"] and by_rank[rank]["dur"] > 0


def _wait(by_rank: Mapping[int, Slice], rank: int) -> Slice:
    """The part of a rank's operation that lies before the last rank's call."""
    own, last = by_rank[rank], _last(by_rank)
    seconds = min(own["dur"], by_rank[last]["ts"] - own["ts"])
    place = {key: own[key] for key in ("pid", "tid", "ts")}
    return {"ph": "X", "name": f"wait for rank {last}", "cat": "wait", **place, "dur": seconds, "args": {"rank": last}}


def _arrows(comm: str, seq: int, by_rank: Mapping[int, Slice], numbers: Iterator[int]) -> Iterator[Slice]:
    """From the last rank's call to the exchange on each other rank; Perfetto refuses ids that are not numbers."""
    if len(by_rank) < 2:
        return
    last = _last(by_rank)
    source = by_rank[last]
    for rank, target in by_rank.items():
        begin, end = source["ts"] + EDGE, target["ts"] + target["dur"]
        if rank == last or end < begin + EDGE or "error" in target["args"] or "open" in target["args"]:
            continue
        place = {"pid": target["pid"], "tid": target["tid"]}
        yield {"ph": "X", "name": "exchange", "cat": "exchange", **place, "ts": begin, "dur": end - begin, "args": {}}
        arrow = {"name": f"{comm} #{seq}", "cat": "arrival", "id": next(numbers)}
        yield {"ph": "s", **arrow, "pid": source["pid"], "tid": source["tid"], "ts": source["ts"]}
        yield {"ph": "f", "bp": "e", **arrow, **place, "ts": end - EDGE}


def write_trace(path: Path, parts: Sequence[Part], folder: Path | None = None) -> None:
    """Write the merged trace; the file of a single part can be merged later. Raises: OSError with ``path``.

    Args:
        folder: for the temporary file, as for ``write_whole``.
    """
    trace = merged(parts)
    if len(parts) == 1:
        trace[PART] = parts[0]
    write_whole(path, json.dumps(trace, allow_nan=False).encode(), folder)


def read_parts(paths: Sequence[Path]) -> list[Part]:
    """The parts in the files of ranks. Raises: OSError; ValueError naming the file, or two with one operation."""
    parts: list[Part] = []
    # a comm may be traced several times on a rank, for other operations
    found: dict[tuple[Any, ...], Path] = {}
    for path in paths:
        part = read_part(path)
        owner = tuple(part[key] for key in ("comm", "key", "rank", "process", "host", "pid"))
        for op in {(*owner, each["seq"], each["op"], each["started"]) for each in part["ops"]}:
            if op in found:
                raise ValueError(f"{path} and {found[op]} hold the same operations of rank {part['rank']}")
            found[op] = path
        parts.append(part)
    return parts


def read_part(path: Path) -> Part:
    """The part in a file that ``write_trace`` wrote for one rank. Raises: OSError, ValueError naming the file."""
    try:
        file = decode(_PartFile, json.loads(path.read_text()))
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{path} is no trace of a single rank: {exc}") from exc
    part: Part = msgspec.to_builtins(file.part)  # the fields that were checked, and no others
    return part
