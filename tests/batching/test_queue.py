"""What one task has called and what was not sent yet."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.backends.base import Submission
from asynccomm.batching.plan import BatchLimiter
from asynccomm.batching.queue import DeferredQueue, current_owner
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.ops import AllReduce, Call, Send
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.sampling import examples

GROUP = CommInfo("t", 0, 2, torch.device("cpu"))


class Held:
    """A hold, whose items are written down when they are sent."""

    def __init__(self, meter: BatchLimiter | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.sent: list[list[Submission]] = []
        self.driver: Any = None  # of what is sent
        self.hold = DeferredQueue("owner", meter or BatchLimiter(), self._send)

    def _send(self, hold: DeferredQueue) -> None:
        assert hold is self.hold
        taken = hold.take()
        for item in taken:
            item.work.driver = self.driver
        self.sent.append(taken)

    def add(self, n: int = 1, *, message: bool = False) -> Submission:
        tensor = torch.zeros(n)
        call: Call = Send.of(GROUP, tensor, 1, 0) if message else AllReduce.of(GROUP, tensor, ReduceOp.SUM)
        work: Work[Any] = Work(
            call.op,
            UNNUMBERED,
            Mailbox(self.loop),
            value=None,
            timeout=1.0,
            on_settled=lambda work: None,
            driver=self.hold,
        )
        item = Submission(call, work)
        self.hold.works.append(work)
        self.hold.add(item)
        return item


@pytest.fixture
def held() -> Any:
    made: list[Held] = []

    def make(**limits: int) -> Held:
        made.append(Held(BatchLimiter(**limits)))
        return made[-1]

    yield make
    for one in made:
        one.loop.close()


def test_takes_everything(held: Any) -> None:
    h = held()
    items = [h.add(n) for n in range(3)]
    assert h.hold.count == 3
    assert h.hold.items == items
    assert h.hold.works == [item.work for item in items]
    h.hold.due = 5.0
    assert h.hold.take() == items
    assert h.hold.items == []
    assert h.hold.count == 3, "ever"
    assert h.hold.works == [item.work for item in items]
    assert h.hold.due == math.inf
    assert h.hold.take() == []
    assert h.sent == []


def test_takes_what_came_later(held: Any) -> None:
    h = held()
    items = [h.add() for _ in range(5)]
    assert h.hold.take(3) == items[3:]
    assert h.hold.items == items[:3]
    assert h.hold.count == 3, "what was given up was not held"
    assert h.hold.take(7) == []
    later = h.add()
    assert h.hold.take(3) == [later]
    assert h.hold.take() == items[:3]
    assert h.hold.take(3) == []
    last = [h.add(), h.add()]
    assert h.hold.take(4) == last[1:]
    assert h.hold.take(2) == last[:1], "all of it came later"


def test_a_part_that_is_no_callers(held: Any) -> None:
    h = held()
    item = h.add()
    h.hold.add(item)
    assert h.hold.count == 2
    assert len(h.hold.works) == 1


def numels(batches: list[list[Submission]]) -> list[list[int]]:
    return [[item.op.numel for item in batch] for batch in batches]  # type: ignore[attr-defined]


def test_sends_when_it_is_full(held: Any) -> None:
    h = held(max_ops=2)
    for n in range(5):
        h.add(n)
    assert numels(h.sent) == [[0, 1], [2, 3]]
    assert numels([h.hold.items]) == [[4]]
    assert h.hold.count == 5


def test_sends_before_what_has_no_room(held: Any) -> None:
    h = held(max_bytes=16)
    for n in (1, 2, 3, 100, 1):
        h.add(n)
    assert numels(h.sent) == [[1, 2], [3], [100]]
    assert numels([h.hold.items]) == [[1]]


def test_messages_do_not_count(held: Any) -> None:
    h = held(max_ops=2, max_bytes=8)
    h.add(1)
    for _ in range(5):
        h.add(100, message=True)
    assert h.sent == []
    h.add(1)
    assert numels(h.sent) == [[1, *[100] * 5, 1]]


def test_counts_anew_once_something_was_taken(held: Any) -> None:
    h = held(max_ops=3)
    h.add(0)
    h.hold.take()
    h.add(1)
    h.add(2)
    h.hold.take(2)  # the second of these two
    h.add(3)
    assert h.sent == []
    h.add(4)
    assert numels(h.sent) == [[1, 3, 4]]


@examples(200, 20)
@given(st.lists(st.one_of(st.integers(0, 5), st.just("take")), max_size=30), st.integers(1, 5), st.integers(1, 30))
def test_batches_keep_to_the_limits(steps: list[Any], max_ops: int, max_bytes: int) -> None:
    h = Held(BatchLimiter(max_ops, max_bytes))
    try:
        given_, taken = [], []
        for step in steps:
            if step == "take":
                h.sent.append(h.hold.take())
            else:
                given_.append(h.add(step))
        h.sent.append(h.hold.take())
        taken = [item for batch in h.sent for item in batch]
        assert taken == given_
        for batch in h.sent:
            assert len(batch) <= max_ops
            assert len(batch) == 1 or sum(item.op.nbytes for item in batch) <= max_bytes
        assert h.hold.count == len(given_)
    finally:
        h.loop.close()


class Driver:
    def __init__(self) -> None:
        self.told: list[tuple[str, Work[Any]]] = []

    def before_await(self, work: Work[Any]) -> None:
        self.told.append(("before_await", work))

    def before_block(self, work: Work[Any]) -> None:
        self.told.append(("before_block", work))


@pytest.mark.parametrize("step", ["before_await", "before_block"])
def test_who_waits_has_it_sent_and_then_moved_on(held: Any, step: str) -> None:
    h = held()
    h.driver = driver = Driver()
    first, second = h.add(1), h.add(2)
    getattr(second.work.driver, step)(second.work)
    assert h.sent == [[first, second]]
    assert driver.told == [(step, second.work)]


@pytest.mark.parametrize("step", ["before_await", "before_block"])
@pytest.mark.parametrize("after", ["settled", "not sent"])
def test_what_has_nobody_to_move_it_on(held: Any, step: str, after: str) -> None:
    h = held()
    h.driver = None if after == "settled" else h.hold  # sending it did not come to it
    item = h.add()
    getattr(h.hold, step)(item.work)
    assert h.sent == [[item]]


# -- who calls


async def test_tasks_are_callers() -> None:
    me = asyncio.current_task()
    assert current_owner() is me
    assert await asyncio.create_task(_caller()) is not me
    assert await _caller() is me

    found: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: found.set_result(current_owner()))
    assert await found == threading.get_ident(), "a callback of the loop has no task"


async def _caller() -> object:
    return current_owner()


def test_threads_are_callers() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append((current_owner(), threading.get_ident())))
    thread.start()
    thread.join()
    assert current_owner() == threading.get_ident()
    [(other, ident)] = found  # type: ignore[misc]
    assert other == ident
