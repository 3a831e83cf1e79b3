"""Small all_reduces without most of the ordinary path of a call.

Programs repeat their calls, so a call is known by the dtype, the size and the reduction. The first call of its kind is
checked, and its steps are planned (``plain_reductions``). A later call of the kind begins its first step, in the memory
of the host, before anything else: the step's own fast path in C refuses every tensor that is not plain, and then
nothing has happened. Further steps follow at once as long as the other ranks come in time; the pipeline carries out
the rest. Everything unusual takes the ordinary path: with arguments that may be refused, a tag, a limit, agreed
ordering, scopes, operations in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, final

from torch import Tensor
from torch.autograd import profiler

from asynccomm.backends.base import DirectCalls, Submission
from asynccomm.backends.hierarchical.lane_calls import LaneCalls, RailCalls
from asynccomm.backends.hierarchical.pipeline import Lane
from asynccomm.backends.hierarchical.plain_reductions import ByLeaders, PlainAllReduces
from asynccomm.core.callsite import call_site
from asynccomm.core.work import Work
from asynccomm.ops import AllReduce, Call
from asynccomm.ops.reduce_op import CONSTANTS, ReduceOp

REMEMBERED: Final = 4096  # kinds of calls
DEPTH: Final = 3  # frames from call_site() to the user's call: call_site, ``submit``, and a method
_CHECK: Final = AllReduce.of
_UNPLANNED: Final[Any] = None  # the Work of a submission that is only looked at


class _CallKind(NamedTuple):
    """A kind of calls; ``kind`` is None if the ordinary path takes them."""

    reduction: ReduceOp
    op: Any
    kind: ByLeaders | None


@final
class DirectAllReduces:
    """``backends.base.FastCalls`` for the small all_reduces of a rank that shares its host.

    Args:
        lanes: begin the steps; one is that of ``Lane.UP``.
        idle: whether no collective is in flight, and no thread carries out a step.
        go_on: carries out the rest of an all_reduce, with the last two arguments of ``Pipeline.go_on``.
        broken: called with an exception that leaves an operation half done.
    """

    def __init__(
        self,
        calls: DirectCalls,
        plain: PlainAllReduces,
        lanes: Mapping[Lane, LaneCalls | RailCalls],
        idle: Callable[[], bool],
        go_on: Callable[[Submission, ByLeaders, int, Any], object],
        broken: Callable[[BaseException], object],
    ) -> None:
        self._calls = calls
        self._counts = calls.counts
        self._plain = plain
        self._lanes = lanes
        self._idle = idle
        self._go_on = go_on
        self._broken = broken
        self._known: dict[tuple[object, int, int], _CallKind] = {}

    def submit(self, timeout: Any, hints: Any, tag: Any, check: Callable[..., Any], /, *arguments: Any) -> Work[Any]:
        """See ``FastCalls.submit``."""
        calls, counts = self._calls, self._counts
        if check == _CHECK and timeout is None and hints is None and tag is None:
            tensor, reduction, out = arguments
            unusual = counts.closed or counts.detours or counts.scopes or profiler._is_profiler_enabled
            here = asyncio._get_running_loop() in (calls.mailbox.loop, None)
            if type(tensor) is Tensor and out is None and here and not unusual:
                known = self._known.get((tensor.dtype, tensor.numel(), id(reduction)))
                if known is None:
                    self._learn(tensor, reduction)
                elif known.kind is not None and not tensor.is_inference():
                    with calls.lock:
                        work = self._begin(known.op, known.kind, tensor)
                    if work is not None:
                        return work
        return calls.call(timeout, hints, tag, check, *arguments)

    def flush(self, _: list[Any], /) -> None:
        """See ``FastCalls.flush``: no operation is held."""

    def _learn(self, tensor: Tensor, reduction: object) -> None:
        if not any(reduction is constant for constant in CONSTANTS):
            return
        try:
            call = _CHECK(self._calls.group, tensor, reduction)
        except Exception:  # for the ordinary path, which raises it again
            return
        kind = self._plain.kind_of(Submission(call, _UNPLANNED))
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        small = kind if isinstance(kind, ByLeaders) else None
        self._known[tensor.dtype, tensor.numel(), id(reduction)] = _CallKind(reduction, call.op, small)  # type: ignore[arg-type]

    def _begin(self, op: Any, kind: ByLeaders, tensor: Tensor) -> Work[Any] | None:
        """Begin a call; None: it is not for this path. Under the comm's lock."""
        calls = self._calls
        if self._counts.closed or not self._idle():
            return None
        started = time.monotonic()
        site = call_site(DEPTH + 1) if calls.records_sites else None
        tensors = (tensor,)
        try:
            over, taken = self._take(kind, tensors)
            if not over and taken is None:
                return None
            call = Call(op, tensors, tensors, tensor)
            work = calls.number(call, op.nbytes, site, started)
            if over == len(kind.direct) and kind.is_all_direct:
                kind.remember()
                work.settle()
            else:
                self._go_on(Submission(call, work), kind, over, taken)
            calls.numbered(call, work)
        except BaseException as exc:
            self._broken(exc)  # the other ranks of the host may be in the first step already
            raise
        return work

    def _take(self, kind: ByLeaders, tensors: tuple[Tensor]) -> tuple[int, Any]:
        """Begin steps as long as they are over at once: their number, and the step that is not, or None."""
        number = self._counts.collectives
        for at, (lane, check) in enumerate(kind.direct):
            calls = self._lanes[lane]
            taken = calls.take(number, check, tensors)
            if taken is None or not calls.is_over(taken):
                return at, taken
        return len(kind.direct), None
