"""Collectives whose data are handed to gloo ahead of their frames."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynccomm import CollectiveMismatchError, Comm, ReduceOp, Work, new_comm
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.ahead import REMEMBERED, Ahead, Expected
from asynccomm.backends.gloo.collectives import Collectives
from asynccomm.backends.gloo.exchange import Exchange
from asynccomm.backends.gloo.torch_gloo import LARGE, Gloos
from asynccomm.backends.lanes import Lanes
from asynccomm.checks import Group
from asynccomm.ops import AllReduce, Call

A, B, C = b"a", b"b", b"c"


def called(expected: Expected, *headings: bytes) -> list[bool]:
    return [expected.called(heading) for heading in headings]


def test_a_call_that_is_repeated_is_expected() -> None:
    assert called(Expected(), A, A, A) == [False, True, True]


def test_a_program_that_is_repeated_is_expected() -> None:
    expected = Expected()
    called(expected, A, A, B, C, A, A)
    assert called(expected, B, C, A, A, B) == [True] * 5


def test_what_is_called_otherwise_is_expected_so_the_next_time() -> None:
    expected = Expected()
    called(expected, A, A, B, A, A)
    assert called(expected, C) == [False]
    called(expected, A, A)
    assert called(expected, C) == [True]


def test_equal_calls_make_equal_expectations_however_many() -> None:
    one, other = Expected(), Expected()
    generator = random.Random(5)
    calls = [b"%d" % generator.randrange(100) for _ in range(3 * REMEMBERED)]
    for heading in calls:  # only one of the two learns which calls move data
        other.moves(heading)
        assert one.called(heading) is other.called(heading)


def test_data_and_frames_make_it_over() -> None:
    over: list[str] = []
    ahead = Ahead(lambda: over.append("over"), lambda exc: over.append(str(exc)))
    ahead.done()
    assert not over
    ahead.done()
    assert over == ["over"]


def test_data_that_fail_after_a_difference_are_not_reported() -> None:
    failed: list[str] = []
    ahead = Ahead(lambda: None, lambda exc: failed.append(str(exc)))
    ahead.failed(RuntimeError("first"))
    ahead.disputed()
    ahead.failed(RuntimeError("second"))
    assert failed == ["first"]


class FakeWork:
    """An operation of gloo's that ends when the test says so."""

    def __init__(self) -> None:
        self.future: Any = torch.futures.Future()

    def get_future(self) -> Any:
        return self.future


class FakeGloo:
    """Notes the operations that are handed to it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, FakeWork, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., FakeWork]:
        def call(*args: Any, **_: Any) -> FakeWork:
            work = FakeWork()
            self.calls.append((name, work, args))
            return work

        return call


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
        self.frames, self.small, self.large = self.gloos
        self.errors: list[Exception] = []
        gloos: Any = Gloos(*self.gloos)  # type: ignore[arg-type]
        exchange = Exchange(0, 2, Lanes("unused", 1), lambda *_: None)
        self.collectives = Collectives(gloos, 0, 2, exchange, self.failed, self.failed)
        self.seq = 0

    def failed(self, submission: Submission, exc: Exception) -> None:
        self.errors.append(exc)

    def call(self, n: int) -> FakeOfOurs:
        group = Group("t", 0, 2, torch.device("cpu"))
        call: Call = AllReduce.of(group, torch.ones(n), ReduceOp.SUM)
        work: Any = FakeOfOurs(self.seq)
        self.seq += 1
        self.collectives.submit([Submission(call, work)])
        return work  # type: ignore[no-any-return]

    def frames_arrive(self, number: int, *, of_another_call: bool = False) -> None:
        """Rank 1 sends the same as rank 0 for frame ``number``, or something else."""
        _, work, (received, sent) = self.frames.calls[number]
        received.copy_(sent)
        if of_another_call:
            received[len(received) // 2 + 8] += 1
        work.future.set_result(None)


def test_the_first_call_waits_for_its_frames_and_the_next_does_not() -> None:
    rank = Rank()
    first = rank.call(1000)
    assert not rank.small.calls
    rank.frames_arrive(0)
    assert [name for name, *_ in rank.small.calls] == ["all_reduce"]
    rank.small.calls[0][1].future.set_result(None)
    assert first.settled
    second = rank.call(1000)
    assert len(rank.small.calls) == 2, "is handed over at once"
    rank.small.calls[1][1].future.set_result(None)
    assert not second.settled, "its frames are not here"
    rank.frames_arrive(1)
    assert second.settled
    assert not rank.errors


def warm() -> Rank:
    """A rank that has called all_reduce of 1000, and expects it again."""
    rank = Rank()
    rank.call(1000)
    rank.frames_arrive(0)
    rank.small.calls[0][1].future.set_result(None)
    return rank


def test_frames_may_come_before_the_data() -> None:
    rank = warm()
    work = rank.call(1000)
    rank.frames_arrive(1)
    assert not work.settled
    rank.small.calls[1][1].future.set_result(None)
    assert work.settled


@pytest.mark.parametrize("n", [1001, LARGE])
def test_what_is_not_expected_waits_for_its_frames(n: int) -> None:
    rank = warm()
    rank.call(n)
    assert len(rank.small.calls) == 1
    assert not rank.large.calls


def test_nothing_is_handed_over_while_frames_are_under_way() -> None:
    """The ranks may not have agreed on the calls that the expectation comes from."""
    rank = warm()
    rank.call(1001)
    rank.call(1001)
    assert len(rank.small.calls) == 1
    rank.frames_arrive(1)
    assert len(rank.small.calls) == 2
    rank.frames_arrive(2)
    assert len(rank.small.calls) == 3, "in the order of the frames"


def test_what_is_large_waits_for_its_frames() -> None:
    """The group for large transfers stays free to tell of a difference."""
    rank = Rank()
    for number in range(2):
        rank.call(LARGE)
        assert len(rank.large.calls) == number
        rank.frames_arrive(number)
        rank.large.calls[number][1].future.set_result(None)


def test_frames_that_differ_are_told_beside_data_that_never_come() -> None:
    rank = warm()
    work = rank.call(1000)
    rank.frames_arrive(1, of_another_call=True)
    assert [name for name, *_ in rank.large.calls] == ["all_gather_single"]
    rank.small.calls[1][1].future.set_exception(RuntimeError("closed"))
    assert not work.settled
    assert not rank.errors, "which of the ranks differ is about to be known"


def test_data_that_fail_before_the_frames_end_the_comm() -> None:
    rank = warm()
    work = rank.call(1000)
    rank.small.calls[1][1].future.set_exception(RuntimeError("closed"))
    assert [str(error) for error in rank.errors] == ["closed"]
    rank.frames_arrive(1)
    assert not work.settled


Calls = dict[str, Callable[[Comm, int], Work[Any]]]

CALLS: Calls = {
    "all_reduce": lambda c, n: c.all_reduce(torch.ones(n)),
    "max": lambda c, n: c.all_reduce(torch.ones(n), ReduceOp.MAX),
    "longer": lambda c, n: c.all_reduce(torch.ones(n + 1)),
    "several": lambda c, n: c.all_reduce_coalesced([torch.ones(n), torch.ones(n)]),
    "root": lambda c, n: c.broadcast(torch.ones(n), c.size - 1),
    "gathered": lambda c, n: c.all_gather_single(None, torch.ones(n)),
    "scattered": lambda c, n: c.reduce_scatter_single(None, torch.ones(n * c.size)),
    "objects": lambda c, n: c.all_gather_object("x" * n),
    "barrier": lambda c, n: c.barrier(),
}


@pytest.mark.parametrize("usual", ["all_reduce", "several", "root", "gathered", "scattered"])
@pytest.mark.parametrize("other", ["longer", "max", "objects", "barrier"])
@pytest.mark.ranks(3, backend="gloo", timeout=60)
async def test_one_rank_that_leaves_the_usual_program(comm: Comm, usual: str, other: str) -> None:
    async with new_comm("gloo", name="usual", timeout=30) as program:
        for _ in range(3):
            await CALLS[usual](program, 3000)
        odd = program.rank == program.size - 1
        work = CALLS[other if odd else usual](program, 3000)
    error = work.exception()
    assert isinstance(error, CollectiveMismatchError), repr(error)
    mine = list(error.args[:5])
    assert mine[0] == 3
    assert all(said == mine for said in await comm.all_gather_object(mine)), "all are told the same"


@pytest.mark.ranks([2, 3], backend="gloo", timeout=120)
async def test_programs_that_change(comm: Comm) -> None:
    """Loops of different calls, awaited at once or later: every result is that of its own call."""
    generator = random.Random(11)
    total = sum(range(1, comm.size + 1))
    for _ in range(30):
        loop = [(generator.randrange(4), generator.choice([10, 3000, 3001, 40000])) for _ in range(3)]
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
