"""The ranks of a comm agree on the members that continue after a loss, and on the newcomers to admit.

Each participant, a rank or a newcomer, has a :class:`Participant`. The coordinating process, the lowest rank of the job
that is not lost, has a :class:`Coordinator`. Messages between two processes arrive in order, and none is lost unless
one of the two processes dies. Each death is eventually reported to all, and no false death is reported.

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
messages to send. A participant reports when it attaches to a coordinator or is polled (a process without a Participant
reports None), after each ``ask``, ``prepared`` and ``failed``, and after an accepted ``Retry``, ``Commit``,
``Rejected`` or ``Excluded``; at no other time.

This module uses no loops, sockets or stores.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias, final

from msgspec.structs import replace

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
    check_proposal,
    describe_many,
    describe_participant,
    plain,
)
from asynccomm.control.runs import ParticipantId, RankRuns, Runs, compact_ranks, distinct, expand
from asynccomm.control.transport.schema import MessageError

TRIES: Final = 3  # times that the same members may fail to connect; an undetected loss takes one
COMING: Final = 10.0  # seconds for newcomers to arrive, once all ranks that have invited them are there
DECISIONS: Final = 64  # of which equal reports share one object
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
        self._listed: RankRuns = compact_ranks(ranks)
        self._known = distinct(self._listed)
        self._patience, self._place, self._fresh = patience, place, fresh
        # participants that must report first
        self._must_report: set[ParticipantId] = {*self._known, *newcomers} if successor else set()
        self._first_report: float | None = None  # time of the first report that is not None
        self._received: dict[ParticipantId, _Received] = {}
        self._gone: dict[ParticipantId, str] = dict(gone or {})
        self._silent: set[ParticipantId] = set()
        self._retry_deadlines: dict[ParticipantId, float] = {}  # participants ordered to retry, and their deadlines
        self._round: _Attempt | None = None
        self._withdrawn: set[tuple[ParticipantId, str]] = set()  # participants ordered to retry, and the decision
        self._made: set[str] = set()  # keys of this coordinator's decisions
        self._seen: dict[str, View] = {}  # decisions in reports, each as one object: many ranks report it
        self._valid: Runs = self._listed  # the last proposal that was checked
        self._successor = successor
        self._rejected = Rejected(-1, "", False)
        self._attempt = 0  # the highest attempt sent in any order
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
        if isinstance(who, int) and who not in self._known:
            raise MessageError(f"rank {who} is not of the comm")
        if report is not None:
            report = self._checked(who, report)
        if who in self._gone:
            return
        if report is not None and report.state is ParticipantState.OUT:
            self._remove(who, "was left out")
            return
        self._silent.discard(who)
        if report is not None and report.decision is not None and (who, report.decision.key) in self._withdrawn:
            return  # sent before the participant read the order to drop the decision
        self._received[who] = _Received(report, now)
        if report is None or report.decision is None:
            self._retry_deadlines.pop(who, None)
        if report is not None and self._must_report:
            self._first_report = now if self._first_report is None else self._first_report
            if report.decision is not None:
                self._must_report.update(report.decision.members)
            if report.state is ParticipantState.REFUSED and report.attempt > self._rejected.attempt:
                self._rejected = Rejected(report.attempt, report.why, report.mistake)

    def lost(self, who: ParticipantId) -> None:
        """Message that ``who`` died."""
        self._remove(who, "was lost")

    def left(self, who: ParticipantId) -> None:
        """Message that ``who`` has closed the comm, and takes no further part."""
        self._remove(who, "has left")

    def silent(self, who: ParticipantId) -> None:
        """Message that ``who`` is alive and does not answer; the coordinator stops waiting for its report."""
        if who not in self._gone:
            self._silent.add(who)

    def advance(self, now: float) -> list[Letter]:
        """The messages to send now, in this order."""
        out: list[Letter] = []
        if self._all_reported(now):
            while self._step(now, out):
                pass
        return out

    @property
    def due(self) -> float | None:
        """When to call ``advance`` if no report arrives before; None: no time limit is running."""
        if self._unreported():
            return None if self._first_report is None else self._finite(self._first_report + self._patience)
        if self._round is None:
            proposal, wants = self._asking()
            if proposal is None:
                return None
            return self._finite(self._decision_time(wants, self._missing(proposal, wants)))
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
            held = [r.decision for _, r in self._reports() if r.state is state and r.decision is not None]
            different = {id(decision): decision for decision in held}.values()  # many ranks hold each
            for decision in sorted(different, key=lambda d: (d.by, d.attempt), reverse=True):
                if self._round is not None and (state is ParticipantState.PREPARED or decision == self._round.decision):
                    continue
                if self._can_commit(decision, by_one=state is ParticipantState.COMMITTED):
                    if self._round is not None:
                        self._retry(self._round, f"rank {decision.by} has decided before", now, out)
                    self._round = _Attempt(decision, now, committed=True)
                    return True
        return False

    def _can_commit(self, decision: View, by_one: bool) -> bool:
        """Whether all members are ready to commit. After the first commit, members without a report count as ready."""
        for who in decision.members:
            if who in self._gone or who not in self._received:
                if not by_one:
                    return False
                continue
            report = self._received[who].report
            if report is None or not _same(report.decision, decision):
                return False
            if report.state not in (ParticipantState.PREPARED, ParticipantState.COMMITTED):
                return False
        return True

    def _withdraw_stale(self, now: float, out: list[Letter]) -> None:
        """Withdraw all decisions that no member can commit any more."""
        for who, report in self._reports():
            if report.decision is None or _same(report.decision, self.decision):
                continue
            if report.state is ParticipantState.COMMITTED:
                self._exclude(who, "while it was silent, the members of its comm went on without it", out)
            else:
                why = f"rank {report.decision.by}, which decided, has not seen it through"
                self._send_retry(who, report.decision, why, now, out)

    def _reject_late(self, out: list[Letter]) -> None:
        """Reject late calls up to the rejected attempt, for the rejection is for the calls of all ranks."""
        for who, report in self._reports():
            # a newcomer's first attempt may be later than the rejection
            late = report.attempt <= self._rejected.attempt and (isinstance(who, int) or report.attempt > 0)
            if report.state is not ParticipantState.WANTS:
                continue
            if late:
                self._reject(who, out)
            elif self._known <= self._gone.keys():
                self._exclude(who, "no rank of the comm is left to go on", out)

    def _decide(self, now: float, out: list[Letter]) -> bool:
        first, wants = self._asking()
        if first is None:
            return False
        # the attempt also covers participants that were ordered to retry and have not asked again yet
        attempt = max(self._attempt, *(h.report.attempt for h in wants.values() if h.report))
        proposal, proposer = first.members, first.by
        for who in (who for who in wants if isinstance(who, int)):
            other = self._proposal(who)
            if other.listed != first.listed:
                both = ((proposer, proposal), (who, other.members))
                why = ", ".join(f"{describe_participant(one)} proposes {describe_many(them)}" for one, them in both)
                return self._reject_all(wants, Rejected(attempt, why, mistake=True), out)
        missing = self._missing(first, wants)
        if now < self._decision_time(wants, missing):
            return False
        members = tuple(who for who in proposal if who in wants and who not in self._silent)
        if not members:
            why = f"none of {describe_many(proposal)}, which {describe_participant(proposer)} proposes, can go on"
            return self._reject_all(wants, Rejected(attempt, why, mistake=False), out)
        decision = View(self._fresh(), self._by, attempt, members, plain(self._place(members)))
        self._made.add(decision.key)
        self._seen[decision.key] = decision
        self._round = _Attempt(decision, now)
        proposed = frozenset(proposal)
        for one in proposal:
            if one not in self._round.members and one not in self._gone:
                self._round.reasons[one] = "it did not answer" if one in self._silent else "it did not come in time"
        for one in wants:
            if one not in proposed:
                self._round.reasons[one] = f"{describe_participant(proposer)} does not propose it"
        out += [(who, Prepare(decision)) for who in members]
        return True

    def _prepare(self, now: float, out: list[Letter]) -> bool:
        assert self._round is not None
        decision = self._round.decision
        waiting: list[ParticipantId] = []
        why = ""
        for who in decision.members:
            report = self._received[who].report if who in self._received else None
            if who in self._gone:
                why = f"{describe_participant(who)} {self._gone[who]}"
            elif report is None or (report.decision is None and report.attempt > decision.attempt):
                why = f"{describe_participant(who)} went back"
            elif report.state is ParticipantState.FAILED:
                why = report.why
            elif report.state is not ParticipantState.PREPARED:  # it still connects, or has not received the decision
                waiting.append(who)
                if who in self._silent:
                    why = f"{describe_participant(who)} does not answer"
        if waiting and now >= self._round.since + self._patience:
            why = f"{describe_participant(waiting[0])} was not connected after {self._patience:g} s"
        if why:
            self._retry(self._round, why, now, out)
            return True
        if not waiting:
            self._round.committed, self._round.since = True, now
        return not waiting

    def _settle(self, now: float, out: list[Letter]) -> None:
        """Send Commit to the members, Excluded to the other participants, and Finalized in the end."""
        assert self._round is not None
        decision = self._round.decision
        for who, report in self._reports():
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
        pending = set(decision.members) - taken - self._gone.keys() - self._silent
        if not pending or now >= self._round.since + self._patience:
            fresh = taken - self._round.over
            out += [(who, Finalized(decision.key)) for who in decision.members if who in fresh]
            self._round.over |= taken

    # queries

    def _unreported(self) -> set[ParticipantId]:
        return self._must_report - self._received.keys() - self._gone.keys() - self._silent

    def _all_reported(self, now: float) -> bool:
        """Whether all reports are in, or the wait for them is over."""
        if self._unreported() and (self._first_report is None or now < self._first_report + self._patience):
            return False
        self._must_report = set()
        return True

    def _reports(self) -> Iterator[tuple[ParticipantId, StatusReport]]:
        """All reports that are not None; the reports may change during the iteration."""
        for who, received in list(self._received.items()):
            if received.report is not None:
                yield who, received.report

    def _asking(self) -> tuple[_InProposal | None, dict[ParticipantId, _Received]]:
        """The proposal of the first asking rank, if any, and all asking participants."""
        wants = {who: h for who, h in self._received.items() if h.report and h.report.state is ParticipantState.WANTS}
        first = next((who for who in wants if isinstance(who, int)), None)
        return (None if first is None else self._proposal(first)), wants

    def _proposal(self, who: ParticipantId) -> _InProposal:
        report = self._received[who].report
        assert report is not None
        return _InProposal(self._listed if report.proposal is None else report.proposal, who)

    def _missing(self, proposed: _InProposal, wants: Mapping[ParticipantId, _Received]) -> list[ParticipantId]:
        """The proposed participants that the decision waits for."""
        return [who for who in proposed.members if not (who in wants or who in self._gone or who in self._silent)]

    def _decision_time(self, wants: Mapping[ParticipantId, _Received], missing: list[ParticipantId]) -> float:
        """When to decide without the missing participants. A participant ordered to retry has time to ask again."""
        if not missing:
            return -math.inf
        asked = [(h.since, h.report.wait) for who, h in wants.items() if h.report and isinstance(who, int)]
        until = min(math.inf if wait is None else since + wait for since, wait in asked)
        if all(isinstance(who, str) for who in missing):  # a living newcomer has its invitation by now
            until = min(until, max(since for since, _ in asked) + COMING)
        return max(until, *(self._retry_deadlines.get(who, -math.inf) for who in missing))

    def _checked(self, who: ParticipantId, report: StatusReport) -> StatusReport:
        """``report``, with the decision in progress as the same object: each of many ranks reports it several times.

        Raises: MessageError: the participant cannot have made this report.
        """
        attempt, decision = self._round, report.decision
        if report.proposal is not None and report.proposal != self._valid:
            check_proposal(expand(report.proposal), self._known)
            self._valid = report.proposal
        if decision is None:
            return report
        if attempt is None or who not in attempt.members or not _same(decision, attempt.decision):
            self._check(who, decision)
        first = self._seen.setdefault(decision.key, decision)
        if len(self._seen) > DECISIONS:
            del self._seen[next(iter(self._seen))]
        return replace(report, decision=first) if first is not decision and first == decision else report

    def _check(self, who: ParticipantId, decision: View) -> None:
        """Raises: MessageError: the participant cannot hold this decision."""
        if self._seen.get(decision.key) != decision:
            check_proposal(decision.members, self._known)
        if who not in distinct(decision.listed):
            raise MessageError(f"{describe_participant(who)} holds the decision {decision.key!r}, which is not for it")
        if decision.key not in self._made if decision.by == self._by else decision.by > self._by or not self._successor:
            raise MessageError(f"no coordinator has made the decision {decision.key!r}")

    def _committed_members(self) -> set[ParticipantId]:
        assert self._round is not None
        decision = self._round.decision
        committed = ParticipantState.COMMITTED
        return {who for who, r in self._reports() if r.state is committed and _same(r.decision, decision)}

    def _finite(self, when: float) -> float | None:
        return when if math.isfinite(when) else None

    # updates

    def _remove(self, who: ParticipantId, what: str) -> None:
        self._gone.setdefault(who, what)
        self._received.pop(who, None)
        self._silent.discard(who)
        self._retry_deadlines.pop(who, None)

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
            report = self._received[who].report if who in self._received else None
            back = report is not None and report.state is ParticipantState.WANTS and report.attempt > decision.attempt
            if who not in self._gone and not back:
                self._send_retry(who, decision, why, now, out)
        if failed:
            for who in self._asking()[1]:
                self._reject(who, out)

    def _send_retry(self, who: ParticipantId, decision: View, why: str, now: float, out: list[Letter]) -> None:
        self._forget(who, now)
        self._withdrawn.add((who, decision.key))
        self._attempt = max(self._attempt, decision.attempt + 1)
        self._retry_deadlines.setdefault(who, now + self._patience)
        out.append((who, Retry(decision.key, decision.attempt + 1, why)))

    def _reject_all(self, wants: Iterable[ParticipantId], refused: Rejected, out: list[Letter]) -> bool:
        self._rejected = refused
        for who in wants:
            self._reject(who, out)
        return True

    def _reject(self, who: ParticipantId, out: list[Letter]) -> None:
        self._forget(who, self._received[who].since)
        out.append((who, self._rejected))

    def _exclude(self, who: ParticipantId, why: str, out: list[Letter]) -> None:
        self._forget(who, self._received[who].since)
        out.append((who, Excluded(why)))

    def _forget(self, who: ParticipantId, now: float) -> None:
        """Drop the report of ``who``, which holds no decision after reading the order sent now."""
        self._received[who] = _Received(None, now)


def _same(one: View | None, other: View | None) -> bool:
    return one is other or (one is not None and other is not None and one.key == other.key and one == other)


class _Received(NamedTuple):
    report: StatusReport | None
    since: float


class _InProposal(NamedTuple):
    listed: Runs
    by: ParticipantId

    @property
    def members(self) -> tuple[ParticipantId, ...]:
        return expand(self.listed)


@final
class _Attempt:
    """A decision in progress."""

    __slots__ = ("committed", "decision", "members", "over", "reasons", "since", "told")

    def __init__(self, decision: View, since: float, committed: bool = False) -> None:
        self.decision = decision
        self.members = distinct(decision.listed)
        self.since = since  # time of the decision, or of its commit
        self.committed = committed
        self.told: set[ParticipantId] = set()  # members that were sent Commit
        self.over: set[ParticipantId] = set()  # members that were sent Finalized
        self.reasons: dict[ParticipantId, str] = {}  # why a participant is no member
