"""Ready-made hooks of a TorchComm: ``NanCheckHook``, ``FlightRecorderHook``, and ``clog``, which writes a log file."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from asynccomm.comm.flight import PREFIX, calls_of
from asynccomm.compat.torchcomms.clog import clog as clog
from asynccomm.compat.torchcomms.registration import HookedComm, OpArguments, RemovableHandle
from asynccomm.errors import BrokenError
from asynccomm.observe.flight import CommRecord, Records, dump_of

# by operation: the places of inputs and of outputs among the arguments
_PLACES: Final = {
    "all_reduce": (0, 0),
    "reduce": (0, 0),
    "broadcast": (0, 0),
    "send": (0, None),
    "recv": (None, 0),
    "put": (0, None),
    **dict.fromkeys(("all_gather", "all_gather_single", "gather", "gather_single", "scatter"), (1, 0)),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_single"), (1, 0)),
    **dict.fromkeys(("all_to_all", "all_to_all_single", "all_to_all_v_single"), (1, 0)),
}
_ROOT_ALONE: Final = {"broadcast": (1, "input"), "reduce": (1, "output")}  # place of the root; the side that it has


@final
class NanCheckHook:
    """Refuses operations with NaN in their inputs; infinities are allowed.

    Args:
        check_inputs: an operation with NaN in an input raises RuntimeError, and is not sent.
        check_outputs: NaN in an output, which is looked at when the operation is done, makes the next call raise
            RuntimeError, and not be sent. Only on the CPU: on a GPU the host would have to wait for each output, or the
            output might have changed, so outputs are not looked at there.
    """

    def __init__(self, check_inputs: bool = True, check_outputs: bool = False) -> None:
        self._inputs, self._outputs = check_inputs, check_outputs
        self._handles: list[RemovableHandle] = []
        self._names: dict[int, str] = {}
        self._found: list[str] = []

    def register_with_comm(self, comm: HookedComm) -> None:
        """Check the operations of ``comm`` from now on, too."""

        def before(name: str, number: int, given: OpArguments) -> None:
            if self._found:
                raise RuntimeError(self._found.pop(0))
            if self._inputs:
                _refuse_nan("input", name, comm, given)
            if self._outputs:
                self._names[number] = name

        def after(number: int, given: OpArguments) -> None:
            if given.work is not None and given.work._work.order is None:
                given.work._work.listen(lambda: self._look(number, comm, given))

        self._handles.append(comm.register_pre_hook(before))
        if self._outputs:
            self._handles.append(comm.register_post_hook(after))

    def _look(self, number: int, comm: HookedComm, given: OpArguments) -> None:
        name = self._names.pop(number, None)  # a Work may notify twice
        if name is not None and given.work is not None and given.work._work._error is None:
            try:
                _refuse_nan("output", name, comm, given)
            except RuntimeError as exc:
                self._found.append(str(exc))

    def is_enabled(self) -> bool:
        """Whether a comm is registered."""
        return bool(self._handles)

    def unregister(self) -> None:
        """End all checks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    remove = unregister


def _refuse_nan(side: str, name: str, comm: HookedComm, given: OpArguments) -> None:
    """Raise RuntimeError if a tensor of that side has NaN."""
    for tensor in _tensors(side, name, comm, given):
        if (tensor.is_floating_point() or tensor.is_complex()) and torch.isnan(tensor).any():
            raise RuntimeError(
                f"NaN detected in {side} tensor for {name!r} on comm {comm.get_name()!r}: "
                f"shape {tuple(tensor.shape)}, {int(torch.isnan(tensor).sum())} elements"
            )


def _tensors(side: str, name: str, comm: HookedComm, operation: OpArguments) -> Iterator[Tensor]:
    arguments = operation.arguments
    if name == "batch_op_issue":
        wanted = "SEND" if side == "input" else "RECV"
        yield from [op.tensor for op in arguments[0] if op.type.name == wanted]
        return
    place = _PLACES.get(name, (None, None))[side == "output"]
    root, only = _ROOT_ALONE.get(name, (0, ""))
    if place is None or (only == side and arguments[root] != comm._comm.rank):
        return
    given = arguments[place]
    if given is None and side == "output" and operation.work is not None:  # of a function that makes its output
        given = operation.work._work.result()
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Sequence):  # None: of another rank than the root
        yield from given


@final
class FlightRecorderHook:
    """Gives the last operations of comms in torch's format, which ``torchfrtrace`` reads.

    The comms record always, and until operations are done, so this hook calls nothing for an operation.

    Args:
        max_entries: of a dump, at most.
    """

    def __init__(self, max_entries: int = 2048) -> None:
        if isinstance(max_entries, bool) or not isinstance(max_entries, int) or max_entries < 1:
            raise ValueError(f"max_entries must be a positive integer, got {max_entries!r}")
        self._most = max_entries
        self._since = 0.0
        self._comms: list[HookedComm] = []

    def register_with_comm(self, comm: HookedComm) -> None:
        """Let dumps tell of ``comm``, too; at any time, also of its earlier operations."""
        self._comms.append(comm)

    def is_enabled(self) -> bool:
        """Whether a comm is registered."""
        return bool(self._comms)

    def size(self) -> int:
        """The number of operations that a dump has."""
        return len(self._dump(True)["entries"])

    def reset(self) -> None:
        """Leave the operations so far out of later dumps."""
        self._since = time.monotonic()

    def dump_json(self, include_completed: bool = True) -> str:
        """The dump as JSON.

        Args:
            include_completed: False: only operations in flight.
        """
        return json.dumps(self._dump(include_completed))

    def dump_file(self, rank: int, include_completed: bool = True) -> Path:
        """Write the dump as a pickle of plain values to the path in TORCHCOMM_FR_DUMP_TEMP_FILE plus ``rank``.

        Without that variable, to ``rank_`` plus ``rank`` in the working directory. Raises: OSError.
        """
        path = Path(os.environ.get("TORCHCOMM_FR_DUMP_TEMP_FILE", PREFIX) + str(rank))
        path.write_bytes(pickle.dumps(self._dump(include_completed)))
        return path

    def _dump(self, include_completed: bool) -> dict[str, Any]:
        groups: list[CommRecord] = []
        records: Records = []
        for number, comm in enumerate(self._comms):
            inner = comm._comm
            error = inner._session.error
            shown = f"{type(error).__name__}: {error}" if isinstance(error, BrokenError) else ""
            ranks = tuple(range(inner.size))
            name, called = comm.get_name(), inner._submitter.counts.collectives
            group = CommRecord(number, name, name, inner.backend, ranks, inner.rank, called, shown)
            groups.append(group)
            records = [*records, *[(group, call) for call in calls_of(inner._submitter) if call.started >= self._since]]
        chosen = [each for each in records if include_completed or each[1].finished is None]
        chosen = sorted(chosen, key=lambda each: each[1].started)[-self._most :]
        return dump_of(groups, records, entries=chosen)
