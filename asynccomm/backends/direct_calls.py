"""Repeated collectives without most of the ordinary path of a call.

Programs repeat their calls, so a backend remembers collectives by their operation. A later call with an equal operation
is checked as every call, and then begins before it has a Work. Everything unusual takes the ordinary path: with a tag
or a limit of its own, in scopes, under agreed ordering.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from typing import Any, Final, Generic, TypeVar

import torch
from torch.autograd import profiler

from asynccomm.backends.arithmetic import is_plain
from asynccomm.backends.base import DirectCalls, Submission
from asynccomm.core.callsite import CallSite, call_site
from asynccomm.core.work import Work
from asynccomm.ops import Call, Op

K = TypeVar("K")

REMEMBERED: Final = 4096  # operations
_UNNUMBERED: Final[Any] = None  # the Work of a submission that has none yet
DEPTH: Final = 3  # frames from call_site() to the user's call: call_site, ``submit``, and a method


class CheckedCalls(ABC):
    """``backends.base.FastCalls`` for calls that are checked first.

    Args:
        checks: of the methods that it is for.
    """

    def __init__(self, calls: DirectCalls, checks: Set[Callable[..., Any]]) -> None:
        self._calls = calls
        self._counts = calls.counts
        self._checks = checks

    def submit(self, timeout: Any, hints: Any, tag: Any, check: Callable[..., Any], /, *arguments: Any) -> Work[Any]:
        """See ``FastCalls.submit``."""
        calls, counts = self._calls, self._counts
        if check in self._checks and timeout is None and hints is None and tag is None:
            unusual = counts.detours > calls.compares or counts.scopes or profiler._is_profiler_enabled
            if not (unusual or counts.closed) and asyncio._get_running_loop() in (calls.mailbox.loop, None):
                started = time.monotonic()
                site = call_site(DEPTH) if calls.records_sites else None
                made = check(calls.group, *arguments)
                return self._begin(made, site, started) or calls.submit_made(made, None, None, None)
        return calls.call(timeout, hints, tag, check, *arguments)

    def flush(self, _: list[Any], /) -> None:
        """See ``FastCalls.flush``: no operation is held."""

    @abstractmethod
    def _begin(self, call: Any, site: CallSite | None, started: float) -> Work[Any] | None:
        """Begin a checked call; None: it is not for this path, and nothing has happened."""


class RepeatedCalls(CheckedCalls, Generic[K]):
    """``CheckedCalls`` of a backend that begins collectives on the host, of kinds that it has seen.

    Args:
        broken: called with an exception that leaves an operation half done.
    """

    def __init__(
        self, calls: DirectCalls, checks: Set[Callable[..., Any]], broken: Callable[[BaseException], object]
    ) -> None:
        super().__init__(calls, checks)
        self._broken = broken
        self._known: dict[Op, K | None] = {}  # None: the ordinary path takes it

    @abstractmethod
    def _kind_of(self, submission: Submission) -> K | None:
        """The backend's knowledge of calls with the operation of a submission; None: the ordinary path takes them."""

    @abstractmethod
    def _start(self, kind: K, submission: Submission, number: int) -> object | None:
        """Begin a call of a known kind, under the number of the operation. Under the comm's lock.

        Returns True: it is over; None: nothing has happened, because a tensor is not plain, or other operations are in
        flight; anything else is for ``_go_on``, which is called next. Raises only if nothing has happened, or the comm
        is broken.
        """

    @abstractmethod
    def _go_on(self, submission: Submission, kind: K, begun: Any) -> object:
        """Carry out the rest of a call, which has its Work by now. Under the comm's lock."""

    def _begin(self, call: Any, site: CallSite | None, started: float) -> Work[Any] | None:
        if type(call) is not Call or call.copies or torch.is_inference_mode_enabled():
            return None
        op: Any = call.op
        if op.reduction is not None and op.reduction.factor is not None:  # such operations are costly to compare
            return None
        kind = self._known.get(op)
        if kind is None:
            if op not in self._known:
                self._learn(call)
            return None
        submission = Submission(call, _UNNUMBERED)
        calls, counts = self._calls, self._counts
        with calls.lock:
            begun = None if counts.closed else self._start(kind, submission, counts.collectives)
            if begun is None:
                return None
            try:
                submission.work = work = calls.number(call, submission.nbytes, site, started)
                if begun is True:
                    work.settle()
                else:
                    self._go_on(submission, kind, begun)
                calls.numbered(call, work)
            except BaseException as exc:
                self._broken(exc)  # the other ranks may be in the operation already
                raise
        return work

    def _learn(self, call: Call) -> None:
        if not all(map(is_plain, (*call.inputs, *call.outputs))):  # those of the next call may be
            return
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[call.op] = self._kind_of(Submission(call, _UNNUMBERED))
