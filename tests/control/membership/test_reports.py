"""The reports of participants: which count, which are refused, and for which the coordinator waits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pytest

from asynccomm.control.membership.messages import ParticipantState, StatusReport, View
from asynccomm.control.membership.reports import COMING, DECISIONS, Reports
from asynccomm.control.runs import ParticipantId
from asynccomm.control.transport.schema import MessageError

WANTS, PREPARED = ParticipantState.WANTS, ParticipantState.PREPARED
PATIENCE = 60.0


def reports(
    successor: bool = False, gone: Mapping[ParticipantId, str] | None = None, newcomers: Iterable[str] = ()
) -> Reports:
    return Reports(1, range(3), PATIENCE, successor, gone or {}, newcomers)


def add(
    made: Reports, who: ParticipantId, report: StatusReport | None, now: float = 0.0, *, current: bool = False
) -> StatusReport | None:
    return made.add(who, report, now, current=current)


def prepared(decision: View) -> StatusReport:
    return StatusReport(PREPARED, decision.attempt, decision=decision)


def test_the_last_report_of_each_participant_counts() -> None:
    made = reports()
    asks = StatusReport(WANTS, 1)
    assert add(made, 0, StatusReport(WANTS, 0)) is not None
    assert add(made, 0, asks) is asks
    assert add(made, 1, None) is None
    assert (made.of(0), made.of(1), made.of(2)) == (asks, None, None)
    assert [who in made for who in range(3)] == [True, True, False]
    assert list(made) == [(0, asks)]


def test_a_participant_that_is_gone_says_nothing() -> None:
    made = reports(gone={2: "was lost"})
    assert add(made, 2, StatusReport(WANTS, 0)) is None
    add(made, 0, StatusReport(WANTS, 0))
    made.remove(0, "has left")
    made.remove(0, "was lost")
    assert add(made, 1, StatusReport(ParticipantState.OUT, 0)) is None
    assert made.gone == {0: "has left", 1: "was left out", 2: "was lost"}
    assert list(made) == []


def test_a_silent_participant_is_heard_again() -> None:
    made = reports()
    made.silent.add(0)
    add(made, 0, None)
    assert made.silent == set()


def test_a_report_from_before_the_order_to_ask_again_is_ignored() -> None:
    made, decision = reports(), View("key", 1, 0, (0, 1))
    made.add_made(decision)
    assert add(made, 0, prepared(decision)) is not None
    made.withdraw(0, decision, 5.0)
    assert add(made, 0, prepared(decision)) is None
    assert made.of(0) is None
    assert add(made, 0, StatusReport(WANTS, 1)) is not None


def test_equal_decisions_become_one_object() -> None:
    made, decision = reports(), View("key", 1, 0, (0, 1))
    made.add_made(decision)
    for who in range(2):
        taken = add(made, who, prepared(View("key", 1, 0, (0, 1))), current=who == 0)
        assert taken is not None
        assert taken.decision is decision


def test_only_so_many_decisions_are_kept() -> None:
    made = reports(successor=True)
    for number in range(DECISIONS + 10):
        add(made, 0, prepared(View(f"key {number}", 0, 0, (0,))))
    assert len(made._seen) == DECISIONS


@pytest.mark.parametrize(
    ("who", "report", "error"),
    [
        (3, None, "rank 3 is not of the comm"),
        (0, StatusReport(WANTS, 0, proposal=(0, 3)), "names ranks of the comm"),
        (0, prepared(View("key", 0, 0, (1, 2))), "rank 0 holds the decision 'key', which is not for it"),
        (0, prepared(View("key", 1, 0, (0, 1))), "no coordinator has made the decision 'key'"),
        (0, prepared(View("key", 2, 0, (0, 1))), "no coordinator has made the decision 'key'"),
    ],
)
def test_impossible_reports_are_refused_and_have_no_effect(who: int, report: StatusReport | None, error: str) -> None:
    made = reports(successor=True)
    with pytest.raises(MessageError, match=error):
        add(made, who, report)
    assert who not in made


def test_an_earlier_decision_is_possible_only_for_a_successor() -> None:
    earlier = prepared(View("key", 0, 0, (0, 1)))
    assert add(reports(successor=True), 0, earlier) is not None
    with pytest.raises(MessageError, match="no coordinator"):
        add(reports(), 0, earlier)


def test_a_successor_waits_for_all_reports() -> None:
    made = reports(successor=True, gone={2: "was lost"}, newcomers=["new"])
    assert (made.gathering, made.due) == (True, math.inf)
    assert not made.complete(1e9), "no participant has reported yet"
    add(made, 0, StatusReport(WANTS, 0), 10.0)
    assert made.due == 10.0 + PATIENCE
    assert not made.complete(10.0 + PATIENCE - 1)
    add(made, 1, None, 20.0)
    made.silent.add("new")
    assert made.due is None
    assert made.complete(20.0)
    assert not made.gathering


def test_the_wait_for_reports_has_a_limit() -> None:
    made = reports(successor=True)
    add(made, 0, StatusReport(WANTS, 0), 10.0)
    assert made.complete(10.0 + PATIENCE)


def test_a_successor_also_waits_for_the_newcomers_of_a_decision() -> None:
    made = reports(successor=True, gone={1: "was lost", 2: "was lost"})
    add(made, 0, prepared(View("key", 0, 0, (0, "new"))), 10.0)
    assert not made.complete(10.0)
    add(made, "new", None, 11.0)
    assert made.complete(11.0)


def test_the_first_coordinator_waits_for_no_report() -> None:
    assert reports().complete(0.0)
    assert reports().due is None


def test_the_decision_waits_for_proposed_participants_that_may_still_ask() -> None:
    made = reports(gone={2: "was lost"})
    assert made.asking() == (None, {})
    add(made, 0, StatusReport(WANTS, 0, wait=30.0), 100.0)
    first, wants = made.asking()
    assert first is not None
    assert (first.members, first.by, list(wants)) == ((0, 1, 2), 0, [0])
    assert made.missing(first, wants) == [1]
    assert made.decision_time(wants, [1]) == 130.0
    assert made.decision_time(wants, []) == -math.inf
    assert made.decision_time(wants, ["new"]) == 100.0 + COMING
    made.silent.add(1)
    assert made.missing(first, wants) == []


def test_a_rank_that_was_ordered_to_ask_again_has_time_to_do_so() -> None:
    made, decision = reports(), View("key", 1, 0, (0, 1))
    made.add_made(decision)
    add(made, 1, prepared(decision), 90.0)
    add(made, 0, StatusReport(WANTS, 0, wait=1.0), 100.0)
    made.withdraw(1, decision, 110.0)
    assert made.decision_time(made.asking()[1], [1]) == 110.0 + PATIENCE
    add(made, 1, None, 111.0)
    assert made.decision_time(made.asking()[1], [1]) == 101.0


def test_a_forgotten_report_keeps_its_time() -> None:
    made = reports()
    add(made, 0, StatusReport(WANTS, 0), 100.0)
    made.forget(0)
    assert (made.of(0), made.asking()) == (None, (None, {}))
    assert 0 in made
