"""The messages of an agreement: what is written is read, and nothing else is."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec import to_builtins

from asynccomm.control.membership.messages import (
    MAX_ATTEMPT,
    MAX_PLACE,
    MAX_TEXT,
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
from asynccomm.control.runs import MAX_LISTED, MAX_NAME
from asynccomm.control.transport.schema import MessageError, decode, dumps, loads
from tests.cases import cases

RANKS = range(4)
K = View("k", 0, 2, (3, "n", 0), {"host": "a", "ports": [1, 2]})
ORDERS: list[CoordinatorOrder] = [
    Prepare(K),
    Commit("k"),
    Retry("k", 3, "no route"),
    Finalized("k"),
    Rejected(1, "they differ", True),
    Excluded("late"),
]
REPORTS = [
    StatusReport(ParticipantState.WANTS, 0),
    StatusReport(ParticipantState.WANTS, 3, (1, "n"), 2.5),
    StatusReport(ParticipantState.JOINS, 3, (1, "n"), 0.0, K),
    StatusReport(ParticipantState.FAILED, 3, None, None, K, "no route"),
    StatusReport(ParticipantState.REFUSED, 3, why="they differ", mistake=True),
]


@cases("order", ORDERS)
def test_orders_come_through_json(order: CoordinatorOrder) -> None:
    assert loads(CoordinatorOrder, dumps(order)) == order


@cases("report", REPORTS)
def test_reports_come_through_json(report: StatusReport) -> None:
    assert loads(StatusReport, dumps(report)) == report


def test_long_reasons_are_cut() -> None:
    cut = "x" * MAX_TEXT
    for order in (Retry("k", 0, cut + "x"), Rejected(0, cut + "x", False), Excluded(cut + "x")):
        assert order.why == cut
        assert loads(CoordinatorOrder, dumps(order)) == order
    assert StatusReport(ParticipantState.REFUSED, 0, why=cut + "x").why == cut


WANTS = to_builtins(StatusReport(ParticipantState.WANTS, 0))
HOLDS = to_builtins(StatusReport(ParticipantState.PREPARED, 0, decision=K))


@cases(
    "change, field",
    [
        ({"state": "sleeps"}, "state"),
        ({"attempt": MAX_ATTEMPT + 1}, "attempt"),
        ({"wait": -1}, "wait"),
        ({"wait": math.nan}, "wait"),
        ({"wait": math.inf}, "wait"),
        ({"wait": 10**400}, "wait"),
        ({"proposal": []}, "proposal"),
        ({"proposal": [True]}, "proposal"),
        ({"proposal": [""]}, "proposal"),
        ({"proposal": ["x" * (MAX_NAME + 1)]}, "proposal"),
        ({"proposal": ["x"] * (MAX_LISTED + 1)}, "proposal"),
        ({"why": "x" * (MAX_TEXT + 1)}, "why"),
        ({"decision": HOLDS["decision"]}, "without decision"),
        ({"state": "prepared"}, "with a decision"),
        ({**HOLDS, "decision": {**HOLDS["decision"], "by": -1}}, "decision.by"),
        ({**HOLDS, "decision": {**HOLDS["decision"], "key": "k" * (MAX_NAME + 1)}}, "decision.key"),
        ({**HOLDS, "decision": {**HOLDS["decision"], "place": "x" * MAX_PLACE}}, "decision"),
    ],
)
def test_garbled_reports(change: dict[str, object], field: str) -> None:
    with pytest.raises(MessageError, match=field.replace(".", r"\.")):
        decode(StatusReport, {**WANTS, **change})


@cases(
    "message",
    [
        {"kind": "Hello"},
        {"kind": ["Finalized"]},
        {"kind": "Commit"},
        {"kind": "Commit", "key": 1},
        {"kind": "Retry", "key": "k", "attempt": -1, "why": ""},
        {"kind": "Prepare", "decision": None},
        {"kind": "Rejected", "attempt": 0, "why": "", "mistake": None},
        {"kind": "Excluded", "why": 1},
    ],
)
def test_garbled_orders(message: object) -> None:
    with pytest.raises(MessageError):
        decode(CoordinatorOrder, message)


def test_a_place_is_what_json_can_carry() -> None:
    assert plain({"a": (1, 2)}) == {"a": [1, 2]}
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for place in (object(), math.nan, deep, "x" * MAX_PLACE):
        with pytest.raises(ValueError, match="a place"):
            plain(place)
    while deep:  # or its destructor would be as deep
        deep = deep.pop()


def test_proposals_and_texts() -> None:
    assert check_proposal([2, "n"], RANKS) == (2, "n")
    for wrong in ([], [10**5000], [True], [0.0], [[0]], [0, 0]):
        with pytest.raises(MessageError):
            check_proposal(wrong, RANKS)
    with pytest.raises(ValueError, match="names ranks of the comm and newcomers, got 4"):
        check_proposal([4], RANKS)
    assert describe_participant(3) == "rank 3"
    assert describe_participant("n") == "newcomer 'n'"
    assert describe_many((0, "n")) == "[0, 'n']"
    assert describe_many(range(20)).endswith("14, 15, ... 20 in all]")
