"""Legs of operations: each lane in the order of the operations, lanes beside each other, all on any thread."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from asynccomm.backends.base import Backend, BackendContext, Submission
from asynccomm.backends.hierarchical.lane_calls import QuickStep
from asynccomm.backends.hierarchical.pipeline import LARGE, Lane, Leg, OpPlan, PiecePlan, Pipeline
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.errors import BackendError, BrokenError, PayloadError
from asynccomm.ops import AllReduce, Barrier, Call
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.waiting import until

GROUP = CommInfo("test", 0, 2, torch.device("cpu"))


class LaneBackend(Backend):
    """Keeps submissions until the test settles them."""

    name = "lane"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def __init__(self) -> None:
        self.submitted: list[Submission] = []
        self.awaited: list[Work[Any]] = []
        self.blocked: list[Work[Any]] = []

    @classmethod
    async def connect(cls, context: BackendContext) -> LaneBackend:
        raise NotImplementedError

    def submit(self, batch: Sequence[Submission]) -> None:
        self.submitted += batch

    def settle(self, number: int) -> None:
        self.submitted[number].work.settle(self.submitted[number].error)

    def before_await(self, work: Work[Any]) -> None:
        self.awaited.append(work)

    def before_block(self, work: Work[Any]) -> None:
        self.blocked.append(work)

    async def aclose(self) -> None: ...

    def abort(self) -> None: ...


class QuickLane:
    """Takes steps as the test says: over at once, not at all, or (None) begun."""

    def __init__(self, *taken: bool | None) -> None:
        self.taken = list(taken)
        self.calls: list[tuple[int, object, tuple[torch.Tensor, ...]]] = []
        self.steps: list[QuickStep] = []

    def begin(
        self,
        number: int,
        check: Callable[..., Call],
        tensors: tuple[torch.Tensor, ...],
        describe: Callable[[], Submission],
        over: Callable[[], object],
    ) -> QuickStep | bool:
        self.calls.append((number, check, tensors))
        taken = self.taken.pop(0)
        if taken is not None:
            return taken
        self.steps.append(QuickStep(describe().op, number, (torch.ones(2),), over))
        return self.steps[-1]


class Line:
    """A pipeline of three such lanes."""

    def __init__(self, quick: Any = None) -> None:
        self.up, self.across, self.down = LaneBackend(), LaneBackend(), LaneBackend()
        self.errors: list[BrokenError] = []
        self.over: list[int] = []
        self.mailbox = Mailbox(asyncio.get_running_loop())
        lanes = dict(zip(Lane, (self.up, self.across, self.down), strict=True))
        self.pipeline = Pipeline("test", self.mailbox, lanes, {Lane.UP: quick} if quick else {}, self.errors.append)

    def start(
        self, number: int, *lanes: Lane, call: Callable[[], Call] | None = None, tensor: torch.Tensor | None = None
    ) -> Work[Any]:
        legs = [Leg(lane, call or (lambda: Call(Barrier(), (), (), None))) for lane in lanes]
        return self.start_way(number, OpPlan([PiecePlan(legs)]), tensor)

    def start_way(self, number: int, way: OpPlan, tensor: torch.Tensor | None = None) -> Work[Any]:
        outer = AllReduce.of(GROUP, torch.ones(2) if tensor is None else tensor, ReduceOp.SUM)
        work: Work[Any] = Work(outer.op, number, self.mailbox, value=None, timeout=math.inf, on_settled=lambda _: None)
        self.pipeline.start(Submission(outer, work), way, lambda: self.over.append(number))
        return work

    def counts(self) -> tuple[int, int, int]:
        return len(self.up.submitted), len(self.across.submitted), len(self.down.submitted)


async def test_an_operation_takes_its_legs_one_after_the_other() -> None:
    line = Line()
    line.start(0, *Lane)
    assert line.counts() == (1, 0, 0)
    line.up.settle(0)
    assert line.counts() == (1, 1, 0)
    line.across.settle(0)
    assert line.counts() == (1, 1, 1)
    assert line.over == []
    line.down.settle(0)
    assert line.over == [0]


async def test_operations_are_on_different_lanes_at_the_same_time() -> None:
    line = Line()
    line.start(0, *Lane)
    line.start(1, *Lane)
    assert line.counts() == (2, 0, 0)
    line.up.settle(0)
    line.across.settle(0)
    line.up.settle(1)
    assert line.counts() == (2, 2, 1)


async def test_each_lane_keeps_the_order_of_the_operations() -> None:
    line = Line()
    line.start(0, *Lane)
    line.start(1, Lane.ACROSS)
    line.start(2, Lane.DOWN)
    assert line.counts() == (1, 0, 0)  # the others wait behind the first one
    line.up.settle(0)
    assert line.counts() == (1, 2, 0)
    line.across.settle(1)
    assert line.over == [1]
    assert line.counts() == (1, 2, 0)
    line.across.settle(0)
    assert [each.work.seq for each in line.down.submitted] == [0, 2]


async def test_two_legs_on_one_lane() -> None:
    line = Line()
    line.start(0, Lane.UP, Lane.UP)
    line.start(1, Lane.UP)
    assert line.counts() == (1, 0, 0)
    line.up.settle(0)
    assert [each.work.seq for each in line.up.submitted] == [0, 0, 1]


async def test_the_pieces_of_an_operation_end_together() -> None:
    line = Line()
    ends: list[str] = []
    barrier = Leg(Lane.UP, lambda: Call(Barrier(), (), (), None))
    plans = [PiecePlan([barrier], lambda: ends.append("one")), PiecePlan([], lambda: ends.append("none"))]
    line.start_way(0, OpPlan([*plans, PiecePlan([barrier])], lambda: ends.append("all")))
    assert line.counts() == (2, 0, 0)
    line.up.settle(1)
    assert ends == ["none"]
    line.up.settle(0)
    assert (ends, line.over) == (["none", "one", "all"], [0])


async def test_all_legs_carry_the_label_of_the_call_and_its_number() -> None:
    line = Line()
    line.start(5, Lane.UP)
    (leg,) = line.up.submitted
    assert leg.op.label.startswith("all_reduce #")
    assert leg.work.seq == 5
    assert [str(op) for op in leg.members] == ["all_reduce(float32[2], SUM)"]


async def test_a_call_that_cannot_be_made_breaks_the_comm() -> None:
    line = Line()

    def fails() -> Call:
        raise MemoryError("no more")

    line.start(0, Lane.UP, Lane.ACROSS, call=fails)
    line.start(1, Lane.UP)
    (error,) = line.errors
    assert isinstance(error, BackendError)
    assert "MemoryError: no more" in str(error)
    assert line.counts() == (0, 0, 0)
    assert line.over == []


async def test_an_error_of_a_leg_breaks_the_comm() -> None:
    line = Line()
    line.start(0, *Lane)
    line.up.submitted[0].error = PayloadError("refused")
    line.up.settle(0)
    assert [str(error) for error in line.errors] == ["hierarchical failed: PayloadError: refused"]
    assert line.counts() == (1, 0, 0)


async def test_no_leg_begins_after_the_end() -> None:
    line = Line()
    line.start(0, *Lane)
    line.pipeline.end()
    line.up.settle(0)
    assert line.counts() == (1, 0, 0)
    assert line.over == []


async def test_a_thread_leaves_its_event_to_the_one_at_work() -> None:
    line = Line()
    entered, leave = threading.Event(), threading.Event()

    def slow() -> Call:
        entered.set()
        assert leave.wait(10)
        return Call(Barrier(), (), (), None)

    line.start(0, Lane.UP)
    line.start(1, Lane.DOWN)
    working = threading.Thread(target=line.start, args=(2, Lane.ACROSS), kwargs={"call": slow})
    working.start()
    assert entered.wait(10)
    line.up.settle(0)  # returns, though the other thread is not through
    assert line.over == []
    leave.set()
    working.join()
    assert line.over == [0]


async def test_messages_and_legs_are_submitted_one_at_a_time() -> None:
    line = Line()
    entered, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def slow(batch: Sequence[Submission]) -> None:
        entered.set()
        assert leave.wait(10)
        order.append("leg")

    line.up.submit = slow  # type: ignore[method-assign]
    working = threading.Thread(target=line.start, args=(0, Lane.UP))
    working.start()
    assert entered.wait(10)
    line.pipeline.call(lambda: order.append("message"))
    assert order == []
    leave.set()
    working.join()
    assert order == ["leg", "message"]


async def test_a_leg_that_ends_in_its_submission() -> None:
    line = Line()

    def at_once(batch: Sequence[Submission]) -> None:
        for submission in batch:
            submission.work.settle()

    for lane in (line.up, line.across, line.down):
        lane.submit = at_once  # type: ignore[method-assign]
    line.start(0, *Lane)
    assert line.over == [0]


async def test_memory_of_legs_is_made_outside_of_inference_mode() -> None:
    line = Line()
    made: list[torch.Tensor] = []

    def call() -> Call:
        made.append(torch.ones(2))
        return Call(Barrier(), (), (), None)

    with torch.inference_mode():
        line.start(0, Lane.UP, call=call)
    assert not made[0].is_inference()


async def test_legs_that_copy_much_are_not_taken_on_the_event_loop() -> None:
    line = Line()
    threads: list[int] = []

    def call() -> Call:
        threads.append(threading.get_ident())
        return Call(Barrier(), (), (), None)

    line.start(0, Lane.UP, Lane.ACROSS, call=call, tensor=torch.empty(LARGE // 4 + 1))
    line.up.settle(0)
    await until(lambda: len(threads) == 2)
    assert threads[0] == threading.get_ident() != threads[1]
    line.pipeline.end()


async def test_a_waiting_task_drives_the_leg_under_way() -> None:
    line = Line()
    work = line.start(0, Lane.UP, Lane.DOWN)
    line.pipeline.before_await(work)
    assert line.up.awaited == [line.up.submitted[0].work]
    line.up.settle(0)
    line.pipeline.before_await(work)
    assert line.down.awaited == [line.down.submitted[0].work]
    line.down.settle(0)
    line.pipeline.before_await(work)  # over
    assert len(line.down.awaited) == 1


async def test_a_waiting_task_drives_the_leg_that_follows() -> None:
    line = Line()
    work = line.start(0, Lane.UP, Lane.DOWN)

    def settles(step: Work[Any]) -> None:
        step.settle()

    line.up.before_await = settles  # type: ignore[method-assign]
    line.pipeline.before_await(work)
    assert line.down.awaited == [line.down.submitted[0].work]


def barrier(group: object) -> Call:
    return Call(Barrier(), (), (), None)


async def test_a_quick_step_that_is_over_at_once_needs_no_submission() -> None:
    quick = QuickLane(True, True)
    line = Line(quick)
    legs = [Leg(Lane.UP, pytest.fail, (barrier, ())), Leg(Lane.DOWN, partial(barrier, None))]
    for number in range(2):
        line.start_way(number, OpPlan([PiecePlan(legs)]))
    assert quick.calls == [(0, barrier, ()), (1, barrier, ())]
    assert line.counts() == (0, 0, 2)
    line.down.settle(0)
    line.down.settle(1)
    assert line.over == [0, 1]


async def test_a_quick_step_ends_its_operation_and_stands_for_the_work_meanwhile() -> None:
    quick = QuickLane(None, False)
    line = Line(quick)
    leg = Leg(Lane.UP, partial(barrier, None), (barrier, ()))
    works = [line.start_way(number, OpPlan([PiecePlan([leg])], label=f"of {number}")) for number in range(2)]
    assert [step.op.label for step in (*quick.steps, *line.up.submitted)] == ["of 0", "of 1"]
    line.pipeline.before_await(works[0])
    assert line.up.awaited == quick.steps
    line.pipeline.before_block(works[0])
    assert line.up.blocked == [*quick.steps, line.up.submitted[0].work]
    assert line.over == []
    quick.steps[0].settle()
    assert line.over == [0]
    line.up.settle(0)
    assert line.over == [0, 1]


async def test_a_blocked_thread_needs_no_event_loop_for_its_operation_and_earlier_ones() -> None:
    line = Line()
    line.start(0, Lane.UP, Lane.DOWN)
    work = line.start(1, Lane.UP, Lane.DOWN)
    line.pipeline.before_block(work)
    assert line.up.blocked == [each.work for each in line.up.submitted]
    line.up.settle(0)
    line.up.settle(1)
    assert line.down.blocked == [each.work for each in line.down.submitted]
    line.down.settle(0)
    line.down.settle(1)
    line.start(2, Lane.UP)
    assert len(line.up.blocked) == 2


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_is_passed_on_and_breaks_the_comm(interrupt: type[BaseException]) -> None:
    line = Line()

    def interrupted() -> Call:
        raise interrupt

    with pytest.raises(interrupt):
        line.start(0, Lane.UP, call=interrupted)
    assert len(line.errors) == 1
