"""Who goes on: each rule by itself, and all of them under any order of messages, deaths and silences."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asynccomm.control.membership.coordinator import PATIENCE, TRIES, Coordinator
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
from asynccomm.control.membership.reports import COMING
from asynccomm.control.runs import ParticipantId
from asynccomm.control.transport.schema import MessageError, decode
from tests.control.simulated_job import Job
from tests.sampling import amount, examples


class Chair:
    """A coordinator, and what is said to it and by it."""

    def __init__(self, size: int = 3, by: int = 0, **how: Any) -> None:
        self.ranks = range(size)
        self.coordinator = Coordinator(by, self.ranks, **how)
        self.now = 100.0

    def advance(self) -> list[tuple[ParticipantId, CoordinatorOrder]]:
        return self.coordinator.advance(self.now)

    def tell(
        self, who: ParticipantId, state: ParticipantState, attempt: int = 0, **more: Any
    ) -> list[tuple[ParticipantId, CoordinatorOrder]]:
        self.coordinator.on_report(who, StatusReport(state, attempt, **more), self.now)
        return self.advance()

    def idle(self, *people: ParticipantId) -> list[tuple[ParticipantId, CoordinatorOrder]]:
        for who in people:
            self.coordinator.on_report(who, None, self.now)
        return self.advance()

    def want(self, *people: ParticipantId, **more: Any) -> list[tuple[ParticipantId, CoordinatorOrder]]:
        return [said for who in people for said in self.tell(who, ParticipantState.WANTS, **more)]

    def hold(
        self, state: ParticipantState, decision: View, *people: ParticipantId
    ) -> list[tuple[ParticipantId, CoordinatorOrder]]:
        return [said for who in people for said in self.tell(who, state, decision.attempt, decision=decision)]

    def decide(self, *people: ParticipantId, **more: Any) -> View:
        """All of them want; this is what comes of it."""
        said = self.want(*people, **more)
        assert said
        assert {who for who, _ in said} == set(people)
        assert len({order for _, order in said}) == 1
        order = said[0][1]
        assert isinstance(order, Prepare)
        return order.decision

    def later(self, seconds: float) -> list[tuple[ParticipantId, CoordinatorOrder]]:
        self.now += seconds
        return self.advance()


def texts(said: list[tuple[ParticipantId, CoordinatorOrder]]) -> list[str]:
    return [order.why for _, order in said if isinstance(order, Retry | Rejected | Excluded)]


def test_all_ask_are_prepared_take_it_and_may_leave() -> None:
    chair = Chair(place=lambda members: ("store", len(members)))
    assert chair.want(2, 0) == []
    said = chair.want(1)
    assert [who for who, _ in said] == [0, 1, 2]
    decision = chair.coordinator.decision
    assert decision is not None
    assert decision.members == (0, 1, 2)
    assert decision.place == ["store", 3]  # as JSON carries it
    assert chair.hold(ParticipantState.JOINS, decision, 0, 1, 2) == []
    assert chair.hold(ParticipantState.PREPARED, decision, 0, 1) == []
    assert not chair.coordinator.committed
    said = chair.hold(ParticipantState.PREPARED, decision, 2)
    assert sorted(who for who, _ in said) == [0, 1, 2]
    assert {order for _, order in said} == {Commit(decision.key)}
    assert chair.coordinator.committed
    assert chair.hold(ParticipantState.COMMITTED, decision, 0, 1) == []
    assert chair.hold(ParticipantState.COMMITTED, decision, 2) == [(who, Finalized(decision.key)) for who in range(3)]
    assert chair.coordinator.due is None


def test_who_is_gone_is_not_waited_for() -> None:
    chair = Chair(4)
    chair.want(0, 3)
    chair.coordinator.lost(1)
    assert chair.advance() == []
    chair.coordinator.left(2)
    assert [(who, order.decision.members) for who, order in chair.advance() if isinstance(order, Prepare)] == [
        (0, (0, 3)),
        (3, (0, 3)),
    ]


def test_who_does_not_come_in_time_is_left_out_when_it_comes() -> None:
    chair = Chair()
    chair.want(0, wait=30.0)
    chair.later(1.0)
    chair.want(1, wait=5.0)
    assert chair.coordinator.due == 106.0  # the shortest wait counts
    assert chair.later(4.9) == []
    said = chair.later(0.1)
    assert [who for who, _ in said] == [0, 1]
    decision = chair.coordinator.decision
    assert decision is not None
    assert chair.want(2) == []  # it may still be needed
    said = chair.hold(ParticipantState.PREPARED, decision, 0, 1)
    assert texts(said) == ["the comm goes on as [0, 1]: it did not come in time"]
    assert [who for who, order in said if isinstance(order, Excluded)] == [2]


def test_who_comes_late_is_taken_in_if_it_has_to_be_tried_again() -> None:
    chair = Chair()
    chair.coordinator.silent(2)
    decision = chair.decide(0, 1)
    chair.want(2)
    said = chair.tell(1, ParticipantState.FAILED, decision=decision, why="no route")
    assert said == [(who, Retry(decision.key, 1, "no route")) for who in (0, 1)]
    said = chair.want(0, 1, attempt=1)
    assert {who for who, _ in said} == {0, 1, 2}
    again = chair.coordinator.decision
    assert again is not None
    assert again.members == (0, 1, 2)
    assert again.attempt == 1
    assert again.key != decision.key


def test_who_is_silent_is_not_waited_for_until_it_is_heard() -> None:
    chair = Chair()
    chair.want(0, 1)
    chair.coordinator.silent(2)
    chair.coordinator.on_report(2, None, chair.now)
    assert chair.advance() == []
    chair.coordinator.silent(2)
    assert len(chair.advance()) == 2


def test_who_asked_and_fell_silent_is_no_member() -> None:
    chair = Chair()
    chair.want(2, 0)
    chair.coordinator.silent(2)
    chair.want(1)
    assert chair.coordinator.decision is not None
    assert chair.coordinator.decision.members == (0, 1)


def test_proposals_that_differ_refuse_the_call_on_all_ranks() -> None:
    chair = Chair()
    assert chair.want(0) == []
    said = chair.want(2, proposal=(2, 0))
    why = "rank 0 proposes [0, 1, 2], rank 2 proposes [2, 0]"
    assert said == [(who, Rejected(0, why, True)) for who in (0, 2)]
    assert chair.want(1) == [(1, Rejected(0, why, True))]  # its call belongs to theirs
    assert chair.decide(0, 2, attempt=1, proposal=(2, 0)).members == (2, 0)


def test_a_refusal_is_also_for_those_who_were_told_again_and_have_not_asked_again() -> None:
    chair = Chair(4)
    chair.want(0, 1)
    chair.coordinator.silent(2)
    chair.coordinator.silent(3)
    chair.advance()
    decision = chair.coordinator.decision
    assert decision is not None
    chair.tell(1, ParticipantState.FAILED, decision=decision, why="no route")
    chair.want(2)
    assert {order for _, order in chair.want(3, proposal=(3,))} == {
        Rejected(1, "rank 2 proposes [0, 1, 2, 3], rank 3 proposes [3]", True)
    }
    assert [type(order) for _, order in chair.want(0, attempt=1) + chair.want(1, attempt=1)] == [Rejected, Rejected]


def test_all_ranks_in_order_are_the_proposal_of_who_names_none() -> None:
    chair = Chair(2)
    chair.want(0)
    assert len(chair.want(1, proposal=(0, 1))) == 2


def test_newcomers_come_in_where_they_are_proposed_and_nowhere_else() -> None:
    chair = Chair(2)
    proposal = ("n", 1, 0)
    chair.want("stranger", "n")
    chair.want(0, proposal=proposal)
    chair.want(1, proposal=proposal)
    decision = chair.coordinator.decision
    assert decision is not None
    assert decision.members == proposal
    said = chair.hold(ParticipantState.PREPARED, decision, *proposal)
    assert said[0] == ("stranger", Excluded("the comm goes on as ['n', 1, 0]: rank 0 does not propose it"))


def test_newcomers_that_do_not_come_are_not_waited_for_as_long_as_ranks_are() -> None:
    chair = Chair(3)
    proposal = (0, "n", 1, 2)
    chair.want(0, 2, proposal=proposal, wait=300.0)
    assert chair.later(100.0) == []  # for rank 1
    assert chair.want(1, proposal=proposal, wait=300.0) == []
    assert chair.coordinator.due == 100.0 + 100.0 + COMING
    assert chair.later(COMING - 0.1) == []
    chair.later(0.1)
    decision = chair.coordinator.decision
    assert decision is not None
    assert decision.members == (0, 1, 2)
    chair.want("n")
    said = chair.hold(ParticipantState.PREPARED, decision, 0, 1, 2)
    assert ("n", Excluded("the comm goes on as [0, 1, 2]: it did not come in time")) in said


def test_newcomers_are_turned_away_where_no_rank_is_left() -> None:
    chair = Chair(2, by=9)
    chair.want("n")
    chair.coordinator.lost(0)
    chair.coordinator.left(1)
    assert chair.advance() == [("n", Excluded("no rank of the comm is left to go on"))]


def test_nobody_of_those_proposed_can_go_on() -> None:
    chair = Chair(2)
    chair.coordinator.lost(1)
    [(who, order)] = chair.want(0, proposal=(1,))
    assert who == 0
    assert order == Rejected(0, "none of [1], which rank 0 proposes, can go on", False)


def test_a_member_that_is_gone_before_the_commit_makes_it_try_again_without() -> None:
    chair = Chair()
    chair.want(0, 1, 2)
    decision = chair.coordinator.decision
    assert decision is not None
    chair.hold(ParticipantState.PREPARED, decision, 0, 1)
    chair.coordinator.lost(2)
    assert chair.advance() == [(who, Retry(decision.key, 1, "rank 2 was lost")) for who in (0, 1)]
    assert chair.hold(ParticipantState.PREPARED, decision, 0, 1) == []  # said before they read that
    chair.want(0, attempt=1)
    chair.want(1, attempt=1)
    assert chair.coordinator.decision is not None
    assert chair.coordinator.decision.members == (0, 1)


def test_reports_that_cross_the_order_to_retry_commit_nothing() -> None:
    chair = Chair()
    decision = chair.decide(0, 1, 2)
    chair.hold(ParticipantState.PREPARED, decision, 0, 1)
    chair.coordinator.silent(2)
    assert [type(order) for _, order in chair.advance()] == [Retry] * 3
    for who in range(3):  # over the new connections, which the coordinator hears of later
        assert chair.coordinator.reattached(who)
        stale = StatusReport(ParticipantState.PREPARED, decision.attempt, decision=decision)
        chair.coordinator.on_report(who, stale, chair.now)
    again = [(who, Retry(decision.key, 1, "rank 0, which decided, has not seen it through")) for who in range(3)]
    assert chair.advance() == again
    assert chair.decide(0, 1, 2, attempt=1).members == (0, 1, 2)


def test_a_member_that_is_gone_after_the_commit_changes_nothing() -> None:
    chair = Chair(2)
    chair.want(0, 1)
    decision = chair.coordinator.decision
    assert decision is not None
    chair.hold(ParticipantState.PREPARED, decision, 0, 1)
    chair.coordinator.lost(1)
    assert chair.advance() == []
    assert chair.hold(ParticipantState.COMMITTED, decision, 0) == [(0, Finalized(decision.key))]


def test_the_same_members_fail_to_connect_only_so_often() -> None:
    chair = Chair(2)
    chair.want("waits")
    for attempt in range(TRIES):
        chair.want(0, attempt=attempt)
        chair.want(1, attempt=attempt)
        decision = chair.coordinator.decision
        assert decision is not None
        said = chair.tell(1, ParticipantState.FAILED, attempt, decision=decision, why="no route")
    refused = Rejected(TRIES, "[0, 1] could not connect: no route", False)
    assert said == [*((who, Retry(decision.key, TRIES, "no route")) for who in (0, 1)), ("waits", refused)]
    assert chair.want(0, attempt=TRIES) == [(0, refused)]
    assert chair.want(1, attempt=TRIES) == [(1, refused)]
    chair.want(0, attempt=TRIES + 1)
    assert len(chair.want(1, attempt=TRIES + 1)) == 2  # they may call again


@pytest.mark.parametrize("known", [False, True])
def test_a_member_that_is_silent_before_the_commit_makes_it_try_again(known: bool) -> None:
    chair = Chair(2)
    chair.want(0, 1)
    decision = chair.coordinator.decision
    assert decision is not None
    chair.hold(ParticipantState.PREPARED, decision, 0)
    assert chair.coordinator.due == chair.now + PATIENCE
    if known:
        chair.coordinator.silent(1)
        said = chair.advance()
    else:
        assert chair.later(PATIENCE - 1) == []
        said = chair.later(1)
    assert [type(order) for _, order in said] == [Retry, Retry]


def test_who_is_told_again_gets_time_to_ask_again_whatever_the_wait() -> None:
    chair = Chair(2)
    chair.idle(1)
    chair.coordinator.silent(1)
    chair.want(1, wait=0.0)
    decision = chair.coordinator.decision
    assert decision is not None
    assert decision.members == (1,)  # nobody waits
    chair.tell(0, ParticipantState.WANTS, wait=0.0)
    chair.tell(1, ParticipantState.FAILED, decision=decision, why="x")
    decision = chair.coordinator.decision
    assert decision is None
    assert chair.advance() == []
    assert len(chair.want(1, attempt=1, wait=0.0)) == 2


def test_over_waits_for_members_that_answer() -> None:
    chair = Chair()
    chair.want(0, 1, 2)
    decision = chair.coordinator.decision
    assert decision is not None
    chair.hold(ParticipantState.PREPARED, decision, 0, 1, 2)
    chair.hold(ParticipantState.COMMITTED, decision, 0)
    chair.coordinator.silent(1)
    assert chair.advance() == []
    assert chair.coordinator.due == chair.now + PATIENCE
    assert chair.later(PATIENCE) == [(0, Finalized(decision.key))]
    assert chair.coordinator.due is None
    assert chair.hold(ParticipantState.COMMITTED, decision, 2) == [(2, Finalized(decision.key))]


# what the coordinator before an successor has decided
K = View("k", 0, 0, (1, 2, 3))


def successor(**how: Any) -> Chair:
    return Chair(4, by=1, successor=True, gone={0: "was lost"}, **how)


def test_an_heir_commits_what_one_has_committed() -> None:
    chair = successor()
    assert chair.hold(ParticipantState.PREPARED, K, 1) == []
    assert chair.hold(ParticipantState.COMMITTED, K, 2) == []  # rank 3 may have more to say
    assert chair.hold(ParticipantState.PREPARED, K, 3) == [(1, Commit("k")), (3, Commit("k"))]
    assert chair.hold(ParticipantState.COMMITTED, K, 1, 3) == [(who, Finalized("k")) for who in (1, 2, 3)]


def test_an_heir_commits_what_one_has_committed_though_a_member_is_gone() -> None:
    chair = successor()
    chair.hold(ParticipantState.PREPARED, K, 1)
    chair.hold(ParticipantState.COMMITTED, K, 2)
    chair.coordinator.lost(3)
    assert chair.advance() == [(1, Commit("k"))]


def test_an_heir_commits_what_all_are_prepared_for() -> None:
    assert successor().hold(ParticipantState.PREPARED, K, 1, 2, 3) == [(who, Commit("k")) for who in (1, 2, 3)]


@pytest.mark.parametrize("third", ["lost", "joins", "wants", "idle"])
def test_an_heir_tries_again_what_not_all_are_prepared_for(third: str) -> None:
    chair = successor()
    said = chair.hold(ParticipantState.PREPARED, K, 1, 2)
    if third == "lost":
        chair.coordinator.lost(3)
        said += chair.advance()
    elif third == "joins":
        said += chair.hold(ParticipantState.JOINS, K, 3)
    elif third == "wants":
        said += chair.want(3)
    else:
        said += chair.idle(3)
    why = "rank 0, which decided, has not seen it through"
    told = (1, 2, 3) if third == "joins" else (1, 2)
    assert said == [(who, Retry("k", 1, why)) for who in told]
    assert chair.hold(ParticipantState.PREPARED, K, 1, 2) == []  # said before they read that
    assert chair.coordinator.decision is None


def test_an_heir_leaves_out_who_is_not_of_what_is_committed() -> None:
    chair = successor()
    chair.want(3)
    other = replace(K, listed=(1, 2))
    said = chair.hold(ParticipantState.COMMITTED, other, 1, 2)
    assert (3, Excluded("the comm goes on as [1, 2]")) in said


def test_an_heir_refuses_late_calls_as_its_predecessor_did() -> None:
    chair = successor()
    chair.want(1)
    chair.tell(2, ParticipantState.REFUSED, 0, why="they differ", mistake=True)
    assert chair.idle(3) == [(1, Rejected(0, "they differ", True))]


def test_an_heir_waits_for_newcomers_that_are_members() -> None:
    chair = successor()
    mixed = replace(K, listed=(1, "n"))
    chair.idle(2, 3)
    assert chair.hold(ParticipantState.PREPARED, mixed, 1) == []
    assert chair.hold(ParticipantState.COMMITTED, mixed, "n") == [(1, Commit("k"))]


def test_who_was_left_out_takes_no_part_with_an_heir_either() -> None:
    chair = successor()
    chair.want(1, 2)
    said = chair.tell(3, ParticipantState.OUT)
    assert {who for who, _ in said} == {1, 2}


@pytest.mark.parametrize("known", [False, True])
def test_an_heir_goes_on_without_who_is_silent_and_its_comm_is_void(known: bool) -> None:
    chair = successor()
    assert chair.coordinator.due is None  # nobody has asked
    chair.hold(ParticipantState.PREPARED, K, 1, 2)
    assert chair.coordinator.due == chair.now + PATIENCE
    if known:
        chair.coordinator.silent(3)
        said = chair.advance()
    else:
        said = chair.later(PATIENCE)
    assert [(who, type(order)) for who, order in said] == [(1, Retry), (2, Retry)]
    said = chair.hold(ParticipantState.COMMITTED, K, 3)
    assert said == [(3, Excluded("while it was silent, the members of its comm went on without it"))]


def test_what_a_silent_one_has_committed_counts_if_nobody_has_dropped_it() -> None:
    chair = successor()
    alone = replace(K, listed=(3,))
    chair.want(1, 2)
    chair.coordinator.silent(3)
    said = chair.advance()
    assert [(who, type(order)) for who, order in said] == [(1, Prepare), (2, Prepare)]
    said = chair.hold(ParticipantState.COMMITTED, alone, 3)  # before the other one is committed
    assert [(who, type(order)) for who, order in said] == [(1, Retry), (2, Retry), (3, Finalized)]
    assert texts(chair.want(1, 2, attempt=1)) == ["the comm goes on as [3]"] * 2


def test_what_a_silent_one_has_committed_is_void_once_another_one_is_committed() -> None:
    chair = successor()
    chair.want(1, 2)
    chair.coordinator.silent(3)
    chair.advance()
    decision = chair.coordinator.decision
    assert decision is not None
    chair.hold(ParticipantState.PREPARED, decision, 1, 2)
    said = chair.hold(ParticipantState.COMMITTED, replace(K, listed=(3,)), 3)
    assert [(who, type(order)) for who, order in said] == [(3, Excluded)]


def test_of_two_commits_the_later_coordinators_counts() -> None:
    chair = Chair(4, by=2, successor=True, gone={0: "was lost", 1: "was lost"})
    chair.hold(ParticipantState.COMMITTED, View("old", 0, 5, (3,)), 3)
    said = chair.hold(ParticipantState.COMMITTED, View("new", 1, 0, (2,)), 2)
    assert [(who, type(order)) for who, order in said] == [(3, Excluded), (2, Finalized)]


GARBLED: list[tuple[ParticipantId, StatusReport | None]] = [
    (7, None),
    (7, StatusReport(ParticipantState.WANTS, 0)),
    (0, StatusReport(ParticipantState.COMMITTED, 0, decision=View("x", 0, 0, (0, 1)))),
    (0, StatusReport(ParticipantState.PREPARED, 0, decision=View("x", 3, 0, (0, 1)))),
    (0, StatusReport(ParticipantState.PREPARED, 0, decision=View("x", 0, 0, (1, 2)))),
    (0, StatusReport(ParticipantState.WANTS, 0, proposal=(0, 0))),
]


@pytest.mark.parametrize(("who", "message"), GARBLED)
def test_garbled_reports_change_nothing(who: ParticipantId, message: StatusReport | None) -> None:
    chair = Chair(2)
    chair.want(0)
    with pytest.raises(MessageError):
        chair.coordinator.on_report(who, message, chair.now)
    assert len(chair.want(1)) == 2


def test_an_heir_believes_in_no_decision_of_its_own_that_it_has_not_made() -> None:
    for by in (1, 2):
        with pytest.raises(MessageError, match="no coordinator has made"):
            successor().hold(ParticipantState.COMMITTED, replace(K, by=by), 2)


STATES = st.sampled_from([state.value for state in ParticipantState])
PEOPLE = st.lists(st.sampled_from([0, 1, 2, 7, "n", -1, True, None, 1.5]), max_size=4)
DECISIONS = st.none() | st.fixed_dictionaries(
    {"key": st.sampled_from(["k", "l"]), "by": st.integers(-1, 2), "attempt": st.integers(-1, 3)},
    optional={"members": PEOPLE, "place": st.none()},
)
REPORTS = st.none() | st.fixed_dictionaries(
    {
        "state": STATES | st.integers(),
        "attempt": st.integers(0, 4) | st.just(2**40) | st.text(max_size=2),
        "proposal": st.none() | PEOPLE,
        "wait": st.none() | st.sampled_from([0, 5.0, -1, math.nan, math.inf, 10**400, "x"]),
        "decision": DECISIONS,
        "why": st.text(max_size=3),
        "mistake": st.booleans(),
    }
)


@examples(150)
@given(
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(["hear"] * 6 + ["lost", "left", "silent"]), PEOPLE.map(tuple), REPORTS), max_size=12
    ),
)
def test_no_peer_can_crash_the_coordinator(succeeds: bool, steps: list[tuple[str, tuple[Any, ...], Any]]) -> None:
    chair = Chair(3, by=1, successor=succeeds)
    for what, people, report in steps:
        who = next((who for who in people if type(who) in (int, str)), 0)
        if what != "hear":
            getattr(chair.coordinator, what)(who)
        else:
            try:
                chair.coordinator.on_report(who, decode(StatusReport | None, report), chair.now)
            except MessageError:
                continue
        chair.advance()
        due = chair.coordinator.due
        assert due is None or due > chair.now
        chair.later(1.0)


Pick = Callable[[Sequence[Any]], Any]


class Chaos:
    """A job in which anything may happen: ``pick`` says what."""

    def __init__(self, pick: Pick, calm: bool) -> None:
        n, shift = pick(range(1, 6)), pick(range(3))
        ranks = list(range(shift, shift + n))
        if pick([False, True]):
            ranks.reverse()
        newcomers = [f"new{i}" for i in range(pick(range(3)))]
        self.job = job = Job(
            ranks,
            range(shift),
            newcomers,
            wait=pick([math.inf, math.inf, 5.0, 0.0]),
            patience=math.inf if calm else pick([2.0, 10.0]),
            proposal=pick([None, ranks + newcomers, newcomers + ranks, ranks[1:] + newcomers or None, ranks[:2]]),
            newcomers_known=calm or pick([False, True]),
        )
        if pick(range(8)) == 0:
            job.proposals[ranks[0]] = [ranks[0]]
        self.rarity = pick([3, 6, 12, 24])
        self.deaths = pick(range(n + shift))
        self.freezes, self.failures, self.leaves = pick(range(4)), pick([0, 0, 1, 5]), pick([0, 0, 1])
        self.ticks, self.exits, self.alarms = pick(range(5)), pick(range(3)), pick(range(3))
        self.detachments = pick([0, 0, 1, 4])

    def run(self, steps: Sequence[int]) -> None:
        for step in steps:
            actions = self.rare() if step % self.rarity == 0 else self.job.actions() or self.rare()
            if actions:
                actions[step // self.rarity % len(actions)]()
        if not self.job.calm:
            self.job.settle(thaw=False)
        self.job.settle()

    def rare(self) -> list[Callable[[], None]]:
        job = self.job
        found: list[Callable[[], None]] = []
        for p in job.everybody.values():
            if job.can_ask(p):
                found.append(lambda p=p: job.asks(p))
            if p.frozen:
                found.append(lambda p=p: setattr(p, "frozen", False))
                if self.alarms and not job.calm:
                    found.append(lambda p=p: self.spend("alarms", job.is_silent, p))
            if not p.acts:
                continue
            if self.deaths:
                found.append(lambda p=p: self.spend("deaths", job.dies, p))
                if any(q.down.get(q.boss) for q in job.everybody.values() if q.boss == p.who):
                    found += [found[-1]] * 5  # in the middle of telling
            if self.freezes and p.participant is not None:
                found.append(lambda p=p: self.spend("freezes", lambda p: setattr(p, "frozen", True), p))
                if p.participant.committed:
                    found += [found[-1]] * 3
            if self.detachments and isinstance(p.who, int) and p.who != p.boss and not p.detached:
                found.append(lambda p=p: self.spend("detachments", job.detaches, p))
                if p.down[p.boss]:
                    found += [found[-1]] * 3
            if p.participant is None or p.left:
                continue
            if self.failures and job.joining(p):
                found.append(lambda p=p: self.spend("failures", lambda p: job.connects(p, "no route"), p))
            if self.leaves and not p.participant.committed and isinstance(p.who, int):
                found.append(lambda p=p: self.spend("leaves", job.leaves, p))
            if self.exits and p.participant.committed and p.participant.can_leave:
                found.append(lambda p=p: self.spend("exits", job.exits, p))
            if self.alarms and p.calls == 0:
                found.append(lambda p=p: self.spend("alarms", job.is_silent, p))
        if self.ticks:
            found.append(lambda: self.spend("ticks", job.tick, 3.0))
        return found

    def spend(self, what: str, do: Callable[..., None], *args: object) -> None:
        setattr(self, what, getattr(self, what) - 1)
        do(*args)


STEPS = st.lists(st.integers(0, 2**16), max_size=120)


def by_seed(seed: int, calm: bool) -> Counter[str]:
    rng = random.Random(seed)
    chaos = Chaos(rng.choice, calm)
    chaos.run([rng.randrange(2**16) for _ in range(rng.choice([30, 60, 100]))])
    return chaos.job.seen


@examples(60)
@given(st.data(), st.booleans(), STEPS)
def test_any_order(data: st.DataObject, calm: bool, steps: list[int]) -> None:
    Chaos(lambda options: data.draw(st.sampled_from(options)), calm).run(steps)


def test_no_rank_that_runs_is_ever_split_from_the_others() -> None:
    seen = sum((by_seed(seed, calm=True) for seed in range(amount(2000, 700))), Counter[str]())
    # or it would show nothing
    events = "coordinator died", "unread", "detached", "Retry", "Rejected", "Excluded", "Finalized", "exited", "failed"
    for what in events:
        assert seen[what] > 20, what


def test_of_all_who_sleep_and_wake_one_comm_goes_on() -> None:
    for seed in range(amount(1200, 200)):
        by_seed(seed, calm=False)
