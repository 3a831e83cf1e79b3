"""Repeated collectives of one tensor from the call to NCCL, without most of the ordinary path of a call.

Programs repeat their calls. A collective that is a single call of NCCL, without copies or conversions around it, is
remembered by its operation, which has the dtype, the size, the reduction and the root. A later call with an equal
operation is checked as every call, and its tensors must be plain and apart; then it is issued at once. Everything else
takes the ordinary path: with a tag or a limit of its own, in scopes and captures, under agreed ordering, while NCCL
connects, and beside collectives of parcels, which may share its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, final

from asynccomm.backends.arithmetic import is_plain
from asynccomm.backends.base import DirectCalls, Submission
from asynccomm.backends.direct_calls import CheckedCalls
from asynccomm.backends.nccl.collective_stream import CollectiveStream
from asynccomm.backends.nccl.communicator import DirectCall
from asynccomm.backends.nccl.device import Device
from asynccomm.core.callsite import CallSite
from asynccomm.core.work import Work
from asynccomm.ops import AllReduce, Broadcast, Call, Op, dims

REMEMBERED: Final = 4096  # operations
_CHECKS: Final[frozenset[Callable[..., Any]]] = frozenset(
    {AllReduce.of, Broadcast.of, dims.all_gather_single, dims.reduce_scatter_single}
)
_UNPLANNED: Final[Any] = None  # the Work of a submission that is only looked at


@final
class DirectCollectives(CheckedCalls):
    """``backends.base.FastCalls`` for repeated collectives.

    Args:
        broken: called with an exception that leaves an operation half done.
    """

    def __init__(
        self,
        calls: DirectCalls,
        collectives: CollectiveStream,
        device: Device,
        broken: Callable[[Op, BaseException], object],
    ) -> None:
        super().__init__(calls, _CHECKS)
        self._collectives = collectives
        self._device = device
        self._broken = broken
        self._known: dict[Op, DirectCall | None] = {}  # None: the ordinary path takes it

    def _begin(self, call: Any, site: CallSite | None, started: float) -> Work[Any] | None:
        memory = _memory(call) if type(call) is Call else None
        if memory is None or self._device.capturing():
            return None
        known = self._known.get(call.op)
        if known is None:
            if call.op not in self._known:
                self._learn(call, memory)
            return None
        calls, counts = self._calls, self._counts
        with calls.lock:
            before = counts.collectives
            try:
                if counts.closed:
                    return None
                work = self._collectives.begin_direct(known, memory, partial(_numbered, calls, call, site, started))
                if work is not None:
                    calls.numbered(call, work)
            except BaseException as exc:
                if counts.collectives != before:  # the other ranks may be in the operation already
                    self._broken(call.op, exc)
                raise
        return work

    def _learn(self, call: Call, memory: tuple[int, int]) -> None:
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[call.op] = self._collectives.direct_call(Submission(call, _UNPLANNED), *memory)


def _memory(call: Call) -> tuple[int, int] | None:
    """Where a call reads and writes, if that is one plain tensor, or two that are apart, and the call has no factor."""
    reduction = call.op.reduction
    if reduction is not None and reduction.factor is not None:  # operations with factors are costly to compare
        return None
    inputs, outputs = call.inputs or call.outputs, call.outputs or call.inputs
    if len(inputs) != 1 or len(outputs) != 1 or call.copies or not is_plain(inputs[0]):
        return None
    read = inputs[0].data_ptr()
    if inputs[0] is outputs[0]:
        return read, read
    if not is_plain(outputs[0]):
        return None
    written = outputs[0].data_ptr()
    apart = read + inputs[0].nbytes <= written or written + outputs[0].nbytes <= read
    return (read, written) if apart else None


def _numbered(calls: DirectCalls, call: Call, site: CallSite | None, started: float) -> Submission:
    """The submission of a call that is sure to be issued. Under the comm's lock."""
    submission = Submission(call, _UNPLANNED)
    submission.work = calls.number(call, submission.nbytes, site, started)
    return submission
