"""The flight recorder: the last operations of this process's groups, for the diagnosis of hangs and failures.

Every operation leaves a small record in a ring: the operation, its call site and its progress. Recording formats no
text and holds no tensor of a completed operation; a dump is formatted in torch's format, which ``torchfrtrace`` reads.
When a group breaks, except by this rank's abort, its operations in flight are logged, and the dump is written to a file
if a variable names one:

- ``TORCH_FR_BUFFER_SIZE`` (``TORCH_NCCL_TRACE_BUFFER_SIZE``): the number of records, 2000 by default; 0: no recording.
- ``TORCH_FR_DUMP_TEMP_FILE`` (``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``): path of the file; the global rank is appended.
- ``TORCH_FR_DUMP_ON_TIMEOUT`` (``TORCH_NCCL_DUMP_ON_TIMEOUT``): 0: no file is written.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, final

import torch

from asynccomm.comm.comm import Comm
from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.core.callsite import CallSite
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import AbortedError, BrokenError
from asynccomm.observe.flight import Side, dump_of, status_of
from asynccomm.observe.watchers import Watcher
from asynccomm.ops import Call, Op, PeerOp

RECORDS: Final = 2000
NONE: Final = str(UNNUMBERED)  # in place of a collective's number
SHOWN: Final = 4  # operations in flight that the log names

_log: Final = logging.getLogger("asynccomm")


@final
class Record:
    """Record of one operation; while the operation is pending, its Work supplies number and state."""

    __slots__ = ("error", "finished", "inputs", "number", "op", "outputs", "seq", "site", "started", "timeout", "work")

    def __init__(self, number: int, call: Call, work: Work[Any]) -> None:
        self.number: int = number
        self.op: Op = call.op
        self.inputs: Side | None = _side(call.inputs)
        self.outputs: Side | None = self.inputs if call.outputs is call.inputs else _side(call.outputs)
        self.seq: int = work.seq
        self.site: CallSite | None = work.site
        self.started: float = work.started
        self.finished: float | None = None
        self.timeout: float = work.timeout
        self.error: str | None = None  # only the type's name: a traceback would hold the objects on the stack
        self.work: Work[Any] | None = work  # None once done, as a Work holds tensors

    def settled(self) -> None:
        """Store the outcome, and release the Work. Called from any thread, possibly twice."""
        work = self.work
        if work is not None:
            # exception() would mark the error as retrieved
            self.error = None if work._error is None else type(work._error).__name__
            self.seq, self.finished = work.seq, work.finished
            self.work = None  # last: other threads may be reading the record

    @property
    def number_on_comm(self) -> int:
        """The operation's number among the comm's collectives or messages; -1 while the operation is deferred."""
        work = self.work
        return self.seq if work is None else work.seq


def _side(tensors: Sequence[torch.Tensor]) -> Side | None:
    """Sizes and dtypes of tensors; several tensors count as one vector."""
    if not tensors:
        return None
    if len(tensors) == 1:
        return tensors[0].shape, (tensors[0].dtype,)
    return (sum([tensor.numel() for tensor in tensors]),), tuple(dict.fromkeys([tensor.dtype for tensor in tensors]))


@final
class GroupRecorder(Watcher):
    """Watcher of one comm of a group, which adds the comm's operations to the ring.

    Each comm has its own numbers of operations, so a group with several comms has several watchers.
    """

    detours = True  # it records the tensors' shapes

    def __init__(self, recorder: FlightRecorder, number: int, pg: ProcessGroup, comm: Comm) -> None:
        self.number = number
        self.name: str = pg.group_name if len(pg.comms) == 1 else f"{pg.group_name}/{comm.device.type}"
        self.desc: str = pg.group_desc
        self.backend: str = comm.backend
        self.ranks: tuple[int, ...] = pg.global_ranks
        self.rank: int = pg.rank()
        self.error: str = ""  #: the error that broke the comm
        self._recorder = recorder
        self._counts = comm._submitter.counts

    @property
    def collectives(self) -> int:
        """The number of collectives called so far."""
        return self._counts.collectives

    def called(self, call: Call, work: Work[Any]) -> None:
        if call.op.p2p and not isinstance(call.op, PeerOp):
            return  # no operation of torch's recorder: its tool refuses dumps with other names
        record = self._recorder.add(self, call, work)
        work.listen(record.settled)

    def broke(self, error: BrokenError) -> None:
        # this rank's own abort is no failure; another rank's abort may follow from an error
        if not (isinstance(error, AbortedError) and error.rank == self.rank):
            self.error = f"{type(error).__name__}: {error}"
            self._recorder.report(self, type(error).__name__)


@final
class FlightRecorder:
    """Ring of records of one world."""

    def __init__(self) -> None:
        self._ring: deque[tuple[GroupRecorder, Record]] | None = None  # None: no group yet, or no recording
        self._groups: dict[ProcessGroup, list[GroupRecorder]] = {}  # without destroyed groups
        self._numbers, self._group_numbers = itertools.count(), itertools.count()

    def attach(self, pg: ProcessGroup) -> None:
        """Record later operations of ``pg``."""
        if self._ring is None:
            size = _size()
            if size <= 0:
                return
            self._ring = deque(maxlen=size)
        groups = self._groups[pg] = []
        for comm in pg.comms:
            groups.append(GroupRecorder(self, next(self._group_numbers), pg, comm))
            comm._submitter.watch(groups[-1])

    def forget(self, pg: ProcessGroup) -> None:
        """Drop a destroyed group. Its records stay in the ring."""
        self._groups.pop(pg, None)

    def add(self, group: GroupRecorder, call: Call, work: Work[Any]) -> Record:
        """Add the record of a new operation."""
        assert self._ring is not None
        record = Record(next(self._numbers), call, work)
        self._ring.append((group, record))
        return record

    def reset(self) -> None:
        """Delete all records."""
        if self._ring is not None:
            self._ring.clear()

    # -- dumps --------------------------------------------------------------------------------------------------------

    def dump(self, *, collectives: bool = True, frames: bool = True, only_active: bool = False) -> dict[str, Any]:
        """All records and groups, in torch's format. Callable from any thread.

        Args:
            collectives: include the operations.
            frames: include the operations' call sites.
            only_active: include only operations in flight.
        """
        records = self._records()
        there = [group for groups in list(self._groups.values()) for group in groups]
        shown = [(group, record) for group, record in records if record.finished is None or not only_active]
        return dump_of(there, records, entries=shown if collectives else None, frames=frames)

    def _records(self) -> list[tuple[GroupRecorder, Record]]:
        return [] if self._ring is None else list(self._ring.copy())  # a copy, as other threads may append

    def report(self, group: GroupRecorder, error: str) -> None:
        """Log the operations in flight of a broken group, and write the dump. ``error`` is the error's type name."""
        records = self._records()
        status = status_of(group, records)
        cut = [record for each, record in records if each is group and record.error == error]
        said = ", ".join([str(record.op) for record in cut[:SHOWN]]) or "nothing"
        if len(cut) > SHOWN:
            said += f" and {len(cut) - SHOWN} more"
        where = self._write(group)
        _log.warning(
            "process group %r is broken by %s. On this rank, %s; in flight: %s%s",
            group.name,
            group.error,
            _progress(status["last_enqueued_collective"], status["last_completed_collective"]),
            said,
            where,
        )

    def _write(self, group: GroupRecorder) -> str:
        """Write the dump to the file named by the variable; return a text for the log."""
        prefix = _setting("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        wanted = _setting("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT").lower()
        if not prefix or wanted in ("0", "n", "no", "f", "false"):
            return ""
        path = f"{prefix}{group.ranks[group.rank]}"
        try:
            with open(path, "wb") as file:
                pickle.dump(self.dump(), file)
        except Exception as exc:  # the report of the failure must not fail
            return f"; the flight recorder could not be written: {exc}"
        return f"; the flight recorder is in {path}"


def _progress(called: str, done: str) -> str:
    """Text about the last collectives of a group, from their numbers in a dump."""
    if called == NONE:
        return "no collective of the group was called"
    last = "no recorded collective was done" if done == NONE else f"#{done} was done last"
    return f"collective #{called} of the group was called last, and {last}"


def _setting(*names: str) -> str:
    """Value of the first set variable of ``names``; empty if none is set."""
    return next((value for name in names if (value := os.environ.get(name))), "")


def _size() -> int:
    text = _setting("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    try:
        return int(text or RECORDS)
    except ValueError:
        _log.warning("TORCH_FR_BUFFER_SIZE is %r and no number: the flight recorder keeps %d records", text, RECORDS)
        return RECORDS
