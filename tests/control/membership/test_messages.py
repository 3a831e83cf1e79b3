"""The messages of an agreement: what is written is read, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.control.membership.messages import (
    MAX_ATTEMPT,
    MAX_NAME,
    MAX_PEOPLE,
    MAX_PLACE,
    MAX_TEXT,
    Commit,
    CoordinatorOrder,
    Excluded,
    Finalized,
    MembershipMessageError,
    ParticipantState,
    Prepare,
    Rejected,
    Retry,
    StatusReport,
    View,
    check_proposal,
    describe_many,
    describe_participant,
    order_message,
    parse_order,
    parse_report,
    plain,
    report_message,
)
from tests.sampling import examples

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
    StatusReport(ParticipantState.FAILED, 3, None, math.inf, K, "no route"),
    StatusReport(ParticipantState.REFUSED, 3, why="they differ", mistake=True),
]


@pytest.mark.parametrize("order", ORDERS)
def test_orders_come_through_json(order: CoordinatorOrder) -> None:
    assert parse_order(json.loads(json.dumps(order_message(order))), RANKS) == order


@pytest.mark.parametrize("report", REPORTS)
def test_reports_come_through_json(report: StatusReport) -> None:
    text = json.dumps(report_message(report), allow_nan=False)
    assert parse_report(json.loads(text), "n", RANKS) == report


def test_long_reasons_are_cut() -> None:
    cut = "x" * MAX_TEXT
    for order in (Retry("k", 0, cut + "x"), Rejected(0, cut + "x", False), Excluded(cut + "x")):
        heard = parse_order(order_message(order), RANKS)
        assert isinstance(heard, Retry | Rejected | Excluded)
        assert heard.why == cut
    assert parse_report(report_message(StatusReport(ParticipantState.REFUSED, 0, why=cut + "x")), 0, RANKS).why == cut


WANTS = report_message(StatusReport(ParticipantState.WANTS, 0))
HOLDS = report_message(StatusReport(ParticipantState.PREPARED, 0, decision=K))


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {},
        {**WANTS, "state": "sleeps"},
        {**WANTS, "state": ["wants"]},
        {**WANTS, "attempt": True},
        {**WANTS, "attempt": -1},
        {**WANTS, "attempt": MAX_ATTEMPT + 1},
        {**WANTS, "attempt": 1.0},
        {**WANTS, "wait": -1},
        {**WANTS, "wait": math.nan},
        {**WANTS, "wait": math.inf},
        {**WANTS, "wait": 10**400},
        {**WANTS, "wait": True},
        {**WANTS, "proposal": "0"},
        {**WANTS, "proposal": []},
        {**WANTS, "proposal": [4]},
        {**WANTS, "proposal": [10**5000]},
        {**WANTS, "proposal": [True]},
        {**WANTS, "proposal": [0.0]},
        {**WANTS, "proposal": [[0]]},
        {**WANTS, "proposal": [0, 0]},
        {**WANTS, "proposal": [""]},
        {**WANTS, "proposal": ["x" * (MAX_NAME + 1)]},
        {**WANTS, "proposal": ["x"] * (MAX_PEOPLE + 1)},
        {**WANTS, "why": "x" * (MAX_TEXT + 1)},
        {**WANTS, "why": None},
        {**WANTS, "mistake": 1},
        {**WANTS, "decision": HOLDS["decision"]},
        {**HOLDS, "decision": None},
        {**HOLDS, "decision": "k"},
        {**HOLDS, "decision": {**K._asdict(), "members": [3, "n", 0], "by": -1}},
        {**HOLDS, "decision": {**K._asdict(), "members": [3, "n", 0], "key": "k" * (MAX_NAME + 1)}},
        {**HOLDS, "decision": {**K._asdict(), "members": [3, "n", 0], "place": "x" * MAX_PLACE}},
        {**HOLDS, "decision": {**K._asdict(), "members": [3, "n"]}},  # the reporter is not in it
        *({key: value for key, value in WANTS.items() if key != name} for name in WANTS),
    ],
)
def test_garbled_reports(message: object) -> None:
    with pytest.raises(MembershipMessageError):
        parse_report(message, 0, RANKS)


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"say": "hello"},
        {"say": ["over"]},
        {"say": "committed"},
        {"say": "committed", "key": 1},
        {"say": "again", "key": "k", "attempt": 1},
        {"say": "again", "key": "k", "attempt": "1", "why": ""},
        {"say": "decided", "decision": None},
        {"say": "refused", "attempt": 0, "why": "", "mistake": None},
        {"say": "left out", "why": 1},
    ],
)
def test_garbled_orders(message: object) -> None:
    with pytest.raises(MembershipMessageError):
        parse_order(message, RANKS)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["say", *WANTS, *K._fields]), inner),
    max_leaves=8,
)


@examples(150)
@given(st.sampled_from([*WANTS, *K._fields, "say"]), ANYTHING, st.sampled_from([WANTS, HOLDS]))
def test_whatever_comes_is_read_or_garbled(name: str, value: Any, message: dict[str, object]) -> None:
    for said in (value, {**message, name: value}):
        for read in (lambda said=said: parse_report(said, 0, RANKS), lambda said=said: parse_order(said, RANKS)):
            with contextlib.suppress(MembershipMessageError):
                read()


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
    with pytest.raises(ValueError, match="4 is not a rank of the comm"):
        check_proposal([4], RANKS)
    assert describe_participant(3) == "rank 3"
    assert describe_participant("n") == "newcomer 'n'"
    assert describe_many((0, "n")) == "[0, 'n']"
    assert describe_many(range(20)).endswith("14, 15, ... 20 in all]")
