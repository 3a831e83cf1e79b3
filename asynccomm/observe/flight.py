"""The records of the last calls in the format of torch's flight recorder, which ``torchfrtrace`` reads.

The records of a comm come from the ring that the comm keeps always, without the shapes of tensors; ``compat.c10d``
records shapes. A dump holds text and numbers only, so reading it runs no code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import torch

from asynccomm.core.callsite import CallSite, line_number
from asynccomm.core.work import UNNUMBERED
from asynccomm.ops import AllToAll, Broadcast, Op, Parcels, PeerOp, Reduce
from asynccomm.ops.signature import signature

VERSION: Final = "2.10"  # of torch's format
NAMES: Final = {  # names in torch's backends, where they differ
    "all_gather_single": "_all_gather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
}

Side = tuple[Sequence[int], Sequence[torch.dtype]]  # sizes and dtypes of the inputs, or of the outputs


class RecordedGroup(Protocol):
    """The comm of a record."""

    number: int
    name: str
    desc: str
    backend: str
    ranks: tuple[int, ...]  #: the numbers of their processes
    rank: int  #: this process's, in the comm
    error: str  #: the error that broke the comm; empty: none

    @property
    def collectives(self) -> int:
        """The number of collectives called so far, also of those without a record any more."""


class RecordedCall(Protocol):
    """The record of one operation."""

    number: int
    op: Op
    inputs: Side | None
    outputs: Side | None
    site: CallSite | None
    started: float
    finished: float | None
    timeout: float
    error: str | None  #: name of the error's type

    @property
    def number_on_comm(self) -> int:
        """The operation's number among the comm's collectives or messages; -1 while the operation is deferred."""


Records = Sequence[tuple[RecordedGroup, RecordedCall]]


@final
@dataclass(slots=True)
class CommRecord:
    """A comm, as a dump describes it."""

    number: int
    name: str
    desc: str
    backend: str
    ranks: tuple[int, ...]
    rank: int
    collectives: int
    error: str = ""


@final
@dataclass(slots=True)
class CallRecord:
    """A call from a comm's own ring: its shapes are unknown, so each side is one vector."""

    number: int
    op: Op
    inputs: Side | None
    outputs: Side | None
    number_on_comm: int
    site: CallSite | None
    started: float
    finished: float | None
    timeout: float
    error: str | None


def sides_of(op: Op, size: int) -> tuple[Side | None, Side | None]:
    """Inputs and outputs of an operation among ``size`` ranks, as vectors."""
    numel: int | None = getattr(op, "numel", None)
    if numel is None:
        return None, None
    share: Side = (numel,), (op.dtype,)  # type: ignore[attr-defined]
    whole: Side = (sum(op.counts) if op.counts else numel * size,), share[1]
    if op.kind.startswith(("all_gather", "gather")):
        return share, whole
    if op.kind.startswith(("reduce_scatter", "scatter")):
        return whole, share
    return (whole, whole) if op.kind == "all_to_all_single" and op.split else (share, share)


def dump_of(
    groups: Iterable[RecordedGroup], records: Records, *, entries: Records | None = None, frames: bool = True
) -> dict[str, Any]:
    """A dump in torch's format.

    Args:
        groups: described also without a record.
        records: for the state of the groups.
        entries: the operations to describe; None: no part of the dump.
        frames: include the operations' call sites.
    """
    there = {id(group): group for group in [*groups, *(group for group, _ in records)]}.values()
    dump: dict[str, Any] = {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {group.name: _described(group) for group in there},
        "pg_status": {str(group.number): status_of(group, records) for group in there},
    }
    if entries is not None:
        since = time.time_ns() - time.monotonic_ns()  # start of the monotonic clock
        dump["entries"] = [_entry(group, record, since, frames) for group, record in entries]
    return dump


def _described(group: RecordedGroup) -> dict[str, Any]:
    ranks = str(list(group.ranks))
    return {"name": group.name, "desc": group.desc, "ranks": ranks, "collectives": group.collectives}


def status_of(group: RecordedGroup, records: Records) -> dict[str, str]:
    """Numbers of a group's last submitted and last completed collective; -1 for none."""
    mine = [record for each, record in records if each is group and not record.op.p2p]
    called = group.collectives - 1  # the records may be of messages only, later than all collectives
    done = [record.number_on_comm for record in mine if record.finished is not None and record.error is None]
    status = {
        "last_enqueued_collective": str(called),
        "last_started_collective": str(called),
        "last_completed_collective": str(max(done, default=UNNUMBERED if mine else called)),
    }
    return {**status, "error": group.error} if group.error else status


def _entry(group: RecordedGroup, record: RecordedCall, since: int, frames: bool) -> dict[str, Any]:
    finished, seq = record.finished, record.number_on_comm
    created = since + int(record.started * 1e9)
    done = finished is not None and record.error is None
    op = record.op
    name, inputs, outputs = _as_torch(record, group.rank)
    entry: dict[str, Any] = {
        "record_id": record.number,
        "pg_id": group.number,
        "process_group": (group.name, group.desc),
        "collective_seq_id": 0 if op.p2p else seq,
        "p2p_seq_id": seq if op.p2p else 0,
        "op_id": record.number,
        "is_p2p": op.p2p,
        "profiling_name": f"{group.backend}:{name}",
        "input_sizes": [list(sizes) for sizes, _ in inputs],
        "input_dtypes": [_named(dtype) for _, dtypes in inputs for dtype in dtypes],
        "output_sizes": [list(sizes) for sizes, _ in outputs],
        "output_dtypes": [_named(dtype) for _, dtypes in outputs for dtype in dtypes],
        "state": "completed" if done else "scheduled" if seq == UNNUMBERED else "started",
        "time_created_ns": created,
        "time_discovered_started_ns": None if seq == UNNUMBERED else created,
        "time_discovered_completed_ns": since + int(finished * 1e9) if done and finished is not None else None,
        "timeout_ms": None if math.isinf(record.timeout) else round(record.timeout * 1e3),
        "retired": finished is not None,
        "op": str(op),
    }
    if not op.p2p and seq != UNNUMBERED:
        entry["signature"] = list(signature(op))  # equal on all ranks
    if done and finished is not None:
        entry["duration_ms"] = (finished - record.started) * 1e3
    if record.error is not None:
        entry["error"] = record.error
    if frames:
        entry["frames"] = [] if record.site is None else [_frame(record.site)]
    return entry


def _frame(site: CallSite) -> dict[str, Any]:
    return {"name": site[0].co_name, "filename": site[0].co_filename, "line": line_number(site)}


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_torch(record: RecordedCall, rank: int) -> tuple[str, list[Side], list[Side]]:
    """Name, inputs and outputs of an operation, as recorded by torch's backends."""
    op = record.op
    name = NAMES.get(op.kind, op.kind)
    inputs = [] if record.inputs is None else [record.inputs]
    outputs = [] if record.outputs is None else [record.outputs]
    unknown: list[Side] = [((0,), (torch.uint8,))]  # of parcels: their sizes differ by rank
    match op:
        case Broadcast() | Reduce():  # in place everywhere
            return name, inputs or outputs, inputs or outputs
        case AllToAll():
            dtypes = (op.dtype,)
            return name, [((sum(op.sends),), dtypes)], [((sum(op.receives),), dtypes)]
        case PeerOp() if op.is_send:
            return f"send {rank}->{op.peer}", inputs or unknown, []
        case PeerOp():
            return f"recv {rank}<-{'?' if op.peer is None else op.peer}", [], outputs or unknown
        case Parcels():
            return _form(op), unknown, unknown
        case _:
            return name, inputs, outputs


def _form(op: Parcels) -> str:
    """Name of the tensor collective that corresponds to a collective with parcels."""
    if op.giver is not None:
        return "broadcast" if op.shared else "scatter"
    if op.taker is not None:
        return "gather"
    return "all_gather" if op.shared else "all_to_all"
