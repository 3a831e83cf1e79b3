"""Reading the dumps of flight recorders: the first collective that differs, the missing ranks, and the slowest rank.

Pure, and free of torch. Dumps are read as plain data: a file that names a class or a function is refused.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import msgspec

from asynccomm.control.transport.schema import decode, loads

Dump = dict[str, Any]
COMPARED: Final = ("profiling_name", "input_dtypes", "output_dtypes", "signature")  # equal on all ranks of a collective
_RANK: Final = re.compile(r"(\d+)$")


class DumpError(ValueError):
    """A file is no dump of a flight recorder."""


class _Entry(msgspec.Struct):
    """The fields of a call that are read here; a dump of torch has more."""

    process_group: tuple[str, str]
    collective_seq_id: int
    is_p2p: bool
    profiling_name: str
    state: str
    time_created_ns: int | float
    frames: list[dict[str, Any]] | None = None


class _Group(msgspec.Struct):
    ranks: str | list[int]
    collectives: int = 0

    def __post_init__(self) -> None:
        loads(list[int], str(self.ranks))


class _Dump(msgspec.Struct):
    pg_config: dict[str, _Group]
    entries: list[_Entry]


@final
class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def load_dump(path: Path) -> Dump:
    """The dump in a file, without running code of the file. Raises: OSError; DumpError naming the file."""
    try:
        dump: Dump = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        decode(_Dump, dump)
    except OSError:
        raise
    except Exception as exc:  # a pickle of anything raises anything
        raise DumpError(f"{path} is no dump of a flight recorder: {exc}") from exc
    return dump


def unpacked(text: str) -> Dump:
    """The dump that a rank has sent to a diagnosing process. Raises: ValueError, zlib.error."""
    dump: Dump = json.loads(zlib.decompress(base64.b64decode(text)))
    for entry in dump["entries"]:
        entry["process_group"] = tuple(entry["process_group"])  # JSON has lists only
    return dump


def joined(dumps: Sequence[Dump]) -> Dump:
    """One dump of several comms of a process."""
    whole: Dump = {**dumps[0], "pg_config": {}, "pg_status": {}, "entries": []}
    for number, dump in enumerate(dumps):
        whole["pg_config"] |= dump["pg_config"]
        whole["pg_status"] |= {str(number): status for status in dump["pg_status"].values()}
        whole["entries"] += [{**entry, "pg_id": number} for entry in dump["entries"]]
    whole["entries"].sort(key=lambda entry: entry["time_created_ns"])
    for number, entry in enumerate(whole["entries"]):
        entry["record_id"] = entry["op_id"] = number
    return whole


def dump_files(places: Sequence[Path]) -> dict[int, Path]:
    """The files of ranks among files and folders, by the number at the end of their names.

    Raises: DumpError for two files of a rank, a name without a number, or no file.
    """
    found: dict[int, Path] = {}
    for place in places:
        files = sorted(each for each in place.iterdir() if each.is_file()) if place.is_dir() else [place]
        for path in files:
            number = _RANK.search(path.name)
            if number is None:
                if place.is_dir():
                    continue
                if not path.exists():
                    raise DumpError(f"{path} does not exist")
                raise DumpError(f"{path} has no rank at the end of its name, as rank_0 has")
            if (rank := int(number[1])) in found:
                raise DumpError(f"{path} and {found[rank]} are of the same rank")
            found[rank] = path
    if not found:
        raise DumpError(f"there is no dump of a rank in {', '.join(map(str, places))}")
    return dict(sorted(found.items()))


@final
@dataclass(frozen=True, slots=True)
class Suspect:
    """The first collective of a comm that did not match."""

    seq: int
    problem: str  #: "missing", "different" or "unfinished"
    ranks: tuple[int, ...]  #: that did not call it, that called something else, or that did not complete it
    calls: Mapping[int, str]  #: the call of each rank that has called it, and its line


@final
@dataclass(frozen=True, slots=True)
class Findings:
    """The result for one comm. Ranks are the numbers of their processes."""

    comm: str
    ranks: tuple[int, ...]
    absent: tuple[int, ...]  #: ranks without a dump of the comm
    compared: int  #: collectives that all ranks have recorded
    suspect: Suspect | None
    slowest: int | None  #: the rank that was last most of the times; None: too few collectives to tell
    last_times: int  #: collectives in which it was last
    behind: float  #: seconds by which it was then later than the first rank, the median

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"comm {self.comm!r}, ranks {list(self.ranks)}, {self.compared} collectives compared"]
        if self.absent:
            lines.append(f"  no dump of ranks {list(self.absent)}")
        if self.suspect is None:
            lines.append("  all collectives match")
        else:
            lines += _explained(self.suspect)
        if self.slowest is not None:
            lines.append(
                f"  slowest: rank {self.slowest}, last in {self.last_times} of {self.compared} collectives, "
                f"then {self.behind * 1e3:.3g} ms after the first rank"
            )
        return "\n".join(lines)


def _explained(suspect: Suspect) -> list[str]:
    ranks = ", ".join(map(str, suspect.ranks))
    problem = {
        "missing": f"was not called by rank {ranks}",
        "different": f"is another collective on rank {ranks}",
        "unfinished": f"was not completed on rank {ranks}",
    }[suspect.problem]
    return [
        f"  collective #{suspect.seq} {problem}",
        *(f"    rank {rank}: {call}" for rank, call in suspect.calls.items()),
    ]


def analyze(dumps: Mapping[int, Dump]) -> list[Findings]:
    """The findings for each comm, those with a problem first.

    Args:
        dumps: by the number of the process.
    """
    # disjoint groups may share a name
    comms = dict.fromkeys((name, str(of["ranks"])) for dump in dumps.values() for name, of in dump["pg_config"].items())
    found = [_examine(name, ranks, dumps) for name, ranks in comms]
    return sorted(found, key=lambda each: each.suspect is None)


def _examine(name: str, listed: str, dumps: Mapping[int, Dump]) -> Findings:
    ranks = tuple(int(rank) for rank in json.loads(listed))
    calls: dict[int, dict[int, Dump]] = {}
    begins: list[int] = []  # of each rank's ring: its older calls were dropped, and nothing is known of them
    for rank in ranks:
        described = dumps[rank]["pg_config"].get(name) if rank in dumps else None
        if described is not None and str(described["ranks"]) == listed:
            entries = [entry for entry in dumps[rank]["entries"] if entry["process_group"][0] == name]
            numbered = [entry for entry in entries if not entry["is_p2p"] and entry["collective_seq_id"] >= 0]
            calls[rank] = {entry["collective_seq_id"]: entry for entry in numbered}
            begins.append(min(calls[rank], default=described.get("collectives", 0)))
    shared = sorted(set.intersection(*map(set, calls.values()))) if calls else []
    slowest, times, behind = _slowest([{rank: each[seq] for rank, each in calls.items()} for seq in shared])
    absent = tuple(rank for rank in ranks if rank not in calls)
    suspect = _suspect(calls, max([0, *begins]))
    return Findings(name, ranks, absent, len(shared), suspect, slowest, times, behind)


def _suspect(calls: Mapping[int, Mapping[int, Dump]], begin: int) -> Suspect | None:
    """The first collective from ``begin`` on that some ranks did not call, that differs, or else is not complete."""
    unfinished: Suspect | None = None
    for seq in sorted({seq for own in calls.values() for seq in own if seq >= begin}):
        there = {rank: own[seq] for rank, own in calls.items() if seq in own}
        shown = {rank: _shown(entry) for rank, entry in there.items()}
        missing = tuple(rank for rank in calls if rank not in there)
        if missing:
            return Suspect(seq, "missing", missing, shown)
        kinds = {rank: tuple(map(str, map(entry.get, COMPARED))) for rank, entry in there.items()}
        usual = statistics.mode(kinds.values())
        if different := tuple(rank for rank, kind in kinds.items() if kind != usual):
            return Suspect(seq, "different", different, shown)
        waiting = tuple(rank for rank, entry in there.items() if entry["state"] != "completed")
        if waiting and unfinished is None:
            unfinished = Suspect(seq, "unfinished", waiting, shown)
    return unfinished


def _shown(entry: Dump) -> str:
    frames = entry.get("frames") or [{}]
    site = f" at {frames[0]['filename']}:{frames[0]['line']}" if frames[0].keys() >= {"filename", "line"} else ""
    return f"{entry.get('op', entry['profiling_name'])}, {entry['state']}{site}"


def _slowest(collectives: Sequence[Mapping[int, Dump]]) -> tuple[int | None, int, float]:
    """The rank that was last most of the times, how often, and the median of its seconds after the first rank."""
    late: dict[int, list[float]] = {}
    for entries in collectives:
        if len(entries) > 1:
            times = {rank: entry["time_created_ns"] for rank, entry in entries.items()}
            last = max(times, key=times.__getitem__)
            late.setdefault(last, []).append((times[last] - min(times.values())) / 1e9)
    if not late:
        return None, 0, 0.0
    rank = max(late, key=lambda each: len(late[each]))
    return rank, len(late[rank]), statistics.median(late[rank])
