"""The collectives that this rank called in one test."""

from __future__ import annotations

import weakref
from typing import final

from asynccomm.comm import session as sessions
from asynccomm.comm.session import Session
from asynccomm.core.callsite import show
from asynccomm.core.work import UNNUMBERED
from asynccomm.errors import BrokenError
from asynccomm.testing.protocol import CommCalls

__all__ = ["CallWatch"]

SHOWN = 8  # last calls of a comm that a rank reports


@final
class CallWatch:
    """Notes the collectives called on each comm of this process that is made while the watch is on."""

    def __init__(self) -> None:
        self._before = weakref.WeakSet(sessions.open_sessions())
        self._closed: list[tuple[CommCalls, BrokenError | None]] = []
        sessions.on_close.append(self._note)

    def _note(self, session: Session) -> None:
        if session not in self._before:
            self._closed.append(_calls_of(session))

    def _all(self) -> list[tuple[CommCalls, BrokenError | None]]:
        return self._closed + [_calls_of(each) for each in sessions.open_sessions() if each not in self._before]

    def calls(self) -> list[CommCalls]:
        """The calls on the comms that were closed, and on those still open."""
        # a test may look at an error after its comm has closed
        return [calls._replace(broken=error is not None and error.observed) for calls, error in self._all()]

    def stop(self) -> None:
        """End the watch."""
        sessions.on_close.remove(self._note)


def _calls_of(session: Session) -> tuple[CommCalls, BrokenError | None]:
    """The calls on a comm, and the error that has broken it."""
    submitter = session.submitter
    # the order of operations without a number is not agreed yet: a rank may learn of it later than another rank
    held = [work for work in session.in_flight.pending() if work.seq == UNNUMBERED and not work.op.p2p]
    recent = submitter.recent.copy()
    last = [(number, str(op), show(site)) for op, site, number, *_ in recent if not op.p2p][-SHOWN:]
    last += [(submitter.counts.collectives + index, str(work.op), show(work.site)) for index, work in enumerate(held)]
    called = submitter.counts.collectives + len(held)
    error = session.error if isinstance(session.error, BrokenError) else None
    return CommCalls(session.identity.key, session.group.name, called, last, False), error
