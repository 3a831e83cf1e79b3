"""Small all_reduces without most of the ordinary path of a call.

Programs repeat their calls, so a call is known by the dtype, the size and the reduction. The first call of its kind is
checked, and its backend remembers how to carry out such calls. A later call of the kind begins before anything else,
and often is over before it has a Work. Everything unusual takes the ordinary path: with arguments that may be refused,
a tag, a limit, agreed ordering, scopes, operations in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

from torch import Tensor
from torch.autograd import profiler

from asynccomm.backends.arithmetic import is_plain
from asynccomm.backends.base import DirectCalls, Submission
from asynccomm.backends.hierarchical.plain_reductions import ByLeaders
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
    """``backends.base.FastCalls`` for all_reduces of one tensor in place.

    Args:
        kind_of: the backend's knowledge of calls like a submission; None: the ordinary path takes them.
        begin: begins a call of a known kind with a tensor, under the number of the operation. True: it is over; None:
            nothing has happened, because the tensor is not plain, or other operations are in flight; anything else is
            for ``go_on``, which is called next. It raises only if nothing has happened, or the comm is broken. Under
            the comm's lock.
        go_on: carries out the rest of a call.
        broken: called with an exception that leaves a begun operation half done.
    """

    def __init__(
        self,
        calls: DirectCalls,
        kind_of: Callable[[Submission], ByLeaders | None],
        begin: Callable[[ByLeaders, Tensor, int], object | None],
        go_on: Callable[[Submission, ByLeaders, Any], object],
        broken: Callable[[BaseException], object],
    ) -> None:
        self._calls = calls
        self._counts = calls.counts
        self._kind_of = kind_of
        self._begin = begin
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
                        work = self._carry_out(known.op, known.kind, tensor)
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
        if not is_plain(tensor):  # the next one may be
            return
        kind = self._kind_of(Submission(call, _UNPLANNED))
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[tensor.dtype, tensor.numel(), id(reduction)] = _CallKind(reduction, call.op, kind)  # type: ignore[arg-type]

    def _carry_out(self, op: Any, kind: ByLeaders, tensor: Tensor) -> Work[Any] | None:
        """Begin a call; None: it is not for this path. Under the comm's lock."""
        calls, counts = self._calls, self._counts
        if counts.closed:
            return None
        started = time.monotonic()
        site = call_site(DEPTH + 1) if calls.records_sites else None
        kept = tensor.detach()  # another thread may give the caller's tensor other memory
        begun = self._begin(kind, kept, counts.collectives)
        if begun is None:
            return None
        try:
            tensors = (tensor,)
            call = Call(op, tensors, tensors, tensor)
            work = calls.number(call, op.nbytes, site, started)
            if begun is True:
                work.settle()
            else:
                tensors = (kept,)
                self._go_on(Submission(call._replace(inputs=tensors, outputs=tensors), work), kind, begun)
            calls.numbered(call, work)
        except BaseException as exc:
            self._broken(exc)  # the other ranks may be in the operation already
            raise
        return work
