"""The ranks of a comm agree on the members that continue after a loss, and on the newcomers to admit.

Each participant, a rank or a newcomer, has a :class:`Participant`. The coordinating process, the lowest rank of the job
that is not lost, has a :class:`Coordinator`. Messages between two processes arrive in order. None is lost unless one of
the two processes dies, or a process that relays them: then the participant connects anew, the coordinator is told
(``reattached``), and the participant reports. Each death is eventually reported to all, and no false death is reported.

1. A participant that asks *wants*, with a proposal. The coordinator *decides* (``Prepare``) once all proposed
   participants want or are gone (lost, or have left the comm), and leaves out participants that are late or known to be
   silent. Newcomers that are missing ``COMING`` seconds after the ranks count as dead. If proposals differ, all calls
   are rejected.
2. The members connect, and report *prepared*. Once all members are prepared, the coordinator sends ``Commit``; if a
   member cannot connect, is gone or takes too long, the coordinator sends ``Retry``, and all members want again.
   Members that have failed ``TRIES`` times are rejected.
3. A member that receives ``Commit`` has taken the decision, and reports *committed*. Once all members have, the
   coordinator sends ``Finalized``.
4. A participant that wants and is no member of the committed decision is *excluded*, at once or when it asks, for good.

A rejection is for one call on all ranks: a rank that makes this call late is rejected, too; then all may call again.

When the coordinator dies, all participants report their decisions to the next coordinator, which waits for all reports
before it acts. A decision that any participant has committed stays committed. A decision that all members have prepared
is committed now. For any other decision, no living participant can have received ``Commit``, so it is tried again.

Guarantees, as long as all living processes run:

- at most one decision is committed; afterwards no participant receives ``Retry`` for any decision;
- no participant receives ``Commit`` before all members were prepared;
- once losses stop, all asking participants receive ``Commit``, ``Rejected`` or ``Excluded``, provided that all
  participants ask, or that one rank's wait is finite.

A process that is alive and does not answer, for example because it was stopped, may hold a commit that no other process
has seen. A new coordinator waits for the process's report for ``patience`` seconds, or until the process is known to be
silent, and then continues as if the process were lost. This rule is a choice: any safer rule may wait forever. When the
process reports after all:

- if no decision was made without the process, its own decision counts, and stays committed if it was;
- if a living member has dropped its decision, or another decision is committed, the process is excluded, and its comm
  is void. The other members have dropped their decisions before, so no comm in use loses members without a notice. Only
  if *all* members of a commit were silent at once may the members use their comm, between waking up and reading their
  next message.

Of two commits made in this way, the later coordinator's commit counts, because that coordinator had the reports of all
participants that answered.

``Finalized`` waits for silent members for at most ``patience`` seconds, too. This order makes sure that no leaving rank
takes a commit along that others need. Later coordinators still poll the ranks on the channel, so that a late rank is
excluded and does not continue alone: a Participant is kept, and reports, as long as its process is there.

This module uses neither clock nor timer: after each call, and when ``due``, :meth:`Coordinator.advance` returns the
messages to send. ``reports`` checks and keeps the reports. A participant reports when it attaches to a coordinator or
is polled (a process without a Participant reports None), after each ``ask``, ``prepared`` and ``failed``, and after an
accepted ``Retry``, ``Commit``, ``Rejected`` or ``Excluded``; at no other time.

This module uses no loops, sockets or stores.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias, final

from asynccomm.control.membership.messages import (
    Commit,
    CoordinatorOrder,
    Excluded,
    Finalized,
    ParticipantState,
    Prepare,
    Rejected,
    Retry,
    StatusReport,
    View,
    describe_many,
    describe_participant,
    plain,
)
from asynccomm.control.membership.reports import Reports
from asynccomm.control.runs import ParticipantId, distinct

TRIES: Final = 3  # times that the same members may fail to connect; an undetected loss takes one
PATIENCE: Final = 60.0  # seconds; a rank that takes longer to connect or to report counts as silent

Letter: TypeAlias = tuple[ParticipantId, CoordinatorOrder]  # the recipient, and the order


@final
class Coordinator:
    """The coordinator of one comm's agreement.

    Args:
        by: the rank of this process in the job; it may be outside the comm.
        ranks: of the comm, in order.
        patience: seconds for a participant's own steps: to connect, to report, to take a commit.
        successor: whether this comm had an earlier coordinator; then all participants must report first.
        gone: ranks known to be lost or to have left, with the reason.
        newcomers: the newcomers known to be on the channel.
        place: makes a decision's place from its members.
        fresh: makes unique keys.
    """

    def __init__(
        self,
        by: int,
        ranks: Iterable[int],
        *,
        patience: float = PATIENCE,
        successor: bool = False,
        gone: Mapping[ParticipantId, str] | None = None,
        newcomers: Iterable[str] = (),
        place: Callable[[tuple[ParticipantId, ...]], object] = lambda members: None,
        fresh: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._by = by
        self._patience, self._place, self._fresh = patience, place, fresh
        self._reports = Reports(by, ranks, patience, successor, gone or {}, newcomers)
        self._round: _Attempt | None = None
        self._rejected = Rejected(-1, "", False)
        self._attempt = 0  # the highest attempt sent in any order
        self._retried: set[str] = set()  # keys of decisions that participants were ordered to drop
        # the last members that could not connect, and how often
        self._tries: tuple[tuple[ParticipantId, ...], int] = (), 0

    @property
    def decision(self) -> View | None:
        """The decision in progress or committed."""
        return None if self._round is None else self._round.decision

    @property
    def committed(self) -> bool:
        return self._round is not None and self._round.committed

    def on_report(self, who: ParticipantId, report: StatusReport | None, now: float) -> None:
        """Take a report; None: the participant is on the channel and has nothing to report.

        Raises: MessageError: no participant sends this report. The report had no effect.
        """
        reports, held = self._reports, None if report is None else report.decision
        current = held is not None and self._round is not None and self._round.is_for(who, held)
        taken = reports.add(who, report, now, current=current)
        if taken is None or taken.state is not ParticipantState.REFUSED or not reports.gathering:
            return
        if taken.attempt > self._rejected.attempt:
            self._rejected = Rejected(taken.attempt, taken.why, taken.mistake)

    def lost(self, who: ParticipantId) -> None:
        """Message that ``who`` died."""
        self._reports.remove(who, "was lost")

    def left(self, who: ParticipantId) -> None:
        """Message that ``who`` has closed the comm, and takes no further part."""
        self._reports.remove(who, "has left")

    def silent(self, who: ParticipantId) -> None:
        """Message that ``who`` is alive and does not answer; the coordinator stops waiting for its report."""
        if who not in self._reports.gone:
            self._reports.silent.add(who)

    def reattached(self, who: ParticipantId) -> bool:
        """Message that ``who`` may have a new connection: orders that were sent before may be lost, or may not be.

        Returns: whether ``who`` is of the comm, and must report.
        """
        self._reports.reattached(who)
        if self._round is not None:
            for sent in (self._round.asked, self._round.told, self._round.over):
                sent.discard(who)
        return who in self._reports.ranks

    def advance(self, now: float) -> list[Letter]:
        """The messages to send now, in this order."""
        out: list[Letter] = []
        if self._reports.complete(now):
            while self._step(now, out):
                pass
        return out

    @property
    def due(self) -> float | None:
        """When to call ``advance`` if no report arrives before; None: no time limit is running."""
        reports = self._reports
        if (due := reports.due) is not None:
            return self._finite(due)
        if self._round is None:
            proposal, wants = reports.asking()
            if proposal is None:
                return None
            return self._finite(reports.decision_time(wants, reports.missing(proposal, wants)))
        if self._round.committed and not self._committed_members() - self._round.over:
            return None
        return self._finite(self._round.since + self._patience)

    # each step makes at most one transition, and returns whether another may follow

    def _step(self, now: float, out: list[Letter]) -> bool:
        if self._round is None or not self._round.committed:
            if self._adopt(now, out):
                return True
            self._withdraw_stale(now, out)
        if self._round is None:
            self._reject_late(out)
            return self._decide(now, out)
        if not self._round.committed:
            return self._prepare(now, out)
        self._settle(now, out)
        return False

    def _adopt(self, now: float, out: list[Letter]) -> bool:
        """Continue a decision of an earlier coordinator."""
        for state in (ParticipantState.COMMITTED, ParticipantState.PREPARED):
            held = [r.decision for _, r in self._reports if r.state is state and r.decision is not None]
            different = {id(decision): decision for decision in held}.values()  # many ranks hold each
            for decision in sorted(different, key=lambda d: (d.by, d.attempt), reverse=True):
                if self._round is not None and (state is ParticipantState.PREPARED or decision == self._round.decision):
                    continue
                if state is ParticipantState.PREPARED and decision.key in self._retried:
                    continue  # reported before the order to retry was read, or the order is lost
                if self._can_commit(decision, by_one=state is ParticipantState.COMMITTED):
                    if self._round is not None:
                        self._retry(self._round, f"rank {decision.by} has decided before", now, out)
                    self._round = _Attempt(decision, now, committed=True)
                    return True
        return False

    def _can_commit(self, decision: View, by_one: bool) -> bool:
        """Whether all members are ready to commit. After the first commit, members without a report count as ready."""
        for who in decision.members:
            if who in self._reports.gone or who not in self._reports:
                if not by_one:
                    return False
                continue
            report = self._reports.of(who)
            if report is None or not _same(report.decision, decision):
                return False
            if report.state not in (ParticipantState.PREPARED, ParticipantState.COMMITTED):
                return False
        return True

    def _withdraw_stale(self, now: float, out: list[Letter]) -> None:
        """Withdraw all decisions that no member can commit any more."""
        for who, report in self._reports:
            if report.decision is None or _same(report.decision, self.decision):
                continue
            if report.state is ParticipantState.COMMITTED:
                self._exclude(who, "while it was silent, the members of its comm went on without it", out)
            else:
                why = f"rank {report.decision.by}, which decided, has not seen it through"
                self._send_retry(who, report.decision, why, now, out)

    def _reject_late(self, out: list[Letter]) -> None:
        """Reject late calls up to the rejected attempt, for the rejection is for the calls of all ranks."""
        for who, report in self._reports:
            # a newcomer's first attempt may be later than the rejection
            late = report.attempt <= self._rejected.attempt and (isinstance(who, int) or report.attempt > 0)
            if report.state is not ParticipantState.WANTS:
                continue
            if late:
                self._reject(who, out)
            elif self._reports.ranks <= self._reports.gone.keys():
                self._exclude(who, "no rank of the comm is left to go on", out)

    def _decide(self, now: float, out: list[Letter]) -> bool:
        reports = self._reports
        first, wants = reports.asking()
        if first is None:
            return False
        # the attempt also covers participants that were ordered to retry and have not asked again yet
        attempt = max(self._attempt, *(h.report.attempt for h in wants.values() if h.report))
        proposal, proposer = first.members, first.by
        for who in (who for who in wants if isinstance(who, int)):
            other = reports.proposal(who)
            if other.listed != first.listed:
                both = ((proposer, proposal), (who, other.members))
                why = ", ".join(f"{describe_participant(one)} proposes {describe_many(them)}" for one, them in both)
                return self._reject_all(wants, Rejected(attempt, why, mistake=True), out)
        missing = reports.missing(first, wants)
        if now < reports.decision_time(wants, missing):
            return False
        members = tuple(who for who in proposal if who in wants and who not in reports.silent)
        if not members:
            why = f"none of {describe_many(proposal)}, which {describe_participant(proposer)} proposes, can go on"
            return self._reject_all(wants, Rejected(attempt, why, mistake=False), out)
        decision = View(self._fresh(), self._by, attempt, members, plain(self._place(members)))
        reports.add_made(decision)
        self._round = _Attempt(decision, now)
        proposed = frozenset(proposal)
        for one in proposal:
            if one not in self._round.members and one not in reports.gone:
                self._round.reasons[one] = "it did not answer" if one in reports.silent else "it did not come in time"
        for one in wants:
            if one not in proposed:
                self._round.reasons[one] = f"{describe_participant(proposer)} does not propose it"
        self._ask_to_prepare(members, out)
        return True

    def _prepare(self, now: float, out: list[Letter]) -> bool:
        assert self._round is not None
        reports, decision = self._reports, self._round.decision
        waiting: list[ParticipantId] = []
        unread: list[ParticipantId] = []  # members that wanted when they last reported
        why = ""
        for who in decision.members:
            report = reports.of(who)
            if who in reports.gone:
                why = f"{describe_participant(who)} {reports.gone[who]}"
            elif report is None or (report.decision is None and report.attempt > decision.attempt):
                why = f"{describe_participant(who)} went back"
            elif report.state is ParticipantState.FAILED:
                why = report.why
            elif report.state is not ParticipantState.PREPARED:  # it still connects, or has not received the decision
                waiting.append(who)
                if report.state is ParticipantState.WANTS:
                    unread.append(who)
                if who in reports.silent:
                    why = f"{describe_participant(who)} does not answer"
        if waiting and now >= self._round.since + self._patience:
            why = f"{describe_participant(waiting[0])} was not connected after {self._patience:g} s"
        if why:
            self._retry(self._round, why, now, out)
            return True
        if not waiting:
            self._round.committed, self._round.since = True, now
        self._ask_to_prepare(unread, out)
        return not waiting

    def _ask_to_prepare(self, members: Iterable[ParticipantId], out: list[Letter]) -> None:
        assert self._round is not None
        for who in members:
            if who not in self._round.asked:
                self._round.asked.add(who)
                out.append((who, Prepare(self._round.decision)))

    def _settle(self, now: float, out: list[Letter]) -> None:
        """Send Commit to the members, Excluded to the other participants, and Finalized in the end."""
        assert self._round is not None
        decision = self._round.decision
        for who, report in self._reports:
            if report.state is ParticipantState.REFUSED:
                continue
            if _same(report.decision, decision) and report.state is ParticipantState.PREPARED:
                if who not in self._round.told:
                    self._round.told.add(who)
                    out.append((who, Commit(decision.key)))
            elif not _same(report.decision, decision) or report.state is not ParticipantState.COMMITTED:
                why = f": {self._round.reasons[who]}" if who in self._round.reasons else ""
                self._exclude(who, f"the comm goes on as {describe_many(decision.members)}{why}", out)
        taken = self._committed_members()
        pending = set(decision.members) - taken - self._reports.gone.keys() - self._reports.silent
        if not pending or now >= self._round.since + self._patience:
            fresh = taken - self._round.over
            out += [(who, Finalized(decision.key)) for who in decision.members if who in fresh]
            self._round.over |= taken

    def _committed_members(self) -> set[ParticipantId]:
        assert self._round is not None
        decision = self._round.decision
        committed = ParticipantState.COMMITTED
        return {who for who, r in self._reports if r.state is committed and _same(r.decision, decision)}

    def _finite(self, when: float) -> float | None:
        return when if math.isfinite(when) else None

    def _retry(self, round_: _Attempt, why: str, now: float, out: list[Letter]) -> None:
        """Order all members to retry; after too many failures, reject their next calls."""
        decision = round_.decision
        members, tries = self._tries
        self._tries = decision.members, tries + 1 if members == decision.members else 1
        failed = self._tries[1] >= TRIES
        if failed:
            self._rejected = Rejected(
                decision.attempt + 1, f"{describe_many(decision.members)} could not connect: {why}", False
            )
            self._tries = (), 0
        self._round = None
        for who in decision.members:
            report = self._reports.of(who)
            back = report is not None and report.state is ParticipantState.WANTS and report.attempt > decision.attempt
            if who not in self._reports.gone and not back:
                self._send_retry(who, decision, why, now, out)
        if failed:
            for who in self._reports.asking()[1]:
                self._reject(who, out)

    def _send_retry(self, who: ParticipantId, decision: View, why: str, now: float, out: list[Letter]) -> None:
        self._reports.withdraw(who, decision, now)
        self._retried.add(decision.key)
        self._attempt = max(self._attempt, decision.attempt + 1)
        out.append((who, Retry(decision.key, decision.attempt + 1, why)))

    def _reject_all(self, wants: Iterable[ParticipantId], refused: Rejected, out: list[Letter]) -> bool:
        self._rejected = refused
        for who in wants:
            self._reject(who, out)
        return True

    def _reject(self, who: ParticipantId, out: list[Letter]) -> None:
        self._reports.forget(who)
        out.append((who, self._rejected))

    def _exclude(self, who: ParticipantId, why: str, out: list[Letter]) -> None:
        self._reports.forget(who)
        out.append((who, Excluded(why)))


def _same(one: View | None, other: View | None) -> bool:
    return one is other or (one is not None and other is not None and one.key == other.key and one == other)


@final
class _Attempt:
    """A decision in progress."""

    __slots__ = ("asked", "committed", "decision", "members", "over", "reasons", "since", "told")

    def __init__(self, decision: View, since: float, committed: bool = False) -> None:
        self.decision = decision
        self.members = distinct(decision.listed)
        self.since = since  # time of the decision, or of its commit
        self.committed = committed
        # members that were sent each order over the connection that they have now
        self.asked: set[ParticipantId] = set()  # Prepare
        self.told: set[ParticipantId] = set()  # Commit
        self.over: set[ParticipantId] = set()  # Finalized
        self.reasons: dict[ParticipantId, str] = {}  # why a participant is no member

    def is_for(self, who: ParticipantId, decision: View) -> bool:
        """Whether ``who`` is a member, and ``decision`` this one."""
        return who in self.members and _same(decision, self.decision)
