"""The flight recorder of comms: their last calls as a dump in torch's format, in a file or for a diagnosing process.

Every comm keeps its last calls (``Submitter.recent``) and their ends (``InFlight.ended``). A dump is made of these
when it is asked for: when a comm breaks, at a signal, and by ``asynccomm diagnose --dump``.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import signal
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final

from asynccomm.comm.submission import Submitter
from asynccomm.core.files import write_whole
from asynccomm.core.work import UNNUMBERED
from asynccomm.errors import AbortedError, BrokenError
from asynccomm.observe.flight import CallRecord, CommRecord, dump_of, sides_of

DIRECTORY: Final = "ASYNCCOMM_DUMP_DIR"  # the folder for dumps of failures and signals
SIGNAL: Final = "ASYNCCOMM_DUMP_SIGNAL"  # "USR1" or "USR2"
PREFIX: Final = "rank_"  # of the files, as torchfrtrace expects: a prefix and the rank
SIGNALS: Final = {"USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}

RecordedComm = tuple[Submitter, Sequence[int]]  # a comm in a dump, and the numbers of its ranks' processes

_log = logging.getLogger("asynccomm")
_writing = threading.Lock()  # one dump at a time in a process: all go to one file


def calls_of(submitter: Submitter) -> list[CallRecord]:
    """The last calls of a comm, and those in flight, the oldest first. From any thread."""
    size, limit = submitter.group.size, submitter.counts.limit
    pending = submitter.in_flight.pending()
    ended = {(p2p, seq): (finished, error) for p2p, seq, finished, error in submitter.in_flight.ended.copy()}
    flying = {(work.op.p2p, work.seq) for work in pending if work.seq != UNNUMBERED}
    found: dict[tuple[bool, int], CallRecord] = {}
    for op, site, seq, started, finished in submitter.recent.copy():
        key, error = (op.p2p, seq), ""
        if finished is None and key not in flying:
            finished, error = ended.get(key, (started, ""))  # the end has left the ring: long ago
        found[key] = CallRecord(0, op, *sides_of(op, size), seq, site, started, finished, limit, error or None)
    records = list(found.values())
    for work in pending:
        if (work.op.p2p, work.seq) not in found:
            sides = sides_of(work.op, size)
            records.append(CallRecord(0, work.op, *sides, work.seq, work.site, work.started, None, work.timeout, None))
    records.sort(key=lambda record: record.started)
    for number, record in enumerate(records):
        record.number = number
    return records


def dump_comms(comms: Sequence[RecordedComm]) -> dict[str, Any]:
    """The dump of comms. From any thread."""
    groups, records = [], []
    for number, (submitter, ranks) in enumerate(comms):
        error = submitter.error
        group = CommRecord(
            number,
            submitter.group.name,
            submitter.group.name,
            submitter.backend.name if submitter.backend is not None else "",
            tuple(ranks),
            submitter.group.rank,
            submitter.counts.collectives,
            f"{type(error).__name__}: {error}" if isinstance(error, BrokenError) else "",
        )
        groups.append(group)
        records += [(group, record) for record in calls_of(submitter)]
    return dump_of(groups, records, entries=records)


def packed(submitter: Submitter, ranks: Sequence[int], most: int) -> str:
    """The dump of a comm as text of at most ``most`` bytes, by leaving out its oldest calls where necessary."""
    dump = dump_comms([(submitter, ranks)])
    while True:
        text = base64.b64encode(zlib.compress(json.dumps(dump).encode())).decode()
        if len(text) <= most or not dump["entries"]:
            return text
        dump["entries"] = dump["entries"][(len(dump["entries"]) + 1) // 2 :]


def write_dump(comms: Sequence[RecordedComm], directory: Path) -> Path:
    """Write the dump of a process to ``directory``, which is made if necessary; its first comm says its number.

    Raises: OSError.
    """
    dump = dump_comms(comms)
    submitter, numbers = comms[0]
    path = directory / f"{PREFIX}{numbers[submitter.group.rank]}"
    with _writing:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, pickle.dumps(dump))
    return path


def dump_failure(error: BrokenError, own: Submitter, comms: Callable[[], Sequence[RecordedComm]]) -> None:
    """Write the dump if a folder is set, and log its place; this rank's own abort is no failure. From any thread."""
    directory = os.environ.get(DIRECTORY)
    if not directory or (isinstance(error, AbortedError) and error.rank == own.group.rank):
        return
    try:
        found = comms()
        if not found:  # the comm has not connected
            return
        path = write_dump(sorted(found, key=lambda each: each[0] is not own), Path(directory))
    except Exception as exc:  # the report of a failure must not fail
        _log.warning("comm %r is broken; its flight recorder could not be written: %s", own.group.name, exc)
        return
    _log.warning("comm %r is broken; the flight recorder is in %s", own.group.name, path)


def dump_at_signal(comms: Callable[[], Sequence[RecordedComm]]) -> None:
    """Install the handler of the signal that the environment names, if it names one.

    The program's own handler of the signal, if there is one, is called afterwards. Only the main thread can install a
    handler; on others, the lack of it is logged once.
    """
    name = os.environ.get(SIGNAL, "").upper().removeprefix("SIG")
    if not name:
        return
    if name not in SIGNALS:
        _log.warning("%s is %r: it must be one of %s", SIGNAL, os.environ[SIGNAL], ", ".join(SIGNALS))
        return
    number = SIGNALS[name]
    before = signal.getsignal(number)
    if getattr(before, "dumps", False):
        return
    if threading.current_thread() is not threading.main_thread():
        _say_missing(name)
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        # on a thread of its own: the interrupted code may hold a lock that the dump needs
        threading.Thread(target=write, name="asynccomm dump", daemon=True).start()
        if callable(before):
            before(signum, frame)

    def write() -> None:
        found = comms()
        if found:
            try:
                path = write_dump(found, Path(os.environ.get(DIRECTORY) or "."))
                _log.warning("the flight recorder is in %s", path)
            except OSError as exc:
                _log.warning("the flight recorder could not be written: %s", exc)

    handle.dumps = True  # type: ignore[attr-defined]
    signal.signal(number, handle)


@cache
def _say_missing(name: str) -> None:
    _log.warning("SIG%s writes no dump, despite %s: no comm was made on the main thread", name, SIGNAL)
