"""The agreement over the control channel: nodes that are wired to each other, without sockets or threads."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence

import pytest

from asynccomm.control.membership import service as elections_module
from asynccomm.control.membership.coordinator import Coordinator
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
from asynccomm.control.membership.service import MembershipService
from asynccomm.control.messages import Body, OrderMessage, ParticipantReport, Presence, ReportRequest
from asynccomm.control.router import FENCED, Router
from asynccomm.control.runs import ParticipantId
from asynccomm.control.timing import SILENT_SECONDS
from asynccomm.control.transport.schema import dumps
from asynccomm.control.transport.topology import RankAddress, Topology

KEY = "comm"


class Wire:
    """One end of a connection between two nodes of a test."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.other: Wire | None = None
        self.open = True

    def send(self, message: object) -> None:
        assert self.other is not None
        if self.open and not self.job.ranks[self.rank].dead:
            text = dumps(message)
            self.job.loop.call_soon(self.other.receive, text)

    def receive(self, text: str) -> None:
        rank = self.job.ranks[self.rank]
        if self.open and not rank.dead:
            if rank.stopped:
                rank.unread.append(lambda: self.receive(text))
            else:
                rank.router.received(self, json.loads(text))

    def close(self) -> None:
        assert self.other is not None
        if self.open:
            self.open = False
            self.job.loop.call_soon(self.other.end)

    def end(self) -> None:
        rank = self.job.ranks[self.rank]
        if self.open and not rank.dead:
            if rank.stopped:
                rank.unread.append(self.end)
                return
            self.open = False
            rank.router.ended(self, "its control connection ended")
            self.job.climb(rank)


class Rank:
    def __init__(self, job: Job, rank: int, topology: Topology) -> None:
        self.job = job
        self.dead = self.stopped = False
        self.unread: list[Callable[[], object]] = []
        self.orders: list[CoordinatorOrder] = []
        self.joiners: list[tuple[str, OrderMessage]] = []
        self.router = Router(rank, topology, self.deliver, self.gone)
        self.service = MembershipService(self.router, job.loop, self)

    def send(self, name: str, message: OrderMessage) -> None:
        self.joiners.append((name, message))

    def deliver(self, source: int, body: Body) -> None:
        match body:
            case ParticipantReport():
                self.service.on_report(source, body)
            case OrderMessage():
                self.service.on_order(source, body)
            case ReportRequest(key):
                self.service.on_report_request(key, [KEY].__contains__)
            case Presence():
                self.service.on_presence(source)

    def gone(self, ranks: Sequence[int], how: str) -> None:
        for rank in ranks:
            self.service.on_departure(rank, how)
        self.job.loop.call_soon(self.job.climb, self)
        if self.router.is_root:
            self.job.loop.call_soon(self.service.on_attached)

    def ask(self, proposal: Sequence[ParticipantId] | None = None, wait: float = 60.0) -> None:
        self.service.ask(KEY, self.job.all, proposal, wait, self.orders.append)

    @property
    def decision(self) -> str:
        """What was decided last."""
        return [order for order in self.orders if isinstance(order, Prepare)][-1].decision.key

    @property
    def members(self) -> Sequence[ParticipantId]:
        return [order for order in self.orders if isinstance(order, Prepare)][-1].decision.members

    def said(self) -> list[str]:
        return [type(order).__name__ for order in self.orders]

    def die(self) -> None:
        self.dead = True
        self.service.close()
        for link in self.router.links:
            assert isinstance(link, Wire)
            link.close()

    def go_on(self) -> None:
        self.stopped = False
        unread, self.unread = self.unread, []
        for call in unread:
            call()


class Job:
    def __init__(self, size: int, hosts: str | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.all = list(range(size))
        topology = [RankAddress(rank, hosts[rank] if hosts else "host", 1, f"name {rank}") for rank in self.all]
        self.ranks = [Rank(self, rank, Topology(topology)) for rank in self.all]
        for rank in self.ranks:
            self.climb(rank)

    def climb(self, rank: Rank) -> None:
        above = rank.router.above
        if rank.dead or rank.router.up is not None or above is None:
            return
        chief = self.ranks[above]
        if chief.dead:
            rank.router.declare_lost(above, "nobody listens")
            self.climb(rank)
            return
        problem = chief.router.refusal(rank.router.rank)
        if problem == FENCED:
            rank.router.declare_lost(above, problem)
            self.climb(rank)
            return
        if problem:
            rank.router.fence(problem)
            return
        up, down = Wire(self, rank.router.rank), Wire(self, above)
        up.other, down.other = down, up
        chief.router.accept(rank.router.rank, down)
        rank.router.attach(above, up)
        rank.service.on_attached()

    def close(self) -> None:
        for rank in self.ranks:
            rank.service.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def heard(ranks: Sequence[Rank], kind: type) -> None:
    await until(lambda: all(any(isinstance(order, kind) for order in rank.orders) for rank in ranks))


async def commit(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.service.prepared(KEY, rank.decision)
    await heard(ranks, Commit)


@pytest.mark.parametrize("size", [1, 2, 4])
async def test_all_ask_and_go_on(size: int) -> None:
    job = Job(size)
    for rank in job.ranks:
        rank.ask()
    await heard(job.ranks, Prepare)
    assert {rank.decision for rank in job.ranks} == {job.ranks[0].decision}
    assert tuple(job.ranks[0].members) == tuple(range(size))
    assert not any(rank.service.must_stay for rank in job.ranks)
    await commit(job.ranks)
    await heard(job.ranks, Finalized)
    for rank in job.ranks:
        assert rank.said() == ["Prepare", "Commit", "Finalized"]
        assert not rank.service.must_stay
    job.close()


async def test_who_has_committed_lingers_until_all_have() -> None:
    job = Job(3)
    for rank in job.ranks:
        rank.ask()
    await heard(job.ranks, Prepare)
    job.ranks[2].service.prepared(KEY, job.ranks[2].decision)
    for _ in range(20):
        await asyncio.sleep(0)
    job.ranks[2].stopped = True  # it does not read the commit
    for rank in job.ranks[:2]:
        rank.service.prepared(KEY, rank.decision)
    await heard(job.ranks[:2], Commit)
    waiting = [asyncio.ensure_future(rank.service.wait_settled()) for rank in job.ranks[:2]]
    for _ in range(50):
        await asyncio.sleep(0)
    assert [rank.service.must_stay for rank in job.ranks] == [True, True, False]
    assert not any(task.done() for task in waiting)
    job.ranks[2].go_on()
    async with asyncio.timeout(10):
        await asyncio.gather(*waiting)
    job.close()


async def test_a_failure_makes_all_try_again() -> None:
    job = Job(2)
    for rank in job.ranks:
        rank.ask()
    await heard(job.ranks, Prepare)
    first = job.ranks[0].decision
    job.ranks[1].service.failed(KEY, first, "no route")
    await heard(job.ranks, Retry)
    await until(lambda: job.ranks[0].decision != first)
    await until(lambda: job.ranks[1].decision != first)
    assert "no route" in next(order.why for order in job.ranks[0].orders if isinstance(order, Retry))
    await commit(job.ranks)
    job.close()


async def test_a_rank_that_gives_up_takes_no_part_any_more() -> None:
    job = Job(3)
    job.ranks[1].ask()
    job.ranks[1].service.withdraw(KEY)
    job.ranks[1].service.withdraw(KEY)
    job.ranks[1].service.prepared(KEY, "late")
    job.ranks[1].service.failed(KEY, "late", "late")
    for rank in (job.ranks[0], job.ranks[2]):
        rank.ask()
    await heard([job.ranks[0], job.ranks[2]], Prepare)
    assert job.ranks[0].members == (0, 2)
    job.ranks[1].ask()
    assert job.ranks[1].orders == [Excluded("it has withdrawn")]
    job.ranks[0].die()  # the next one is told, too
    await until(lambda: job.ranks[2].decision != job.ranks[0].decision)
    assert job.ranks[2].members == (2,)
    job.close()


async def test_a_rank_that_is_given_up_does_not_go_on_alone() -> None:
    job = Job(3)
    job.ranks[1].ask()
    job.ranks[0].router.declare_lost(1, "it was silent")
    await until(lambda: bool(job.ranks[1].router.fenced))
    assert [type(order) for order in job.ranks[1].orders] == [Excluded]
    assert "it was silent" in str(job.ranks[1].orders[0])
    job.ranks[1].ask()
    for _ in range(20):
        await asyncio.sleep(0)
    assert job.ranks[1].said() == ["Excluded", "Excluded"]
    assert not job.ranks[1].service.must_stay
    for rank in (job.ranks[0], job.ranks[2]):
        rank.ask()
    await heard([job.ranks[0], job.ranks[2]], Prepare)
    assert job.ranks[2].members == (0, 2)
    job.close()


async def test_a_root_that_is_given_up_is_told() -> None:
    job = Job(3)
    job.ranks[0].stopped = True
    for rank in job.ranks[1:]:
        rank.ask()
        rank.router.last_heard[0] -= 60
        rank.service.tick()
    await heard(job.ranks[1:], Prepare)
    assert job.ranks[1].members == (1, 2)
    await commit(job.ranks[1:])
    job.ranks[0].go_on()
    await until(lambda: bool(job.ranks[0].router.fenced))
    job.ranks[0].ask()
    assert job.ranks[0].said() == ["Excluded"]
    job.close()


async def test_who_was_stopped_itself_gives_nobody_up_before_it_has_read_what_came() -> None:
    job = Job(3)
    rank = job.ranks[1]
    rank.ask()
    rank.service.tick()
    rank.router.last_heard[0] -= 60
    rank.service._last_tick -= 60
    rank.service.tick()
    assert not rank.router.gone
    rank.service.tick()
    assert not rank.router.gone
    rank.router.last_heard[0] -= 60
    rank.service.tick()
    assert 0 in rank.router.gone
    job.close()


async def test_who_is_silent_is_not_waited_for() -> None:
    job = Job(3)
    for rank in job.ranks[:2]:
        rank.ask()
    for _ in range(20):
        await asyncio.sleep(0)
    assert job.ranks[0].said() == []
    job.ranks[0].router.last_heard[2] -= 60
    job.ranks[0].service.tick()
    await heard(job.ranks[:2], Prepare)
    assert job.ranks[0].members == (0, 1)
    await commit(job.ranks[:2])
    job.ranks[2].ask()
    await heard(job.ranks[2:], Excluded)
    job.close()


async def test_who_comes_late_to_those_that_have_gone_on() -> None:
    job = Job(3)
    job.ranks[2].service.on_followed(KEY, [0, 1])
    job.ranks[1].service.on_followed(KEY, [0, 1])
    job.ranks[2].ask()
    assert job.ranks[2].orders == [Excluded("ranks [0, 1] have gone on")]
    for rank in job.ranks[:2]:
        rank.ask([0, 1])
    await heard(job.ranks[:2], Prepare)
    job.close()


async def test_who_asks_while_the_others_have_gone_on() -> None:
    job = Job(2)
    job.ranks[1].ask()
    job.ranks[1].service.on_followed("another", [0])
    assert job.ranks[1].orders == []
    job.ranks[1].service.on_followed(KEY, [0])
    assert job.ranks[1].orders == [Excluded("ranks [0] have gone on")]
    job.close()


@pytest.mark.parametrize("when", ["asked", "decided", "prepared", "committed"])
async def test_the_root_dies(when: str) -> None:
    job = Job(3)
    for rank in job.ranks:
        rank.ask()
        if when == "asked":
            break
    if when == "asked":
        job.ranks[1].ask()
    else:
        await heard(job.ranks, Prepare)
    first = None if when == "asked" else job.ranks[1].decision
    if when in ("prepared", "committed"):
        for rank in job.ranks[1:]:
            rank.service.prepared(KEY, rank.decision)
    if when == "committed":
        job.ranks[2].stopped = True
        job.ranks[0].service.prepared(KEY, job.ranks[0].decision)
        await heard(job.ranks[1:2], Commit)
    job.ranks[0].die()
    if when == "asked":
        job.ranks[2].ask()
    if when == "committed":
        job.ranks[2].go_on()
        await heard(job.ranks[2:], Commit)  # of what rank 1 has
        assert job.ranks[2].decision == first
        await heard(job.ranks[1:], Finalized)
    else:
        await until(lambda: all(rank.orders and rank.members == (1, 2) for rank in job.ranks[1:]))
        assert job.ranks[1].decision == job.ranks[2].decision != first
        await commit(job.ranks[1:])
    job.close()


@pytest.mark.parametrize("when", ["decided", "prepared", "committed"])
async def test_the_rank_that_relays_to_another_one_dies(when: str) -> None:
    job = Job(4, hosts="aabb")
    relay, last = job.ranks[2:]
    survivors = [job.ranks[0], job.ranks[1], last]
    for rank in job.ranks:
        rank.ask()
    await heard(job.ranks, Prepare)
    first = last.decision
    if when != "decided":
        for rank in job.ranks[: 3 if when == "prepared" else 4]:
            rank.service.prepared(KEY, rank.decision)
    if when == "committed":
        await until(lambda: any(isinstance(order, Commit) for order in job.ranks[0].orders))
        assert last.said() == ["Prepare"], "its Commit is under way over the relay"
    last.stopped = True  # it connects to the root after the root has sent its orders, which have no route
    relay.die()
    if when == "committed":
        last.go_on()
        await heard(survivors, Finalized)
        assert last.decision == first
    else:
        await heard(job.ranks[:2], Retry)
        last.go_on()
        await until(lambda: all(rank.members == (0, 1, 3) for rank in survivors))
        assert last.decision == job.ranks[0].decision != first
        await commit(survivors)
    job.close()


async def test_a_withdrawal_that_was_lost_with_its_relay_is_asked_for() -> None:
    job = Job(4, hosts="aabb")
    relay, last = job.ranks[2:]
    for rank in job.ranks[:2]:
        rank.ask()
    relay.stopped = True
    last.service.withdraw(KEY)
    for _ in range(20):
        await asyncio.sleep(0)
    relay.die()
    await heard(job.ranks[:2], Prepare)
    assert job.ranks[0].members == (0, 1)
    job.close()


async def test_a_rank_behind_one_that_is_stopped_has_time_to_connect_anew() -> None:
    job = Job(4, hosts="aabb")
    for rank in job.ranks[:2]:
        rank.ask()
    for _ in range(20):
        await asyncio.sleep(0)
    root = job.ranks[0]
    for silent, seconds in ((2, SILENT_SECONDS - 0.5), (3, SILENT_SECONDS + 0.5)):  # the news of it was older
        root.router.last_heard[silent] -= seconds
    root.service.tick()
    assert root.service._coordinators[KEY].decision is None
    for silent in (2, 3):
        root.router.last_heard[silent] -= SILENT_SECONDS
    root.service.tick()
    assert root.service._coordinators[KEY].decision is None
    root.router.last_heard[3] -= 2
    root.service.tick()
    await heard(job.ranks[:2], Prepare)
    assert root.members == (0, 1)
    job.close()


async def test_a_rank_that_closes_the_comm_is_not_waited_for() -> None:
    job = Job(2)
    job.ranks[0].ask()
    for _ in range(10):
        await asyncio.sleep(0)
    job.ranks[0].service.on_left(KEY, 1)
    job.ranks[0].service.on_left("another", 1)
    await heard(job.ranks[:1], Prepare)
    assert job.ranks[0].members == (0,)
    job.close()


async def test_a_rank_that_left_before_anybody_asked_is_not_waited_for() -> None:
    job = Job(3)
    job.ranks[0].service.on_left(KEY, 1)
    job.ranks[2].service.withdraw(KEY)
    for _ in range(10):
        await asyncio.sleep(0)
    job.ranks[0].ask()
    await heard(job.ranks[:1], Prepare)
    assert job.ranks[0].members == (0,)
    job.close()


async def test_of_comms_long_past_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elections_module, "ORDERS", 2)
    job = Job(2)
    for key in ("a", "b", KEY):
        job.ranks[0].service.on_left(key, 1)
    assert len(job.ranks[0].service._left) == 2
    job.ranks[0].ask()
    await heard(job.ranks[:1], Prepare)
    assert len(job.ranks[0].service._left) == 1
    job.close()


async def test_wishes_that_differ_are_refused_and_may_be_repeated() -> None:
    job = Job(2)
    job.ranks[0].ask([0, 1])
    job.ranks[1].ask([1])
    await heard(job.ranks, Rejected)
    for rank in job.ranks:
        rank.orders.clear()
        rank.ask([1, 0])
    await heard(job.ranks, Prepare)
    assert job.ranks[0].members == (1, 0)
    job.close()


class RecordingLoop:
    """Records the delays of calls, and makes none."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    def call_soon(self, call: Callable[[str], object], key: str) -> None:
        self.delays.append(0.0)

    def call_later(self, delay: float, call: Callable[[str], object], key: str) -> None:
        self.delays.append(delay)


async def test_a_long_step_of_the_coordinator_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    job, loop, cpu = Job(3), RecordingLoop(), [0.0]
    monkeypatch.setattr(elections_module.time, "thread_time", lambda: cpu[0])
    monkeypatch.setattr(Coordinator, "advance", lambda self, now: cpu.__setitem__(0, cpu[0] + 0.5) or [])
    root = job.ranks[0].service
    root._loop = loop  # type: ignore[assignment]
    for rank in job.all:
        root.on_report(rank, ParticipantReport(KEY, job.all, StatusReport(ParticipantState.WANTS, 0)))
    assert loop.delays == [0.0], "one step for all reports of one iteration"
    root._advance(KEY)
    root.on_report(1, ParticipantReport(KEY, job.all, StatusReport(ParticipantState.WANTS, 0)))
    assert loop.delays == [0.0, 2.0]
    job.close()


async def test_a_wait_has_an_end() -> None:
    job = Job(2)
    job.ranks[1].ask(wait=0.05)
    await heard(job.ranks[1:], Prepare)
    assert job.ranks[1].members == (1,)
    job.close()


async def test_newcomers_are_answered() -> None:
    job = Job(1)
    root = job.ranks[0]
    root.service.on_report("new", ParticipantReport(KEY, [0], StatusReport(ParticipantState.WANTS, 0)))
    root.ask([0, "new"])
    await heard([root], Prepare)
    assert root.members == (0, "new")
    assert [(name, message.comm) for name, message in root.joiners] == [("new", KEY)]
    root.service.on_departure("new", "it died")
    await heard([root], Retry)
    await until(lambda: root.members == (0,))
    job.close()


async def test_messages_that_fit_no_state_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(1)
    service = job.ranks[0].service
    foreign = StatusReport(ParticipantState.PREPARED, 0, decision=View("k", 3, 0, (0,)))
    with caplog.at_level(logging.WARNING, "asynccomm"):
        service.on_report(0, ParticipantReport(KEY, [0], foreign))
        job.ranks[0].ask()
        service.on_order(3, OrderMessage(KEY, Finalized("k")))
    assert "rank 0 sends an invalid report: no coordinator has made the decision 'k'" in caplog.text
    assert "rank 3 sends an invalid order: 'k' is over" in caplog.text
    service.on_order(0, OrderMessage("unknown", Commit("k")))
    service.on_report_request("unknown", [KEY].__contains__)
    service.on_report(0, ParticipantReport("nobody asks", [0], None))
    service.on_report(0, ParticipantReport("of no ranks", [], foreign))
    job.close()


async def test_there_may_be_many_comms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elections_module, "ORDERS", 2)
    job = Job(2)
    rank = job.ranks[0]
    for number in range(5):  # each waits for the other rank, and has a timer
        rank.service.ask(f"comm {number}", [0, 1], None, 0.01, rank.orders.append)
        rank.service.on_followed(f"other {number}", [1])
    await until(lambda: len(rank.orders) == 2)  # the last two
    assert not rank.service._timers or len(rank.service._timers) <= 2
    assert len(rank.service._out) == 2
    job.close()


async def test_closing_ends_the_timers() -> None:
    job = Job(2)
    job.ranks[0].ask(wait=0.01)
    job.close()
    await asyncio.sleep(0.03)
    assert job.ranks[0].orders == []
