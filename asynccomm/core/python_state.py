"""The state of a Work, and the counts, log, lock and streak of a comm, where ``_work.c`` was not built."""

from __future__ import annotations

import math
import time
from collections import deque as CallLog  # of ``observe.watchers.Called``; in C it makes them when they are read
from collections.abc import Generator
from threading import RLock as ReentrantLock
from typing import Any

__all__ = ["CallCounts", "CallLog", "DirectCaller", "HeldCalls", "ReentrantLock", "Streak", "WorkState", "values_of"]

STREAK_AWAITS = 64  # finished outcomes awaited in a row before one await yields to the loop
STREAK_SECONDS = 1e-3  # the same limit as a time, for large collectives that finish inside the call


class Streak:
    """The awaits in a row that did not suspend; an endless streak would starve all other tasks of the loop."""

    __slots__ = ("_awaits", "_since", "loop")

    def __init__(self) -> None:
        self.loop: Any = None  #: the loop of the awaits, if there is only one
        self._awaits = 0
        self._since = 0.0

    def should_yield(self) -> bool:
        """Count one await that did not suspend; True when other tasks have to run."""
        now = time.monotonic()
        if self._awaits == 0:
            self._since = now
        self._awaits += 1
        if self._awaits < STREAK_AWAITS and now - self._since < STREAK_SECONDS:
            return False
        self._awaits = 0
        return True

    def reset_streak(self) -> None:
        """End the streak: an await did suspend."""
        self._awaits = 0


class CallCounts:
    """The numbers of the calls of a comm, and whether calls go straight to the backend."""

    def __init__(self) -> None:
        self.collectives = 0  #: numbered so far
        self.messages = 0  #: point-to-point operations numbered so far
        self.submitted = 0  #: operations called so far, for the statistics
        self.nbytes = 0  #: of the operations sent so far, each by its larger side (inputs or outputs)
        self.limit: float = math.inf  #: seconds for an operation called now without a time limit of its own
        self.detours = 0  #: reasons for which calls do more than be sent or held: an agreed order, observers
        self.scopes = 0  #: tasks and threads in scopes that hold their calls
        self.noted_calls = 0  #: calls of the fast path that are noted before the watchers get them; 0: no watchers
        self.closed = False  #: calls raise an error


class DirectCaller:
    """The base of objects with methods that begin in C, where C was built."""

    __slots__ = ("_fast",)

    def __init__(self) -> None:
        self._fast: Any = None  #: the fast path of the calls


class HeldCalls:
    """The attributes of ``DeferredQueue`` that the fast path uses; they are documented there."""

    __slots__ = ("due", "items", "works")

    def __init__(self) -> None:
        self.works: list[Any] = []
        self.items: list[Any] = []
        self.due: float = math.inf


class WorkState:
    """The attributes of ``Work``, which documents them."""

    __slots__ = (
        "_callbacks",
        "_done",
        "_error",
        "_finish",
        "_listeners",
        "_mailbox",
        "_on_overdue",
        "_on_settled",
        "_traceback",
        "_value",
        "_waiters",
        "captured",
        "driver",
        "finished",
        "op",
        "order",
        "seq",
        "site",
        "source",
        "started",
        "timeout",
    )

    def __init__(self) -> None:
        self.captured: bool = False  #: whether the operation is part of a CUDA graph: done whenever the graph has run
        self.driver: Any = None
        self.finished: float | None = None  #: time of settling, on the clock of ``started``; None while pending
        self.order: Any = None  #: position in the streams of a GPU, if any; for backends
        self.site: Any = None  #: its call site, if the comm records call sites; for the comm
        self.source: int | None = None  #: the rank that sent a receive's message; None until done and for all others
        self._done = False
        self._error: Any = None
        self._finish: Any = None
        self._on_overdue: Any = None
        self._on_settled: Any = None
        self._traceback: Any = None
        self._waiters: list[Any] = []
        self._listeners: list[Any] = []
        self._callbacks: list[Any] = []

    def _wait(self) -> Generator[Any, None, Any]:
        raise NotImplementedError

    def _report_unretrieved(self) -> None:
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait()

    def __del__(self) -> None:
        if getattr(self, "_error", None) is not None:
            self._report_unretrieved()


def values_of(works: list[Any]) -> list[Any] | None:
    """The values of Works; None if one of them is not done, has failed, or has to make its value first."""
    for work in works:
        if not work._done or work.captured or work._error is not None or work._finish is not None:
            return None
    return [work._value for work in works]
