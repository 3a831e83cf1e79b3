"""The reports of the participants of a comm, as its coordinator has received them; and which participants are gone.

A report is refused if no participant can have sent it. A report that was sent before its participant read the order to
drop its decision is ignored, and so are the reports of participants that are gone.

This module uses neither clock nor timer, as the coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, final

from msgspec.structs import replace

from asynccomm.control.membership.messages import (
    ParticipantState,
    StatusReport,
    View,
    check_proposal,
    describe_participant,
)
from asynccomm.control.runs import ParticipantId, RankRuns, Runs, compact_ranks, distinct, expand
from asynccomm.control.transport.schema import MessageError

COMING: Final = 10.0  # seconds for newcomers to arrive, once all ranks that have invited them are there
DECISIONS: Final = 64  # of which equal reports share one object


class ReceivedReport(NamedTuple):
    """The last report of a participant, and the time since when it counts."""

    report: StatusReport | None
    since: float


class Proposal(NamedTuple):
    """The members that a rank proposes."""

    listed: Runs
    by: ParticipantId

    @property
    def members(self) -> tuple[ParticipantId, ...]:
        """The proposed members, in order."""
        return expand(self.listed)


@final
class Reports:
    """The last report of each participant.

    Args:
        by: the rank of the coordinator.
        ranks: of the comm, in order.
        patience: seconds for a participant's own steps.
        successor: whether this comm had an earlier coordinator; then all participants must report first.
        gone: ranks known to be lost or to have left, with the reason.
        newcomers: the newcomers known to be on the channel.
    """

    def __init__(
        self,
        by: int,
        ranks: Iterable[int],
        patience: float,
        successor: bool,
        gone: Mapping[ParticipantId, str],
        newcomers: Iterable[str],
    ) -> None:
        self._by = by
        self._listed: RankRuns = compact_ranks(ranks)
        self._patience, self._successor = patience, successor
        self.ranks: frozenset[ParticipantId] = distinct(self._listed)
        self.gone: dict[ParticipantId, str] = dict(gone)
        self.silent: set[ParticipantId] = set()
        self._received: dict[ParticipantId, ReceivedReport] = {}
        # participants that must report first
        self._must_report: set[ParticipantId] = {*self.ranks, *newcomers} if successor else set()
        self._first_report: float | None = None  # time of the first report that is not None
        self._retry_deadlines: dict[ParticipantId, float] = {}  # participants ordered to retry, and their deadlines
        self._withdrawn: dict[ParticipantId, set[str]] = {}  # participants ordered to retry, and the decisions
        self._made: set[str] = set()  # keys of this coordinator's decisions
        self._seen: dict[str, View] = {}  # decisions in reports, each as one object: many ranks report it
        self._valid: Runs = self._listed  # the last proposal that was checked

    def add(self, who: ParticipantId, report: StatusReport | None, now: float, *, current: bool) -> StatusReport | None:
        """Take a report; returns it, or None if it says nothing that counts.

        Args:
            report: None: the participant is on the channel and has nothing to report.
            current: whether the report is of a member of the decision in progress, about this decision.

        Raises: MessageError: no participant sends this report. The report had no effect.
        """
        if isinstance(who, int) and who not in self.ranks:
            raise MessageError(f"rank {who} is not of the comm")
        if report is not None:
            report = self._checked(who, report, current)
        if who in self.gone:
            return None
        if report is not None and report.state is ParticipantState.OUT:
            self.remove(who, "was left out")
            return None
        self.silent.discard(who)
        if report is not None and report.decision is not None and report.decision.key in self._withdrawn.get(who, ()):
            return None  # sent before the participant read the order to drop the decision
        self._received[who] = ReceivedReport(report, now)
        if report is None or report.decision is None:
            self._retry_deadlines.pop(who, None)
        if report is not None and self._must_report:
            self._first_report = now if self._first_report is None else self._first_report
            if report.decision is not None:
                self._must_report.update(report.decision.members)
        return report

    def _checked(self, who: ParticipantId, report: StatusReport, current: bool) -> StatusReport:
        """``report``, with the decision in progress as the same object: each of many ranks reports it several times.

        Raises: MessageError: the participant cannot have made this report.
        """
        decision = report.decision
        if report.proposal is not None and report.proposal != self._valid:
            check_proposal(expand(report.proposal), self.ranks)
            self._valid = report.proposal
        if decision is None:
            return report
        if not current:
            self._check(who, decision)
        first = self._seen.setdefault(decision.key, decision)
        if len(self._seen) > DECISIONS:
            del self._seen[next(iter(self._seen))]
        return replace(report, decision=first) if first is not decision and first == decision else report

    def _check(self, who: ParticipantId, decision: View) -> None:
        """Raises: MessageError: the participant cannot hold this decision."""
        if self._seen.get(decision.key) != decision:
            check_proposal(decision.members, self.ranks)
        if who not in distinct(decision.listed):
            raise MessageError(f"{describe_participant(who)} holds the decision {decision.key!r}, which is not for it")
        if decision.key not in self._made if decision.by == self._by else decision.by > self._by or not self._successor:
            raise MessageError(f"no coordinator has made the decision {decision.key!r}")

    def add_made(self, decision: View) -> None:
        """Expect reports of a decision that this coordinator has made."""
        self._made.add(decision.key)
        self._seen[decision.key] = decision

    def remove(self, who: ParticipantId, reason: str) -> None:
        """Drop a participant that is gone."""
        self.gone.setdefault(who, reason)
        self._received.pop(who, None)
        self.silent.discard(who)
        self._retry_deadlines.pop(who, None)

    def forget(self, who: ParticipantId, since: float | None = None) -> None:
        """Drop the report of ``who``, which holds no decision after reading the order sent now."""
        self._received[who] = ReceivedReport(None, self._received[who].since if since is None else since)

    def withdraw(self, who: ParticipantId, decision: View, now: float) -> None:
        """Drop the report of ``who``, which is ordered to drop ``decision`` and to ask again."""
        self.forget(who, now)
        self._withdrawn.setdefault(who, set()).add(decision.key)
        self._retry_deadlines.setdefault(who, now + self._patience)

    def reattached(self, who: ParticipantId) -> None:
        """Take the next report of ``who`` with a withdrawn decision: the order to drop it may be lost."""
        self._withdrawn.pop(who, None)

    # -- queries ------------------------------------------------------------------------------------------------------

    def __contains__(self, who: ParticipantId) -> bool:
        return who in self._received

    def __iter__(self) -> Iterator[tuple[ParticipantId, StatusReport]]:
        """All reports that are not None; the reports may change during the iteration."""
        for who, received in list(self._received.items()):
            if received.report is not None:
                yield who, received.report

    def of(self, who: ParticipantId) -> StatusReport | None:
        """The report of a participant, if any."""
        received = self._received.get(who)
        return None if received is None else received.report

    @property
    def gathering(self) -> bool:
        """Whether participants must report before the coordinator acts."""
        return bool(self._must_report)

    def _unreported(self) -> set[ParticipantId]:
        return self._must_report - self._received.keys() - self.gone.keys() - self.silent

    def complete(self, now: float) -> bool:
        """Whether all reports are in, or the wait for them is over."""
        if self._unreported() and (self._first_report is None or now < self._first_report + self._patience):
            return False
        self._must_report = set()
        return True

    @property
    def due(self) -> float | None:
        """When the wait for reports is over; infinite: not before the first report; None: no report is missing."""
        if not self._unreported():
            return None
        return math.inf if self._first_report is None else self._first_report + self._patience

    def asking(self) -> tuple[Proposal | None, dict[ParticipantId, ReceivedReport]]:
        """The proposal of the first asking rank, if any, and all asking participants."""
        wants = {who: h for who, h in self._received.items() if h.report and h.report.state is ParticipantState.WANTS}
        first = next((who for who in wants if isinstance(who, int)), None)
        return (None if first is None else self.proposal(first)), wants

    def proposal(self, who: ParticipantId) -> Proposal:
        """The proposal of an asking rank."""
        report = self._received[who].report
        assert report is not None
        return Proposal(self._listed if report.proposal is None else report.proposal, who)

    def missing(self, proposed: Proposal, wants: Collection[ParticipantId]) -> list[ParticipantId]:
        """The proposed participants that the decision waits for."""
        return [who for who in proposed.members if not (who in wants or who in self.gone or who in self.silent)]

    def decision_time(self, wants: Mapping[ParticipantId, ReceivedReport], missing: list[ParticipantId]) -> float:
        """When to decide without the missing participants. A participant ordered to retry has time to ask again."""
        if not missing:
            return -math.inf
        asked = [(h.since, h.report.wait) for who, h in wants.items() if h.report and isinstance(who, int)]
        until = min(math.inf if wait is None else since + wait for since, wait in asked)
        if all(isinstance(who, str) for who in missing):  # a living newcomer has its invitation by now
            until = min(until, max(since for since, _ in asked) + COMING)
        return max(until, *(self._retry_deadlines.get(who, -math.inf) for who in missing))
