"""A comm's side of the control channel: its messages, its replies, and the errors that messages cause."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, BrokenError, CollectiveMismatchError, Comm, PeerLostError, new_comm
from asynccomm.comm.in_flight import RECORDED, InFlight
from asynccomm.comm.monitored_barrier import MonitoredBarrier
from asynccomm.comm.reporter import EXPLAINED, Reporter
from asynccomm.comm.submission import COMPARED, Submitter
from asynccomm.comm.wire_errors import TEXT, encode_error
from asynccomm.control.channel import ControlChannel
from asynccomm.control.transport.schema import JsonObject
from asynccomm.control.transport.topology import RankAddress, Topology
from asynccomm.core.callsite import call_site
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.ops import AllReduce, Barrier
from asynccomm.ops.p2p import Recv, Send
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.signature import signature
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.testing.local import loopback_world


class Line:
    """Stands for the channel: the ranks of the job are 10, 11, 12; one of them, 12, has no channel."""

    def __init__(self) -> None:
        self.enrolled: list[str] = []
        self.told: list[JsonObject] = []
        self.withdrawn: list[JsonObject | None] = []
        self.looks = 0
        self.gone = {11: "its process ended"}
        self.rank = 10
        self.topology = Topology([RankAddress(rank, "here", rank, local="x") for rank in (10, 11)])
        self.answers: dict[int, Callable[[JsonObject], Any]] = {}  # by the rank of the job

    def subscribe(self, key: str, member: object) -> None:
        self.enrolled.append(key)

    def unsubscribe(self, key: str, item: JsonObject | None = None) -> None:
        self.withdrawn.append(item)

    def broadcast(self, key: str, item: JsonObject, then: Callable[[], object] = lambda: None) -> None:
        self.told.append(item)
        then()

    def fingerprints_ready(self) -> None:
        self.looks += 1

    def request(
        self, key: str, jobs: Sequence[int], question: JsonObject, timeout: float
    ) -> Future[dict[int, JsonObject]]:
        replies: Future[dict[int, JsonObject]] = Future()
        replies.set_result({job: self.answers[job](question) for job in jobs if job in self.answers})
        return replies

    def silence(self, rank: int) -> float:
        return 2.5


class Parts:
    """A reporter on a submitter without a backend, of which 3 collectives and 1 message are numbered."""

    def __init__(self) -> None:
        self.line = Line()
        self.broken: list[BrokenError] = []
        self.mailbox = Mailbox(asyncio.get_running_loop())
        group = CommInfo("grads", 0, 3, torch.device("cpu"))
        self.in_flight = InFlight(CommOptions(), self.mailbox, lambda work: None)
        self.submitter = Submitter(group, self.mailbox, self.in_flight, self.broken.append)
        self.submitter.counts.collectives, self.submitter.counts.messages = 3, 1
        ordering: Any = SimpleNamespace(outstanding={"x": 2}.__getitem__)
        self.submitter.ordering = ordering
        channel: Any = self.line
        self.reporter = Reporter(channel, "key", [10, 11, 12], [20, 21, 22], self.submitter, self.broken.append)

    def work(self, op: Any, seq: int) -> Work[Any]:
        work: Work[Any] = Work(op, seq, self.mailbox, value=None, timeout=60.0, on_settled=lambda work: None)
        work.site = call_site()
        return work

    def issue(self, op: Any, seq: int, batch: int = 1) -> Work[Any]:
        work = self.work(op, seq)
        self.submitter.recent.append((work.op, work.site, work.seq, work.started, None))
        if self.submitter._compare is not None:
            self.submitter._compare(work, batch)
        return work


@pytest.fixture
async def parts() -> Parts:
    return Parts()


REDUCE = AllReduce(torch.float32, 7, ReduceOp.SUM)


# -- messages to the other ranks --------------------------------------------------------------------------------------


async def test_a_reporter_subscribes_and_unsubscribes(parts: Parts) -> None:
    assert parts.line.enrolled == ["key"]
    parts.reporter.end()
    parts.reporter.followers = [0, 2, 3, 4]
    parts.reporter.end()
    followed = {"kind": "followed", "members": (0, [2, 3, 1])}
    assert parts.line.withdrawn == [{"kind": "closed"}, followed]


async def test_closing_because_of_a_loss_reports_the_loss(parts: Parts) -> None:
    parts.submitter.error = PeerLostError(2, "its connection ended", "grads")
    parts.reporter.end()
    assert parts.line.withdrawn == [{"kind": "closed", "lost": 2, "reason": "its connection ended"}]
    for error in (AbortedError(1, "enough"), PeerLostError(7, "its connection ended", "parent")):  # all ranks have them
        parts.submitter.error = error
        parts.reporter.end()
    assert parts.line.withdrawn[1:] == [{"kind": "closed"}] * 2


async def test_the_error_that_breaks_the_comm_is_sent_with_its_rank(parts: Parts) -> None:
    done = threading.Event()
    parts.reporter.send_error(AbortedError(0, "enough"), done.set)
    assert parts.line.told == [{"rank": 0, "kind": "abort", "reason": "enough"}]
    assert done.is_set()


async def test_fingerprints_are_taken_only_if_the_backend_does_not_compare(parts: Parts) -> None:
    parts.issue(REDUCE, 0)
    assert parts.reporter.take_fingerprints() == (3, [])
    assert parts.line.looks == 0
    parts.submitter.compare(parts.reporter.compare)
    parts.issue(REDUCE, 1, 2)
    parts.issue(Barrier(), 2, 0)
    parts.issue(Send(torch.float32, 3, 1, 0), 0)
    assert parts.line.looks == 2
    assert parts.reporter.take_fingerprints() == (3, [(1, *signature(REDUCE), 2), (2, *signature(Barrier()), 0)])
    assert parts.reporter.take_fingerprints() == (3, []), "each once"


# -- replies ----------------------------------------------------------------------------------------------------------


async def test_a_state(parts: Parts) -> None:
    parts.in_flight.works = dict.fromkeys([parts.issue(REDUCE, number) for number in range(20)], 0)
    state = parts.reporter.on_request({"what": "state", "tag": "x"})
    assert {key: state[key] for key in ("comm", "rank", "size", "state", "collectives", "messages", "in_flight")} == {
        "comm": "grads",
        "rank": 0,
        "size": 3,
        "state": "open",
        "collectives": 3,
        "messages": 1,
        "in_flight": 20,
    }
    assert [one["seq"] for one in state["pending"]] == list(range(8)), "the oldest"
    assert state["last"]["seq"] == 19
    assert state["last"]["op"] == str(REDUCE)
    assert __file__ in state["last"]["site"]
    assert state["issued"] == 2
    assert "stacks" not in state
    stacks = parts.reporter.on_request({"what": "state", "stacks": True})
    assert "test_a_state" in stacks["stacks"]


async def test_a_deferred_call_is_the_last_call_until_a_later_one_is_numbered(parts: Parts) -> None:
    numbered, deferred = parts.issue(REDUCE, 0), parts.work(Barrier(), UNNUMBERED)
    parts.in_flight.works = dict.fromkeys([numbered, deferred], 0)
    last = parts.reporter.on_request({"what": "state"})["last"]
    assert (last["op"], last["seq"]) == ("barrier()", UNNUMBERED)
    assert __file__ in last["site"]
    parts.issue(REDUCE, 1).settle()
    assert parts.reporter.on_request({"what": "state"})["last"]["seq"] == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [(None, "open"), (AbortedError(1, "enough"), "broken: aborted by rank 1: enough"), (ValueError(), "closed")],
)
async def test_the_state_of_the_comm(parts: Parts, error: Any, text: str) -> None:
    parts.submitter.error = error
    assert parts.reporter.on_request({"what": "state"})["state"] == text


async def test_the_state_of_a_comm_with_a_long_error_fits_into_a_message(parts: Parts) -> None:
    parts.submitter.error = AbortedError(1, "x" * (5 << 20))
    state = parts.reporter.on_request({"what": "state"})["state"]
    assert state.startswith("broken: aborted by rank 1: xxx")
    assert len(state) == TEXT


async def test_the_operation_of_a_number(parts: Parts) -> None:
    parts.issue(REDUCE, 5)
    parts.issue(Send(torch.float32, 3, 1, 0), 6)
    found = parts.reporter.on_request({"what": "explain", "seq": 5})
    assert (found["op"], found["signature"]) == (str(REDUCE), list(signature(REDUCE)))
    assert __file__ in found["site"]
    assert found.keys() == {"op", "site", "signature"}
    assert parts.reporter.on_request({"what": "explain", "seq": 6}) == {}, "messages have numbers of their own"
    for number in range(RECORDED):
        parts.issue(REDUCE, 100 + number)
    assert parts.reporter.on_request({"what": "explain", "seq": 5}) == {}, "long ago"


async def test_the_operations_that_follow(parts: Parts) -> None:
    for number in (5, 6, 7, 9):
        parts.issue(Barrier() if number == 6 else REDUCE, number)
    parts.issue(Send(torch.float32, 3, 1, 0), 8)
    found = parts.reporter.on_request({"what": "explain", "seq": 5, "following": True})
    assert found["op"] == str(REDUCE)
    assert [call["op"] for call in found["following"]] == ["barrier()", str(REDUCE)], "up to a gap"
    assert parts.reporter.on_request({"what": "explain", "seq": 8, "following": True}) == {}
    parts.in_flight.works = dict.fromkeys([parts.issue(Barrier(), 100 + number) for number in range(2 * EXPLAINED)], 0)
    found = parts.reporter.on_request({"what": "explain", "seq": 100, "following": True})
    assert len(found["following"]) == EXPLAINED - 1


async def test_a_monitored_barrier_has_a_number_of_its_own(parts: Parts) -> None:
    parts.issue(REDUCE, 0)
    parts.in_flight.works = {parts.work(MonitoredBarrier(), 0): 0, parts.work(MonitoredBarrier(), 1): 0}
    assert parts.reporter.on_request({"what": "explain", "seq": 0, "following": True})["following"] == []
    assert parts.reporter.on_request({"what": "explain", "seq": 1}) == {}


async def test_operations_in_flight_are_explained_at_any_age(parts: Parts) -> None:
    parts.in_flight.works = dict.fromkeys([parts.issue(REDUCE, 5)], 0)
    for number in range(RECORDED):
        parts.issue(Barrier(), 100 + number)
    assert parts.reporter.on_request({"what": "explain", "seq": 5})["op"] == str(REDUCE)


async def test_more_calls_are_stored_where_fingerprints_are_compared(parts: Parts) -> None:
    parts.issue(REDUCE, 5)
    parts.submitter.compare(parts.reporter.compare)
    for number in range(COMPARED - 1):
        parts.issue(Barrier(), 100 + number)
    assert parts.reporter.on_request({"what": "explain", "seq": 5})["op"] == str(REDUCE)
    parts.issue(Barrier(), 9999)
    assert parts.reporter.on_request({"what": "explain", "seq": 5}) == {}


async def test_an_unknown_request(parts: Parts) -> None:
    assert parts.reporter.on_request({"what": "is love"}) == {}
    assert parts.reporter.on_request({}) == {}


async def test_a_session_that_was_dropped(parts: Parts) -> None:
    del parts.submitter
    gc.collect()
    assert parts.reporter.on_request({"what": "state"}) == {}
    parts.reporter.on_news(11, {"rank": 1, **encode_error(AbortedError(1, "enough"))})


async def test_a_loop_that_does_not_run_is_blocked(parts: Parts) -> None:
    parts.reporter.on_request({"what": "ping"})
    time.sleep(0.1)  # nothing turns meanwhile
    assert parts.reporter.on_request({"what": "state"})["blocked"]
    await asyncio.sleep(0)
    assert not parts.reporter.on_request({"what": "state"})["blocked"]
    parts.reporter.on_request({"what": "ping"})
    assert not parts.reporter.on_request({"what": "state"})["blocked"], "it has had no time yet"


async def test_ranks_that_do_not_reply(parts: Parts) -> None:
    states = {rank: parts.reporter._state(rank, None, ()) for rank in range(3)}
    assert (states[0].answered, states[0].silent) == (False, 2.5)
    assert states[1].gone == "its process ended"
    assert not states[2].reachable
    assert parts.reporter._state(1, {"state": "open", "pid": []}, ()).gone == "its process ended", (
        "nonsense is no answer"
    )


# -- messages from the other ranks ------------------------------------------------------------------------------------


async def test_an_error_of_another_rank_breaks_the_comm(parts: Parts) -> None:
    parts.reporter.on_news(12, {"rank": 77, **encode_error(AbortedError(77, "enough"))})
    (error,) = parts.broken
    assert str(error) == "aborted by rank 2: enough", "who sent it, whatever it says"


@pytest.mark.parametrize("item", [{"kind": "closed"}, {"kind": "unheard of"}])
async def test_other_messages_do_not_break_the_comm(parts: Parts, item: JsonObject) -> None:
    parts.reporter.on_news(11, {"rank": 1, **item})
    assert parts.broken == []


async def test_the_announcement_of_rank_0(parts: Parts) -> None:
    waiting = asyncio.ensure_future(parts.reporter.announced())
    parts.reporter.on_news(11, {"rank": 1, "kind": "announcement", "text": "not of rank 0"})
    parts.reporter.on_news(10, {"rank": 0, "kind": "announcement", "text": "here"})
    assert await waiting == await parts.reporter.announced() == "here"
    assert parts.broken == []


async def test_an_announcement_goes_to_all_ranks(parts: Parts) -> None:
    parts.reporter.announce("here")
    assert parts.line.told == [{"rank": 0, "kind": "announcement", "text": "here"}]


async def test_messages_about_ranks_outside_the_comm(parts: Parts) -> None:
    parts.reporter.on_news(99, {"rank": 0, **encode_error(AbortedError(0, "enough"))})
    parts.reporter.on_departure(99, "its process ended")
    assert parts.broken == []


async def test_the_loss_of_this_rank_does_not_break_the_comm(parts: Parts) -> None:
    parts.reporter.on_news(11, {"rank": 1, **encode_error(PeerLostError(0, "it was silent"))})
    assert parts.broken == []
    parts.reporter.on_news(11, {"rank": 1, **encode_error(PeerLostError(2, "it was silent"))})
    assert [str(error) for error in parts.broken] == ["rank 2 was lost: it was silent"]


async def test_closing_because_of_a_loss_breaks_the_comm(parts: Parts) -> None:
    parts.reporter.on_news(11, {"rank": 1, "kind": "closed", "lost": 2, "reason": "its connection ended"})
    parts.reporter.on_news(11, {"rank": 1, "kind": "closed", "lost": 0, "reason": "its connection ended"})
    parts.reporter.on_news(11, {"rank": 1, "kind": "closed", "lost": [], "reason": "its connection ended"})
    assert [str(error) for error in parts.broken] == [
        "rank 2 was lost: its connection ended",
        "rank 1 was lost: it has declared this rank lost: its connection ended",
        "rank 1 reports an error that cannot be read, of the kind 'lost'",
    ]
    parts.reporter.on_departure(11, "its process ended")
    assert len(parts.broken) == 3, "it had closed this comm"


async def test_a_lost_rank_breaks_the_comm_unless_it_had_closed(parts: Parts) -> None:
    parts.reporter.on_departure(11, "")
    assert parts.broken == [], "it has left in good order"
    parts.reporter.on_news(11, {"rank": 1, "kind": "closed"})
    parts.reporter.on_departure(11, "its process ended")
    assert parts.broken == [], "it had closed this comm"
    parts.reporter.on_departure(12, "its process ended")
    (error,) = parts.broken
    assert isinstance(error, PeerLostError)
    assert (error.rank, error.detail) == (2, "its process ended")


async def test_a_difference_names_both_sides(parts: Parts) -> None:
    sides = [{"op": "barrier()", "site": "a.py:1 in f"}, {}]
    parts.reporter.on_news(99, {"kind": "differs", "seq": 4, "jobs": [12, 10], "sides": sides})  # by the job's root
    (error,) = parts.broken
    assert isinstance(error, CollectiveMismatchError)
    assert error.args == (4, 2, "barrier()", 0, "a call that is no longer recorded", "a.py:1 in f", "")


# -- errors that are completed ----------------------------------------------------------------------------------------

FUSED = CollectiveMismatchError(4, 0, "the fused operation", 1, "another fused operation")
TEN = "all_reduce(float32[10], SUM)"
MERGED = CollectiveMismatchError(4, 0, f"{TEN}, merged into {FUSED.op}", 1, f"{TEN}, merged into {FUSED.other_op}")


def issued(parts: Parts, *numels: int) -> None:
    for seq, n in enumerate(numels, 4):
        parts.issue(AllReduce(torch.float32, n, ReduceOp.SUM), seq)


async def test_the_first_operation_that_differs_is_named(parts: Parts) -> None:
    peer = Parts()
    parts.line.answers[11] = peer.reporter.on_request
    issued(parts, 10, 20, 30, 40)
    issued(peer, 10, 20, 31, 41, 51)
    error = await parts.reporter.complete(FUSED)
    texts = [f"all_reduce(float32[{n}], SUM)" for n in (30, 31)]
    assert (error.seq, error.rank, error.op, error.other_rank, error.other_op) == (6, 0, texts[0], 1, texts[1])
    assert __file__ in error.site
    assert __file__ in error.other_site


async def test_operations_that_are_divided_otherwise(parts: Parts) -> None:
    peer = Parts()
    parts.line.answers[11] = peer.reporter.on_request
    for each, layout in ((parts, 1), (peer, 2)):
        each.issue(Barrier(), 4)
        each.issue(AllReduce(torch.float32, 9, ReduceOp.SUM, layout=layout), 5)
    error = await parts.reporter.complete(FUSED)
    assert error.seq == 5
    assert error.other_op == f"{error.op}, of other sizes or dtypes"


@pytest.mark.parametrize("theirs", [(10, 20), (10, 20, 30)])
async def test_of_equal_operations_the_first_is_named(parts: Parts, theirs: tuple[int, ...]) -> None:
    """The ranks have fused equal operations in other ways, or differ in what they do not announce."""
    peer = Parts()
    parts.line.answers[11] = peer.reporter.on_request
    issued(parts, 10, 20)
    issued(peer, *theirs)
    error = await parts.reporter.complete(FUSED)
    assert error.args[:5] == MERGED.args[:5]
    assert __file__ in error.site
    assert __file__ in error.other_site
    sent_alone = CollectiveMismatchError(4, 0, "a batch of 2 from all_reduce(float32[10], SUM) on", 1, FUSED.other_op)
    error = await parts.reporter.complete(sent_alone)
    assert error.args[:5] == (4, 0, sent_alone.op, 1, MERGED.other_op)


BAD_REPLIES: list[Any] = [
    {},
    {"op": "barrier()"},
    {"op": "barrier()", "site": "", "signature": 5},
    {"op": "barrier()", "site": "", "signature": None, "following": [{}]},
    {"op": "barrier()", "site": "", "signature": [1, 2], "following": 7},
]


@pytest.mark.parametrize("reply", [None, *BAD_REPLIES], ids=str)
async def test_a_reply_that_cannot_be_read_keeps_the_error(parts: Parts, reply: Any) -> None:
    if reply is not None:
        parts.line.answers[11] = lambda question: reply
    issued(parts, 10, 20)
    error = await parts.reporter.complete(FUSED)
    assert error.args[:5] == FUSED.args[:5]
    assert __file__ in error.site
    assert error.other_site == ""


async def test_a_reply_is_read_as_far_as_possible(parts: Parts) -> None:
    peer = Parts()
    issued(parts, 10, 20)
    issued(peer, 10, 21)

    def answer(question: JsonObject) -> JsonObject:
        reply = peer.reporter.on_request(question)
        return reply | {"following": [{"op": "barrier()"}, *reply["following"]]}

    parts.line.answers[11] = answer
    error = await parts.reporter.complete(FUSED)
    assert error.args[:5] == MERGED.args[:5]
    assert __file__ in error.other_site


async def test_operations_without_a_number_are_not_compared(parts: Parts) -> None:
    """Under agreed ordering each rank issues them in an order of its own."""
    peer = Parts()
    parts.line.answers[11] = peer.reporter.on_request
    for each, op in ((parts, REDUCE), (peer, Barrier())):
        each.in_flight.works = {each.work(op, UNNUMBERED): 0}
        issued(each, 10 if each is parts else 20)
    error = await parts.reporter.complete(CollectiveMismatchError(UNNUMBERED, 0, "mine", 1, "theirs"))
    assert error.args[:5] == (UNNUMBERED, 0, "mine", 1, "theirs")


@pytest.mark.parametrize("number", [4, 5])
async def test_messages_are_not_taken_for_the_collectives_of_their_numbers(parts: Parts, number: int) -> None:
    peer = Parts()
    parts.line.answers[11] = peer.reporter.on_request
    issued(parts, 10, 20)
    issued(peer, 10, 21)
    sent, received = Send(torch.float32, 2, 0, 0), Recv(torch.float32, 3, 1, 0)
    parts.issue(received, 4)
    error = await parts.reporter.complete(CollectiveMismatchError(number, 1, str(sent), 0, str(received)))
    assert error.args[:5] == (number, 1, str(sent), 0, str(received))
    assert error.site == "", "the call of the other rank has another number"
    assert (__file__ in error.other_site) == (number == 4)


@pytest.mark.ranks(3, backend="shm")
async def test_the_operation_of_a_scope_that_differs_is_named_on_all_ranks(comm: Comm) -> None:
    async with new_comm("shm", name="differs", timeout=60) as doomed:
        await doomed.barrier()
        with pytest.raises(CollectiveMismatchError) as caught:
            async with doomed.coalesce() as batch:
                doomed.all_reduce(torch.ones(2))
                doomed.all_reduce(torch.ones(3))
                if comm.rank == 1:
                    doomed.all_reduce(torch.ones(5))
                else:
                    doomed.all_reduce(torch.ones(4))
                doomed.all_reduce(torch.ones(6))
            await batch
        error = caught.value
        assert error.seq == 3
        sides = {error.rank: (error.op, error.site), error.other_rank: (error.other_op, error.other_site)}
        wrong, right = sides.pop(1), next(iter(sides.values()))
        assert (wrong[0], right[0]) == ("all_reduce(float32[5], SUM)", "all_reduce(float32[4], SUM)")
        assert __file__ in wrong[1]
        assert __file__ in right[1]
        assert wrong[1] != right[1]
    await comm.barrier()


# -- on real channels -------------------------------------------------------------------------------------------------


async def test_states_of_the_others() -> None:
    async with loopback_world(3) as comms:
        works = [comm.barrier() for comm in comms[:2]]
        reporter = comms[0]._session.reporter
        assert reporter is not None
        states = await reporter.states([1, 2], 10)
        assert [states[rank].collectives for rank in (1, 2)] == [1, 0]
        assert await reporter.request([], 10, what="state") == {}
        comms[2].barrier()
        await asyncio.gather(*works)


async def test_asking_a_channel_that_has_ended() -> None:
    async with loopback_world(2) as (a, b):
        pass
    reporter = a._session.reporter
    assert reporter is not None
    async with asyncio.timeout(10):
        assert await reporter.request([1], 60, what="state") == {}
    del b


async def test_a_comm_that_was_dropped_is_not_kept_alive() -> None:
    async with loopback_world(2) as (a, b):
        making = asyncio.ensure_future(b.dup("child")._connect())
        child = await a.dup("child")
        other = await making
        reporter = child._session.reporter
        assert reporter is not None
        reference = reporter._submitter
        with pytest.warns(ResourceWarning, match="never closed"):
            del child
            gc.collect()
        for _ in range(1000):
            if reference() is None:
                break
            await asyncio.sleep(0.001)
            gc.collect()
        assert reference() is None
        other.abort("its peer is gone")
        await other.aclose()


async def test_a_split_comm_has_ranks_of_its_own() -> None:
    async with loopback_world(3) as comms:

        async def part(comm: Comm) -> Comm | None:
            return await comm.split([2, 1], "turned")

        children = await asyncio.gather(*(part(comm) for comm in comms[1:]))
        one, two = children
        assert one is not None
        assert two is not None
        assert isinstance(one._session.identity.job.channel, ControlChannel)
        work = one.barrier()
        two.abort("enough")  # rank 2 of the job, rank 0 here
        with pytest.raises(AbortedError, match="aborted by rank 0: enough"):
            await work
        await asyncio.gather(*(comm.barrier() for comm in comms))
        await asyncio.gather(one.aclose(), two.aclose())


async def test_how_many_collectives_are_done(parts: Parts) -> None:
    parts.in_flight.works = dict.fromkeys([parts.issue(REDUCE, 2), parts.issue(Send(torch.float32, 3, 1, 0), 0)], 0)
    assert parts.reporter.on_request({"what": "state"})["finished"] == 2, "of three, of which one is not"
