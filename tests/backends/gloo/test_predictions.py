"""Collectives that were predicted: their data go ahead of the frames, or without any."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from asynccomm import CollectiveMismatchError, Comm, ReduceOp, Work, new_comm
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo import disputes
from asynccomm.backends.gloo.collectives import GlooCollectives
from asynccomm.backends.gloo.frames import PAIR, CarriedReduce, Frame, heading_of
from asynccomm.backends.gloo.payload_collectives import PayloadExchange
from asynccomm.backends.gloo.predictions import REMEMBERED, Predictor
from asynccomm.backends.gloo.torch_gloo import ALARM_TAG, GlooGroups
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.errors import BackendError
from asynccomm.ops import AllReduce, Broadcast, Call
from asynccomm.ops.validation import CommInfo
from tests.sampling import amount, some
from tests.waiting import until

A, B, C = b"a", b"b", b"c"


def called(predictor: Predictor, *headings: bytes) -> list[bool]:
    """Which of ``headings`` were predicted."""
    found = []
    for heading in headings:
        prediction = predictor.predict()
        found.append(prediction is not None and prediction.heading == heading)
        predictor.record(heading, True)
    return found


def test_a_call_is_predicted_once_it_has_come_twice_in_its_place() -> None:
    assert called(Predictor(), A, A, A, A, A) == [False, False, False, False, True]


def test_a_program_that_is_repeated_is_predicted() -> None:
    predictor = Predictor()
    called(predictor, *[A, A, B, C] * 3)
    assert called(predictor, A, A, B, C, A, A) == [True] * 6


def test_another_call_has_to_come_twice_before_it_is_predicted() -> None:
    predictor = Predictor()
    called(predictor, *[A, A, B] * 3)
    assert called(predictor, A, A, C) == [True, True, False]
    called(predictor, A, A, B, A, A, C, A, A)
    assert predictor.predict() is None
    called(predictor, C, A, A)
    prediction = predictor.predict()
    assert prediction is not None
    assert prediction.heading == C


def test_equal_calls_make_equal_predictions_however_many() -> None:
    one, other = Predictor(), Predictor()
    generator = random.Random(5)
    calls = [b"%d" % generator.randrange(100) for _ in range(3 * REMEMBERED)]
    for heading in calls:  # only one of the two learns which contributions are long
        other.note_long(heading)
        assert one.predict() == other.predict()
        one.record(heading, True)
        other.record(heading, True)


class FakeWork:
    """An operation of gloo's that ends when the test says so."""

    def __init__(self) -> None:
        self.future: Any = torch.futures.Future()

    def get_future(self) -> Any:
        return self.future

    def wait(self) -> None:
        self.future.wait()


class FakeGloo:
    """Notes the operations that are handed to it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, FakeWork, tuple[Any, ...]]] = []
        self.messages: list[tuple[str, FakeWork, tuple[Any, ...]]] = []
        self.poisoned = False

    def __getattr__(self, name: str) -> Callable[..., FakeWork]:
        def call(*args: Any, **_: Any) -> FakeWork:
            work = FakeWork()
            if name in ("send", "recv"):
                self.messages.append((name, work, args))
                if self.poisoned:
                    raise RuntimeError("closed")
            else:
                self.calls.append((name, work, args))
            return work

        return call

    def is_native(self, *_: object) -> bool:
        return True

    def poison(self) -> None:
        self.poisoned = True
        for _, work, _ in self.messages:
            if not work.future.done():
                work.future.set_exception(RuntimeError("closed"))


class FakeFrames:
    """Notes the frames that are to be sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[Frame, Callable[[Exception | None], object]]] = []

    def begin(self, frame: Frame, done: Callable[[Exception | None], object]) -> None:
        self.calls.append((frame, done))

    def settle(self) -> None:
        pass


class FakeOfOurs:
    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.settled = False

    def settle(self, error: object) -> None:
        self.settled = True


class Rank:
    """Rank 0 of 2, whose gloo is the test's."""

    def __init__(self) -> None:
        self.gloos = [FakeGloo() for _ in range(3)]
        self.messages_of_ranks, self.small, self.large = self.gloos
        self.frames = FakeFrames()
        self.errors: list[Exception] = []
        self.disputes: list[Any] = []  # what this rank has told of its call
        gloos: Any = GlooGroups(*self.gloos)  # type: ignore[arg-type]
        frames: Any = self.frames
        exchange = PayloadExchange(0, 2, OrderedExecutor("unused", 1), lambda *_: None)
        self.collectives = GlooCollectives(gloos, "test", 0, 2, frames, exchange, self.failed, self.failed)
        self.seq = 0

    def failed(self, submission: Submission, exc: Exception) -> None:
        self.errors.append(exc)

    def call(self, n: int, root: int | None = None) -> FakeOfOurs:
        group = CommInfo("t", 0, 2, torch.device("cpu"))
        tensor = torch.ones(n)
        call = AllReduce.of(group, tensor, ReduceOp.SUM) if root is None else Broadcast.of(group, tensor, root)
        work: Any = FakeOfOurs(self.seq)
        self.seq += 1
        self.collectives.submit([Submission(call, work)])
        return work  # type: ignore[no-any-return]

    def frames_arrive(self, number: int, theirs: Frame | None = None) -> None:
        """Rank 1 sends the same as rank 0 for frame ``number``, or something else."""
        frame, done = self.frames.calls[number]
        frame.put(1, bytes((theirs or frame).packed(0)))  # a copy, as the network makes
        done(None)

    def data_arrive(self, number: int) -> None:
        self.small.calls[number][1].future.set_result(None)

    def usual(self, root: int | None = None) -> int:
        """Call the same until it is predicted; returns how many calls it took."""
        for number in range(4):
            self.call(300_000, root)
            self.frames_arrive(number)
            self.data_arrive(number)
        return 4

    async def alarm(self, place: int) -> None:
        """Rank 1 raises an alarm, and rank 0 takes it."""
        await until(lambda: self.messages("recv"))
        listening = len(self.messages("recv"))
        _, work, (text, *_) = self.messages("recv")[-1]
        text.copy_(torch.tensor([place]).view(torch.uint8))
        work.future.set_result(None)
        await until(lambda: len(self.messages("recv")) > listening)

    def messages(self, name: str) -> list[tuple[str, FakeWork, tuple[Any, ...]]]:
        return [
            message for message in self.messages_of_ranks.messages if message[0] == name and message[2][-1] == ALARM_TAG
        ]

    def described(self) -> tuple[int, str]:
        """Number and name of the call that rank 0 tells the others about."""
        ((called, *_),) = self.disputes
        ((number, text, _),) = called
        return number, text.partition("(")[0]

    def close(self) -> None:
        self.collectives.end()
        for _, work, _ in self.messages("send"):
            if not work.future.done():
                work.future.set_result(None)
        self.collectives.close(10)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank()
    monkeypatch.setattr(
        disputes.Dispute, "begin", lambda dispute, name: made.disputes.append(json.loads(dispute._text))
    )
    yield made
    made.close()


def frame_of(n: int, place: int) -> Frame:
    """That of rank 1, for an all_reduce of ``n``."""
    work: Any = FakeOfOurs(place)
    group = CommInfo("t", 1, 2, torch.device("cpu"))
    submission = Submission(AllReduce.of(group, torch.ones(n), ReduceOp.SUM), work)
    frame = Frame(1, 2)
    frame.fill(submission, place, heading_of(submission))
    return frame


def test_what_is_predicted_and_needs_every_rank_has_no_frame(rank: Rank) -> None:
    usual = rank.usual()
    work = rank.call(300_000)
    assert len(rank.frames.calls) == usual
    assert len(rank.small.calls) == usual + 1, "is handed over at once"
    assert not work.settled
    rank.data_arrive(usual)
    assert work.settled
    assert not rank.errors


def test_a_short_call_travels_in_its_frame_even_if_it_was_predicted(rank: Rank) -> None:
    for number in range(8):
        work = rank.call(3)
        assert len(rank.frames.calls) == number + 1
        rank.frames_arrive(number)
        assert work.settled
    assert not rank.small.calls
    rank.call(4)
    assert not rank.messages("send"), "every rank sends a frame anyway"


def test_what_is_predicted_and_has_a_root_is_ahead_of_its_frames(rank: Rank) -> None:
    usual = rank.usual(root=0)
    works = [rank.call(300_000, 0), rank.call(300_000, 0)]
    assert len(rank.small.calls) == usual + 1, "frames are under way, and ranks may not have agreed on that call"
    rank.data_arrive(usual)
    assert not works[0].settled, "its frames are not here"
    rank.frames_arrive(usual)
    assert works[0].settled
    rank.frames_arrive(usual + 1)
    assert not works[1].settled
    rank.data_arrive(usual + 1)
    assert works[1].settled


def test_frames_may_come_before_the_data(rank: Rank) -> None:
    usual = rank.usual(root=0)
    work = rank.call(300_000, 0)
    rank.frames_arrive(usual)
    assert not work.settled
    rank.data_arrive(usual)
    assert work.settled


def test_what_is_not_predicted_waits_for_its_frames_and_raises_an_alarm(rank: Rank) -> None:
    usual = rank.usual()
    assert not rank.messages("send")
    work = rank.call(300_001)
    assert len(rank.small.calls) == usual
    ((_, _, (text, *_)),) = rank.messages("send")
    assert text.view(torch.int64).item() == usual
    rank.frames_arrive(usual)
    rank.data_arrive(usual)
    assert work.settled


def test_what_has_no_frame_waits_for_the_frames_before_it_and_keeps_its_place(rank: Rank) -> None:
    for root in (0, None, None) * 4:
        frames = len(rank.frames.calls)
        rank.call(300_000, root)
        if len(rank.frames.calls) > frames:
            rank.frames_arrive(frames)
        rank.data_arrive(-1)
    frames, before = len(rank.frames.calls), len(rank.small.calls)

    def started() -> list[str]:
        return [name for name, *_ in rank.small.calls[before:]]

    rank.call(300_000, 0)
    works = [rank.call(300_000), rank.call(300_000)]
    rank.call(300_000, 0)
    assert started() == ["broadcast"]
    assert len(rank.frames.calls) == frames + 2
    rank.frames_arrive(frames)
    assert started() == ["broadcast", "all_reduce", "all_reduce"]
    rank.data_arrive(-1)
    assert [work.settled for work in works] == [False, True]
    rank.frames_arrive(frames + 1)
    assert started() == ["broadcast", "all_reduce", "all_reduce", "broadcast"]
    assert not rank.errors


async def test_an_alarm_brings_a_frame_for_what_had_none(rank: Rank) -> None:
    usual = rank.usual()
    work = rank.call(300_000)
    await rank.alarm(usual)
    assert len(rank.frames.calls) == usual + 1
    rank.frames_arrive(usual, frame_of(300_001, usual))
    rank.small.calls[usual][1].future.set_exception(RuntimeError("closed"))
    assert not work.settled
    assert not rank.errors, "which of the ranks differ is about to be known"
    assert rank.described() == (usual, "all_reduce")


async def test_an_alarm_for_a_call_to_come_makes_it_send_its_frame(rank: Rank) -> None:
    usual = rank.usual()
    rank.call(300_000)
    rank.data_arrive(usual)
    await rank.alarm(usual + 1)
    rank.call(300_000)
    assert len(rank.frames.calls) == usual + 1
    assert len(rank.small.calls) == usual + 1


async def test_an_alarm_for_what_is_past_changes_nothing(rank: Rank) -> None:
    usual = rank.usual()
    rank.call(300_000)
    rank.data_arrive(usual)
    await rank.alarm(1)
    await rank.alarm(usual)
    rank.call(300_000)
    assert len(rank.frames.calls) == usual


async def test_a_later_frame_serves_as_well(rank: Rank) -> None:
    usual = rank.usual()
    rank.call(300_000)
    rank.call(300_001)
    assert len(rank.frames.calls) == usual + 1
    await rank.alarm(usual)
    assert len(rank.frames.calls) == usual + 1
    rank.frames_arrive(usual, frame_of(1002, usual))
    assert rank.described()[0] == usual, "where the ranks begin to differ"


async def test_an_alarm_without_a_difference_is_an_error(rank: Rank) -> None:
    usual = rank.usual()
    rank.call(300_000)
    await rank.alarm(usual)
    rank.frames_arrive(usual)
    (error,) = rank.errors
    assert "others had not called all_reduce" in str(error)


async def test_an_alarm_is_passed_on_once(rank: Rank) -> None:
    usual = rank.usual()
    rank.call(300_000)
    rank.data_arrive(usual)
    await rank.alarm(usual + 1)
    await rank.alarm(usual + 1)
    rank.call(300_001)
    assert len(rank.messages("send")) == 1


def test_data_that_fail_end_the_comm(rank: Rank) -> None:
    usual = rank.usual()
    work = rank.call(300_000)
    rank.small.calls[usual][1].future.set_exception(RuntimeError("closed"))
    assert [str(error) for error in rank.errors] == ["closed"]
    assert not work.settled


Calls = dict[str, Callable[[Comm, int], Work[Any]]]

CALLS: Calls = {
    "all_reduce": lambda c, n: c.all_reduce(torch.ones(n)),
    "short": lambda c, n: c.all_reduce(torch.ones(3)),
    "max": lambda c, n: c.all_reduce(torch.ones(n), ReduceOp.MAX),
    "longer": lambda c, n: c.all_reduce(torch.ones(n + 1)),
    "several": lambda c, n: c.all_reduce_coalesced([torch.ones(n), torch.ones(n)]),
    "root": lambda c, n: c.broadcast(torch.ones(n), c.size - 1),
    "gathered": lambda c, n: c.all_gather_single(None, torch.ones(n)),
    "scattered": lambda c, n: c.reduce_scatter_single(None, torch.ones(n * c.size)),
    "objects": lambda c, n: c.all_gather_object("x" * n),
    "barrier": lambda c, n: c.barrier(),
}


@pytest.mark.parametrize(
    ("usual", "other"),
    some(
        list(
            itertools.product(
                ["all_reduce", "short", "several", "root", "gathered", "scattered", "barrier"],
                ["longer", "max", "objects", "root"],
            )
        ),
        10,
    ),
)
@pytest.mark.ranks(3, backend="gloo", timeout=60)
async def test_one_rank_that_leaves_the_usual_program(comm: Comm, usual: str, other: str) -> None:
    if usual == other:
        usual = "barrier"
    async with new_comm("gloo", name="usual", timeout=30) as program:
        for _ in range(5):
            await CALLS[usual](program, 3000)
        odd = program.rank == program.size - 1
        work = CALLS[other if odd else usual](program, 3000)
        if program.rank == 0:  # goes on, with what has a frame
            later = CALLS["objects"](program, 5000)
    error = work.exception()
    assert isinstance(error, CollectiveMismatchError), repr(error)
    mine = list(error.args[:5])
    assert mine[0] == 5
    assert all(said == mine for said in await comm.all_gather_object(mine)), "all are told the same"
    assert comm.rank or isinstance(later.exception(), CollectiveMismatchError)


@pytest.mark.ranks(3, backend="gloo", timeout=60)
async def test_a_rank_that_calls_late_is_told_as_well(comm: Comm) -> None:
    async with new_comm("gloo", name="usual", timeout=30) as program:
        for _ in range(5):
            await program.all_reduce(torch.ones(3000))
        if program.rank == 0:
            work = program.all_reduce(torch.ones(3001))
        await comm.barrier()
        if program.rank == 1:
            work = program.all_reduce(torch.ones(3000))
        await comm.barrier()
        if program.rank == 2:
            work = program.all_reduce(torch.ones(3000))
    error = work.exception()
    assert isinstance(error, CollectiveMismatchError), repr(error)
    assert error.args[:3] == (5, 0, "all_reduce(float32[3001], SUM)")


@pytest.mark.ranks(some([3, 2], 1), backend="gloo", timeout=120)
async def test_programs_that_change(comm: Comm) -> None:
    """Loops of different calls, awaited at once or later: every result is that of its own call."""
    generator = random.Random(11)
    total = sum(range(1, comm.size + 1))
    for _ in range(amount(30, 15)):
        loop = [(generator.randrange(4), generator.choice([10, 3000, 3001, 300_000])) for _ in range(3)]
        awaited = generator.random() < 0.7
        works: list[tuple[Work[Any], torch.Tensor, float]] = []
        for kind, n in loop * 4:
            mine = torch.full((n,), float(comm.rank + 1))
            match kind:
                case 0:
                    works.append((comm.all_reduce(mine), mine, float(total)))
                case 1:
                    works.append((comm.broadcast(mine, n % comm.size), mine, float(n % comm.size + 1)))
                case 2:
                    output = torch.empty(n)
                    inputs = torch.full((n * comm.size,), float(comm.rank + 1))
                    works.append((comm.reduce_scatter_single(output, inputs, ReduceOp.MAX), output, float(comm.size)))
                case _:
                    other = mine.clone()
                    works.append((comm.all_reduce_coalesced([mine, other]), other, float(total)))
            if awaited:
                await works[-1][0]
        for work, tensor, value in works:
            await work
            assert tensor.eq(value).all()


class Exchanged:
    """An all_reduce of two ones as an exchange of ``rank``."""

    def __init__(self, rank: Rank) -> None:
        self.tensor = torch.ones(2)
        self.over = 0
        self.described = 0
        self._seq = rank.seq
        kind = CarriedReduce.of(self.describe(), 2)
        assert kind is not None
        self.taken = rank.collectives.exchange(kind, self.tensor, rank.seq, self.describe, self.end)
        rank.seq += self.taken

    def describe(self) -> Submission:
        self.described += 1
        work: Any = FakeOfOurs(self._seq)
        group = CommInfo("t", 0, 2, torch.device("cpu"))
        return Submission(AllReduce.of(group, self.tensor, ReduceOp.SUM), work)

    def end(self) -> None:
        self.over += 1


def test_an_exchange_has_the_frame_of_a_call(rank: Rank) -> None:
    rank.call(2)
    rank.call(2)
    step = Exchanged(rank)
    usual = Frame(0, 2)
    usual.fill(step.describe(), 2, heading_of(step.describe()))
    assert rank.frames.calls[2][0].packed(1) == usual.packed(1)
    theirs = frame_of(2, 2)
    for number in range(3):
        assert step.over == 0, "the earlier calls are not over"
        rank.frames_arrive(number, theirs if number == 2 else None)
    assert step.taken
    assert step.over == 1
    assert step.tensor.tolist() == [2.0, 2.0]
    assert step.described == 3, "described for nothing else"
    rank.call(2)
    rank.frames_arrive(3)
    assert not rank.errors


def test_an_exchange_is_submitted_where_a_frame_may_be_left_out(rank: Rank) -> None:
    rank.usual()
    frames = len(rank.frames.calls)
    assert not Exchanged(rank).taken
    assert len(rank.frames.calls) == frames
    rank.call(300_000)  # as predicted still
    assert len(rank.frames.calls) == frames


def test_an_exchange_is_submitted_behind_collectives_that_wait(rank: Rank) -> None:
    group, tensor = CommInfo("t", 0, 2, torch.device("cpu")), torch.ones(3)
    for seq in range(2):  # the second waits for the memory
        work: Any = FakeOfOurs(seq)
        rank.collectives.submit([Submission(AllReduce.of(group, tensor, ReduceOp.SUM), work)])
    assert not Exchanged(rank).taken


def test_an_exchange_that_meets_another_call_is_disputed(rank: Rank) -> None:
    step = Exchanged(rank)
    rank.frames_arrive(0, frame_of(3, 0))
    assert rank.described() == (0, "all_reduce")
    assert step.over == 0
    assert step.tensor.tolist() == [1.0, 1.0]


def test_an_exchange_fails_with_its_frames(rank: Rank) -> None:
    step = Exchanged(rank)
    rank.frames.calls[0][1](BackendError("rank 1: lost"))
    assert [str(error) for error in rank.errors] == ["rank 1: lost"]
    assert step.over == 0


def test_what_is_no_exchange() -> None:
    group, tensor, work = CommInfo("t", 0, 2, torch.device("cpu")), torch.ones(2), FakeOfOurs(0)

    def kind(call: Call) -> CarriedReduce | None:
        return CarriedReduce.of(Submission(call, work), 2)  # type: ignore[arg-type]

    assert kind(AllReduce.of(group, tensor, ReduceOp.MAX)) is not None
    assert kind(AllReduce.of(group, tensor, ReduceOp.AVG)) is None
    assert kind(AllReduce.of(group, tensor, ReduceOp.SUM, torch.ones(2))) is None
    assert kind(AllReduce.of(group, tensor.bfloat16(), ReduceOp.SUM)) is None
    assert kind(AllReduce.of(group, torch.ones(0), ReduceOp.SUM)) is None
    assert kind(AllReduce.of(group, torch.ones(2, 3).t(), ReduceOp.SUM)) is None
    assert kind(AllReduce.of(group, torch.ones(PAIR // 4), ReduceOp.SUM)) is not None
    assert kind(AllReduce.of(group, torch.ones(PAIR // 4 + 1), ReduceOp.SUM)) is None
    assert kind(Broadcast.of(group, tensor, 0)) is None
