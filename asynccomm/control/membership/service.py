"""Runs the membership agreement (``coordinator``) over the control channel, for all comms of a job.

Each rank that asks has a participant here, and the root has a coordinator for each comm that a rank asks for. A
committed rank stays on the channel until no member needs it there: see :attr:`MembershipService.must_stay`. All methods
run on the control thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, final

from asynccomm.control.membership.coordinator import Coordinator
from asynccomm.control.membership.messages import (
    Commit,
    CoordinatorOrder,
    Excluded,
    Finalized,
    Rejected,
    Retry,
    describe_many,
    describe_participant,
)
from asynccomm.control.membership.participant import Participant
from asynccomm.control.messages import ROOT, OrderMessage, ParticipantReport, ReportRequest
from asynccomm.control.router import Router
from asynccomm.control.runs import ParticipantId, RankRuns, compact_ranks, distinct_ranks, expand_ranks
from asynccomm.control.timing import HEARTBEAT_SECONDS, PATIENCE_SECONDS, SILENT_SECONDS
from asynccomm.control.transport.schema import MessageError

ORDERS: Final = 1024  # comms that each table keeps
# a rank gives up one that relays to it up to a heartbeat late; its own last heartbeat may be another one older
RELAYED_SECONDS: Final = 2 * (SILENT_SECONDS + HEARTBEAT_SECONDS)
PAUSE: Final = 4  # a step of a coordinator is followed by a pause of this many times its CPU time
LONG_STEP: Final = 0.001  # seconds of CPU time; shorter steps need no pause

_log = logging.getLogger("asynccomm")


class Joiners(Protocol):
    """The newcomers that are connected to the root."""

    def send(self, name: str, message: OrderMessage) -> None:
        """Send ``message`` to the newcomer ``name``, if it is connected."""


@final
class _Participation:
    """This rank's part in one comm's agreement."""

    __slots__ = ("on_order", "participant", "ranks")

    def __init__(
        self, participant: Participant, ranks: Sequence[int], on_order: Callable[[CoordinatorOrder], object]
    ) -> None:
        self.participant = participant
        self.ranks = compact_ranks(ranks)
        self.on_order = on_order


@final
class MembershipService:
    """The agreements of one rank of a job.

    Args:
        router: sends the messages, and records the ranks that are gone.
        loop: of the control thread.
        joiners: the newcomers that are connected to the root.
    """

    def __init__(self, router: Router, loop: asyncio.AbstractEventLoop, joiners: Joiners) -> None:
        self._router = router
        self._loop = loop
        self._joiners = joiners
        self._first_root = router.topology.root(())
        self._participations: dict[str, _Participation] = {}
        self._coordinators: dict[str, Coordinator] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._out: dict[str, str] = {}  # comms that exclude this rank, and why
        self._left: dict[str, set[int]] = {}  # comms without a coordinator, and the ranks that left them
        self._changed: asyncio.Future[None] | None = None
        self._advancing: set[str] = set()  # comms with a step of the coordinator in this iteration
        self._spent: dict[str, float] = {}  # CPU seconds of the last step of each coordinator
        self._last_tick = math.inf  # time of the last tick()
        self._closed = False

    # -- this rank asks -----------------------------------------------------------------------------------------------

    def ask(
        self,
        key: str,
        ranks: Sequence[int],
        proposal: Sequence[ParticipantId] | None,
        wait: float,
        hear: Callable[[CoordinatorOrder], object],
    ) -> None:
        """Ask to continue the comm ``key`` with new members; ``hear`` is called with the coordinator's orders.

        Raises: ValueError: the proposal or the wait is invalid.
        """
        out = self._router.fenced or self._out.get(key)
        if out:  # an excluded rank must not continue alone, as if the others were lost
            hear(Excluded(out))
            return
        participation = self._participations.get(key)
        if participation is None:
            participation = _Participation(Participant(self._router.rank, ranks), ranks, hear)
        participation.participant.ask(proposal, wait)
        participation.on_order = hear
        self._participations[key] = participation
        self._report(key)

    def prepared(self, key: str, decision: str) -> None:
        """Message and report that the members of a decision are connected."""
        participation = self._participations.get(key)
        if participation is not None:
            participation.participant.prepared(decision)
            self._report(key)

    def failed(self, key: str, decision: str, why: str) -> None:
        """Message and report that the members of a decision could not connect."""
        participation = self._participations.get(key)
        if participation is not None:
            participation.participant.failed(decision, why)
            self._report(key)

    def withdraw(self, key: str) -> None:
        """Leave the agreement for good: the others may have gone on without this rank."""
        self._participations.pop(key, None)
        self._mark_excluded(key, "it has withdrawn")
        self._router.send(ROOT, ParticipantReport(key, (), None, left=True))
        self._notify()

    def on_followed(self, key: str, members: Collection[int]) -> None:
        """Message that ``members`` have continued the comm ``key`` as another comm."""
        if self._router.rank not in members and key not in self._out:
            self._exclude(key, f"ranks {describe_many(sorted(members))} have gone on")

    def _exclude(self, key: str, why: str) -> None:
        self._mark_excluded(key, why)
        participation = self._participations.get(key)
        if participation is not None and participation.participant.asking:
            order = participation.participant.on_order(Excluded(why))
            if order is not None:
                participation.on_order(order)
        self._notify()

    def _mark_excluded(self, key: str, why: str) -> None:
        self._out.setdefault(key, why)
        _limit(self._out)

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    @property
    def asking(self) -> bool:
        """Whether this rank waits for an agreement."""
        return any(each.participant.asking for each in self._participations.values())

    @property
    def must_stay(self) -> bool:
        """Whether this rank holds a commit that other members may not have received."""
        return not self._router.fenced and any(not each.participant.can_leave for each in self._participations.values())

    async def wait_settled(self) -> None:
        """Wait until :attr:`must_stay` is False."""
        while self.must_stay:
            self._changed = self._changed or self._loop.create_future()
            await asyncio.shield(self._changed)

    def _report(self, key: str, *, even_nothing: bool = False) -> None:
        participation = self._participations.get(key)
        report = None if participation is None else participation.participant.report()
        if report is not None or even_nothing:
            ranks = () if participation is None else participation.ranks
            self._router.send(ROOT, ParticipantReport(key, ranks, report))

    def on_order(self, source: int, message: OrderMessage) -> None:
        """Pass an order of the coordinator to this rank's participant."""
        key = message.comm
        participation = self._participations.get(key)
        if participation is None:
            return
        try:
            order = participation.participant.on_order(message.order)
        except MessageError as exc:
            _log.warning("rank %d sends an invalid order: %s", source, exc)
            return
        if order is not None:  # before the report, because the report may bring the next order at once
            participation.on_order(order)
        if isinstance(order, (Retry, Commit, Rejected, Excluded)):
            self._report(key)
        if isinstance(order, (Finalized, Excluded)):
            self._notify()

    def on_report_request(self, key: str, known: Callable[[str], bool]) -> None:
        """Report this rank's state to a new coordinator."""
        if key in self._participations or (key not in self._out and known(key)):
            self._report(key, even_nothing=True)
        else:
            self._router.send(ROOT, ParticipantReport(key, (), None, left=True))

    # -- this rank coordinates ----------------------------------------------------------------------------------------

    def on_report(self, who: ParticipantId, message: ParticipantReport) -> None:
        """Pass the report of ``who`` to the coordinator of its comm, which the first report creates."""
        key, left = message.comm, message.left
        coordinator = self._coordinators.get(key)
        if coordinator is None:
            if left and isinstance(who, int):
                self._note_leaving(key, who)
            if message.report is None or not message.ranks:
                return  # no rank asks
            coordinator = self._coordinate(key, message.ranks)
        try:
            if left:
                coordinator.left(who)
            else:
                coordinator.on_report(who, message.report, time.monotonic())
        except MessageError as exc:
            _log.warning("%s sends an invalid report: %s", describe_participant(who), exc)
            return
        self._advance_soon(key)

    def _coordinate(self, key: str, listed: RankRuns) -> Coordinator:
        router, ranks, members = self._router, expand_ranks(listed), distinct_ranks(listed)
        successor = router.rank != self._first_root
        gone: Mapping[ParticipantId, str] = {
            r: "was lost" if how else "has left" for r, how in router.gone.items() if r in members
        }
        coordinator = Coordinator(router.rank, ranks, patience=PATIENCE_SECONDS, successor=successor, gone=gone)
        for rank in self._left.pop(key, ()):
            coordinator.left(rank)
        self._coordinators[key] = coordinator
        _limit(self._coordinators)
        if successor:
            self._poll(key, ranks)
        return coordinator

    def _poll(self, key: str, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in self._router.gone:
                self._router.send(rank, ReportRequest(key))

    def _advance_soon(self, key: str) -> None:
        """Send orders, at most once in an iteration of the loop, and after a pause if the last step was long.

        A step of the coordinator costs time for each rank, and each of many ranks reports several times.
        """
        if key not in self._advancing:
            self._advancing.add(key)
            spent = self._spent.get(key, 0.0)
            if spent < LONG_STEP:
                self._loop.call_soon(self._advance, key)
            else:
                self._loop.call_later(PAUSE * spent, self._advance, key)

    def _advance(self, key: str) -> None:
        """Send the orders of the coordinator, and run again when the coordinator is due."""
        self._advancing.discard(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        coordinator = self._coordinators.get(key)
        if coordinator is None or self._closed:
            return  # dropped by _limit, or closed
        begin = time.thread_time()
        orders = coordinator.advance(time.monotonic())
        self._spent[key] = time.thread_time() - begin
        _limit(self._spent)
        for who, order in orders:
            if isinstance(who, int):
                self._router.send(who, OrderMessage(key, order))
            else:
                self._joiners.send(who, OrderMessage(key, order))
        due = coordinator.due
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            self._timers[key] = self._loop.call_later(delay, partial(self._advance, key))

    # -- changes of other ranks ---------------------------------------------------------------------------------------

    def on_departure(self, who: ParticipantId, how: str) -> None:
        """Message that ``who`` is gone; ``how`` is empty after an orderly leave."""
        if self._router.fenced:  # this rank itself was declared lost
            for key in list(self._participations):
                self._exclude(key, self._router.fenced)
            return
        for key, coordinator in list(self._coordinators.items()):
            (coordinator.lost if how else coordinator.left)(who)
            self._advance_soon(key)  # not now: another rank may become the root first

    def on_left(self, key: str, rank: int) -> None:
        """Message that ``rank`` has closed one comm."""
        coordinator = self._coordinators.get(key)
        if coordinator is None:
            self._note_leaving(key, rank)
        else:
            coordinator.left(rank)
            self._advance_soon(key)

    def _note_leaving(self, key: str, rank: int) -> None:
        self._left.setdefault(key, set()).add(rank)
        _limit(self._left)

    def on_attached(self) -> None:
        """Report all states: this rank has connected to the root, which may be new."""
        for key in list(self._participations):
            self._report(key)

    def on_presence(self, rank: int) -> None:
        """At the root: poll ``rank``, which may have connected anew because a rank that relayed to it is lost."""
        if rank == self._router.rank:
            return
        for key, coordinator in self._coordinators.items():
            if coordinator.reattached(rank):
                self._poll(key, [rank])

    def tick(self) -> None:
        """Stop waiting for silent ranks. The channel calls this with each heartbeat."""
        now, before = time.monotonic(), self._last_tick
        self._last_tick = now
        if now - before > SILENT_SECONDS / 2:  # this rank was stopped, and has unread messages
            self._router.reset_heartbeats()
            return
        silent = self._silent() if self._coordinators else []
        for key, coordinator in list(self._coordinators.items()):
            for rank in silent:
                coordinator.silent(rank)
            self._advance(key)
        if self.asking:
            self._router.expire_silent(SILENT_SECONDS)

    def _silent(self) -> list[int]:
        """The ranks that count as stopped. A rank behind one that is stopped has time to connect anew."""
        router, found = self._router, list[int]()
        for rank in router.topology.contacts:
            silence = router.silence(rank)
            if silence is None or silence <= SILENT_SECONDS:
                continue
            relays = router.topology.between(router.rank, rank, router.gone)
            relayed = max((router.silence(relay) or 0.0 for relay in relays), default=0.0)
            if silence - relayed > SILENT_SECONDS or silence > RELAYED_SECONDS:
                found.append(rank)
        return found

    def close(self) -> None:
        """Stop coordinating."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()


def _limit(comms: dict[str, Any]) -> None:
    """Drop the oldest comms: a long job may have any number of them."""
    while len(comms) > ORDERS:
        del comms[next(iter(comms))]
