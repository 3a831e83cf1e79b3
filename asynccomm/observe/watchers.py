"""The watchers of a comm: they are notified of its calls, and of the end of each.

Calls that the backend's fast path completes are noted when they are done, and reported several at once; all others are
reported at the call, and their Works tell the end. A watcher that needs the tensors of calls, or that must act before a
call is sent, detours: while it is there, no call takes the fast path.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, final

from asynccomm.core.callsite import CallSite
from asynccomm.core.state import CallCounts
from asynccomm.core.work import Work
from asynccomm.errors import BrokenError
from asynccomm.ops import Call, Op

NOTED: Final = 64  # calls of the fast path that are reported together

Called = tuple[Op, CallSite | None, int, float, float | None]  # operation, call site, number, times of call and end


class Watcher:
    """Is notified of the calls and the failure of a comm. The methods must be quick, and not raise.

    All methods run on the thread that makes the call or finds the event, some of them under the comm's lock.
    """

    detours: ClassVar[bool] = False  #: whether every call must be reported at the call, with its tensors

    def before(self, op: Op) -> None:
        """An operation is about to be called; an exception refuses the call. Only with ``detours``."""

    def called(self, call: Call, work: Work[Any]) -> None:
        """An operation was called; ``work`` has no number yet if the call is deferred. In the order of the calls."""

    def sent(self, works: Sequence[Work[Any]]) -> None:
        """Deferred operations were numbered and sent as one batch."""

    def finished(self, calls: Sequence[Called]) -> None:
        """The fast path has called and completed these operations; some time ago, unless the watcher is in a hurry."""

    def broke(self, error: BrokenError) -> None:
        """The comm has broken, and the other ranks were notified."""

    def arrived(self, op: Op, seq: int, arrivals: Mapping[int, float]) -> None:
        """The times of all ranks' calls of a collective have become known, by this rank's clock."""

    def waited(self, seconds: float) -> None:
        """``ready()`` has waited for so long, until now."""

    def departed(self, rank: int, how: str) -> None:
        """A rank has left the comm; ``how`` is empty if it closed the comm in order."""

    def regrouped(self, members: Sequence[int]) -> None:
        """The ranks ``members`` go on as another comm, in the order of their new ranks; -1 is a newcomer."""

    def closed(self) -> None:
        """The comm has closed here; nothing follows."""


@final
class Watchers:
    """The watchers of one comm.

    Args:
        counts: the comm's, which tells the fast path whether there are watchers.
    """

    def __init__(self, counts: CallCounts) -> None:
        self._counts = counts
        self.all: tuple[Watcher, ...] = ()  #: replaced as a whole, so that any thread may iterate over it
        self.notes: deque[Called] = deque()  #: calls of the fast path that the watchers do not have yet
        self._hurried: set[Watcher] = set()
        self._flushing = False
        self._lock = threading.RLock()  # a watcher may call ``calm``, and a finalizer anything

    def add(self, watcher: Watcher) -> None:
        """Notify ``watcher`` from now on. Under the comm's lock."""
        self.flush()
        with self._lock:
            self.all = (*self.all, watcher)
            self._counts.detours += watcher.detours
            self._set_noted()

    def remove(self, watcher: Watcher) -> None:
        """Notify ``watcher`` no more, after the notes so far. Idempotent. Under the comm's lock."""
        self.flush()
        with self._lock:
            if watcher in self.all:
                self.all = tuple([each for each in self.all if each is not watcher])
                self._counts.detours -= watcher.detours
            self._hurried.discard(watcher)
            self._set_noted()

    def hurry(self, watcher: Watcher) -> None:
        """Report each call of the fast path at once, until ``calm``. From any thread."""
        with self._lock:
            if watcher in self.all:
                self._hurried.add(watcher)
                self._set_noted()
        self.flush()

    def calm(self, watcher: Watcher) -> None:
        """Report calls of the fast path several at once again, as far as ``watcher`` needs. From any thread."""
        with self._lock:
            self._hurried.discard(watcher)
            self._set_noted()

    def _set_noted(self) -> None:
        plain = not all(watcher.detours for watcher in self.all)
        self._counts.noted_calls = 0 if not plain else 1 if self._hurried else NOTED

    def flush(self) -> None:
        """Report the calls of the fast path that are noted. From any thread."""
        if not self.notes:
            return
        with self._lock:
            if self._flushing:  # a finalizer has made a call
                return
            self._flushing = True
            try:
                while self.notes:
                    calls = [self.notes.popleft() for _ in range(len(self.notes))]
                    for watcher in self.all:
                        watcher.finished(calls)
            finally:
                self._flushing = False

    def before(self, op: Op) -> None:
        for watcher in self.all:
            if watcher.detours:
                watcher.before(op)

    def called(self, call: Call, work: Work[Any]) -> None:
        self.flush()
        for watcher in self.all:
            watcher.called(call, work)

    def sent(self, works: Sequence[Work[Any]]) -> None:
        self.flush()
        for watcher in self.all:
            watcher.sent(works)

    def broke(self, error: BrokenError) -> None:
        self.flush()
        for watcher in self.all:
            watcher.broke(error)

    def arrived(self, op: Op, seq: int, arrivals: Mapping[int, float]) -> None:
        self.flush()
        for watcher in self.all:
            watcher.arrived(op, seq, arrivals)

    def waited(self, seconds: float) -> None:
        self.flush()
        for watcher in self.all:
            watcher.waited(seconds)

    def departed(self, rank: int, how: str) -> None:
        self.flush()
        for watcher in self.all:
            watcher.departed(rank, how)

    def regrouped(self, members: Sequence[int]) -> None:
        self.flush()
        for watcher in self.all:
            watcher.regrouped(members)

    def closed(self) -> None:
        self.flush()
        for watcher in self.all:
            watcher.closed()


def once(works: list[Work[Any]], call: Callable[[Work[Any]], object]) -> None:
    """Call ``call`` with the only item of ``works`` at the first time: a Work may notify a listener twice."""
    try:
        work = works.pop()  # atomic
    except IndexError:
        return
    call(work)
