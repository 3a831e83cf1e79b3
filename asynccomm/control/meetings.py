"""Meetings of the ranks of a job for a new comm, over the control channel that they have.

Each rank that comes tells the root the name of the meeting and its terms. Once all ranks have come, the root tells all
of them the epoch of the comm. A rank can withdraw while it waits. The root answers each arrival of a rank once, in
order: by the epoch, or, if the rank has withdrawn in time, by its acknowledgement. A rank thus knows of each of its
arrivals whether the others count on it. Where a rank is gone, no meeting takes place.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, final

from asynccomm.control.messages import ALL, ROOT, MeetingArrival, MeetingBegin, MeetingWithdrawal, WithdrawalAck
from asynccomm.control.router import Router
from asynccomm.control.transport.schema import JsonObject

Outcome: TypeAlias = Callable[[MeetingBegin | None], object]


@final
class Meetings:
    """The meetings of one rank, and at the root those of all ranks. Runs on the control thread.

    Args:
        router: sends the messages, and records the ranks that are gone.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._waiting: dict[str, deque[Outcome]] = {}  # arrivals of this rank that are not answered, the oldest first
        self._come: dict[str, dict[int, JsonObject]] = {}  # at the root: the terms of the ranks that have come
        self._closed = False

    @property
    def _whole(self) -> bool:
        return not (self._closed or self._router.gone)

    def come(self, meeting: str, terms: JsonObject, outcome: Outcome) -> None:
        """Come to ``meeting``; ``outcome`` is called once, with None if the meeting does not take place."""
        if self._whole:
            self._waiting.setdefault(meeting, deque()).append(outcome)
            self._router.send(ROOT, MeetingArrival(meeting, terms))
        else:
            outcome(None)

    def withdraw(self, meeting: str) -> None:
        """Withdraw the last arrival, which is not answered yet: the outcome may still be that the meeting begins."""
        if meeting in self._waiting:
            self._router.send(ROOT, MeetingWithdrawal(meeting))

    def _end(self, meeting: str, begin: MeetingBegin | None) -> None:
        """Answer the oldest arrival of this rank."""
        waiting = self._waiting.get(meeting)
        if waiting is None:
            return  # this rank has seen a rank go, which the root had not
        outcome = waiting.popleft()
        if not waiting:
            del self._waiting[meeting]
        outcome(begin)

    def on_begin(self, begin: MeetingBegin) -> None:
        """Handle the begin of a meeting."""
        self._end(begin.meeting, begin)

    def on_withdrawal_ack(self, ack: WithdrawalAck) -> None:
        """Handle the acknowledgement of a withdrawal."""
        self._end(ack.meeting, None)

    # -- at the root --------------------------------------------------------------------------------------------------

    def on_arrival(self, source: int, arrival: MeetingArrival) -> None:
        """Count a rank that has come; begin the meeting with the last one."""
        meeting, ranks = arrival.meeting, self._router.topology.contacts
        if not self._whole:
            return  # the rank has seen that rank go, or is about to
        come = self._come.setdefault(meeting, {})
        if source in come:  # by two clients of the same store: one attempt goes on without the channel
            self._router.send(source, WithdrawalAck(meeting))
            return
        come[source] = arrival.terms
        if len(come) == len(ranks):
            del self._come[meeting]
            self._router.send(ALL, MeetingBegin(meeting, secrets.token_hex(8), _distinct(come)))

    def absent(self, meeting: str) -> set[int]:
        """The ranks that have not come to ``meeting``, or have withdrawn; none once a rank is gone. From any thread."""
        missing = self._router.topology.contacts.keys() - self._come.get(meeting, {}).copy().keys()
        return missing if self._whole else set()  # asked last, as a departure ends the record of those that have come

    def on_withdrawal(self, source: int, withdrawal: MeetingWithdrawal) -> None:
        """Handle the withdrawal of a rank; too late, once the meeting has begun."""
        come = self._come.get(withdrawal.meeting, {})
        if come.pop(source, None) is not None:
            if not come:
                del self._come[withdrawal.meeting]
            self._router.send(source, WithdrawalAck(withdrawal.meeting))

    # -- the end ------------------------------------------------------------------------------------------------------

    def on_departure(self) -> None:
        """Call all meetings off: a rank is gone."""
        self._come.clear()
        waiting, self._waiting = self._waiting, {}
        for outcomes in waiting.values():
            for outcome in outcomes:
                outcome(None)

    def close(self) -> None:
        """Call all meetings off: the channel ends."""
        self._closed = True
        self.on_departure()


def _distinct(come: dict[int, JsonObject]) -> dict[int, JsonObject]:
    """The terms of the lowest rank, and of the first one with other terms if there is one."""
    first, *others = sorted(come)
    differing = next((rank for rank in others if come[rank] != come[first]), first)
    return {rank: come[rank] for rank in (first, differing)}
