"""A participant by itself: what it reports in each state, and what it takes from a coordinator."""

from __future__ import annotations

import math

import pytest
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
)
from asynccomm.control.membership.participant import Participant
from asynccomm.control.transport.schema import MessageError

RANKS = range(3)
K = View("k", 0, 0, (0, 1))


def hear(participant: Participant, order: CoordinatorOrder) -> CoordinatorOrder | None:
    heard = participant.on_order(order)
    assert heard in (None, order)
    return heard


def report(participant: Participant) -> StatusReport:
    found = participant.report()
    assert found is not None
    return found


def at(state: str) -> Participant:
    """A candidate on its way to a commit."""
    participant = Participant(0, RANKS)
    if state == "idle":
        return participant
    participant.ask([0, 1], 5.0)
    if state == "refused":
        hear(participant, Rejected(0, "why", True))
    if state == "out":
        hear(participant, Excluded("why"))
    if state in ("joins", "prepared", "failed", "committed"):
        hear(participant, Prepare(K))
    if state == "failed":
        participant.failed("k", "no route")
    if state in ("prepared", "committed"):
        participant.prepared("k")
    if state == "committed":
        hear(participant, Commit("k"))
    return participant


def test_who_has_not_asked_has_nothing_to_report() -> None:
    participant = at("idle")
    assert participant.report() is None
    assert participant.can_leave
    assert not participant.asking


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("wants", StatusReport(ParticipantState.WANTS, 0, (0, 1), 5.0)),
        ("joins", StatusReport(ParticipantState.JOINS, 0, (0, 1), 5.0, K)),
        ("prepared", StatusReport(ParticipantState.PREPARED, 0, (0, 1), 5.0, K)),
        ("failed", StatusReport(ParticipantState.FAILED, 0, (0, 1), 5.0, K, "no route")),
        ("committed", StatusReport(ParticipantState.COMMITTED, 0, (0, 1), 5.0, K)),
        ("refused", StatusReport(ParticipantState.REFUSED, 0, why="why", mistake=True)),
        ("out", StatusReport(ParticipantState.OUT, 0, (0, 1), 5.0)),
    ],
)
def test_a_report_is_the_whole_state(state: str, said: StatusReport) -> None:
    participant = at(state)
    assert report(participant) == said
    assert participant.asking == (state in ("wants", "joins", "prepared", "failed"))
    assert participant.committed == (state == "committed")
    assert participant.can_leave == (state != "committed")
    assert participant.decision == said.decision


def test_it_lingers_until_it_is_over() -> None:
    participant = at("committed")
    assert hear(participant, Finalized("k")) == Finalized("k")
    assert participant.can_leave
    assert report(participant).state is ParticipantState.COMMITTED  # for coordinators that come later


@pytest.mark.parametrize("state", ["joins", "prepared", "failed"])
def test_again_makes_it_want_the_next_attempt(state: str) -> None:
    participant = at(state)
    hear(participant, Retry("k", 4, "why"))
    assert report(participant) == StatusReport(ParticipantState.WANTS, 4, (0, 1), 5.0)
    assert participant.on_order(Retry("k", 5, "why")) is None  # it has dropped that
    participant.prepared("k")  # its connecting ended too late
    participant.failed("k", "cancelled")
    assert report(participant).state is ParticipantState.WANTS


def test_prepared_cannot_be_taken_back() -> None:
    participant = at("prepared")
    participant.failed("k", "changed its mind")
    assert report(participant).state is ParticipantState.PREPARED


def test_a_refused_call_may_be_made_again() -> None:
    participant = at("refused")
    participant.ask(None)
    assert report(participant) == StatusReport(ParticipantState.WANTS, 1, None)
    assert participant.on_order(Rejected(0, "why", True)) is None  # that was the call before
    assert hear(participant, Rejected(7, "why", False)) is not None
    assert report(participant) == StatusReport(ParticipantState.REFUSED, 7, why="why")


@pytest.mark.parametrize("state", ["wants", "joins", "prepared", "failed", "committed"])
def test_left_out_is_final(state: str) -> None:
    participant = at(state)
    assert hear(participant, Excluded("late")) == Excluded("late")
    assert report(participant).state is ParticipantState.OUT
    assert participant.decision is None
    assert participant.can_leave
    assert participant.on_order(Prepare(K)) is None
    with pytest.raises(AssertionError, match="asked while out"):
        participant.ask(None)


@pytest.mark.parametrize("order", [Prepare(K), Commit("k"), Retry("l", 1, "")])
def test_orders_that_are_sent_again_over_a_new_connection_change_nothing(order: CoordinatorOrder) -> None:
    participant = at("committed")
    before = participant.report()
    assert participant.on_order(order) is None
    assert participant.report() == before


@pytest.mark.parametrize(
    ("state", "order"),
    [
        ("wants", Prepare(replace(K, listed=(1, 2)))),
        ("wants", Commit("k")),
        ("joins", Commit("k")),
        ("failed", Commit("k")),
        ("prepared", Commit("l")),
        ("prepared", Finalized("k")),
        ("committed", Retry("k", 1, "")),
        ("committed", Finalized("l")),
    ],
)
def test_orders_that_no_coordinator_gives_change_nothing(state: str, order: CoordinatorOrder) -> None:
    participant = at(state)
    before = participant.report()
    with pytest.raises(MessageError):
        participant.on_order(order)
    assert participant.report() == before


@pytest.mark.parametrize(
    ("proposal", "wait", "match"),
    [
        ([], 1.0, "length >= 1"),
        ([0, 0], 1.0, "once"),
        ([7], 1.0, "names ranks of the comm and newcomers, got 7"),
        (None, -1.0, "wait"),
        (None, math.nan, "wait"),
    ],
)
def test_what_cannot_be_asked_for(proposal: list[int] | None, wait: float, match: str) -> None:
    participant = at("idle")
    with pytest.raises(ValueError, match=match):
        participant.ask(proposal, wait)
    assert participant.report() is None
