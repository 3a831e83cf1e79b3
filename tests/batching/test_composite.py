"""Several operations with one Work, and one operation with several Works."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from asynccomm.batching.composite import CompositeWork, FusedWork
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import AsyncCommError, BackendError, PayloadError
from asynccomm.ops import Barrier, GroupedOp
from tests.fake_streams import STREAM, Place


class Driver:
    """A backend, as far as waiting goes."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Work[Any]]] = []

    def before_await(self, work: Work[Any]) -> None:
        self.told.append(("before_await", work))

    def before_block(self, work: Work[Any]) -> None:
        self.told.append(("before_block", work))


@pytest.fixture
async def mailbox() -> Mailbox:
    return Mailbox(asyncio.get_running_loop())


def work_of(mailbox: Mailbox, on_settled: Any = lambda work: None, driver: Any = None, value: Any = None) -> Work[Any]:
    return Work(Barrier(), UNNUMBERED, mailbox, value=value, timeout=9.0, on_settled=on_settled, driver=driver)


def whole_of(mailbox: Mailbox, count: int, driver: Any = None) -> CompositeWork:
    whole = CompositeWork()
    whole.expect([work_of(mailbox, whole.settled, driver) for _ in range(count)])
    whole.work = work_of(mailbox, driver=whole, value="all")
    return whole


def carrier_of(mailbox: Mailbox, count: int, driver: Any) -> tuple[FusedWork, list[Work[Any]]]:
    parts = [work_of(mailbox, value=i) for i in range(count)]
    fused_work = FusedWork(parts, driver)
    fused_work.work = work_of(mailbox, fused_work.settled, driver)
    for number, part in enumerate(parts):
        part.seq, part.driver = number, fused_work
    return fused_work, parts


# -- one Work for several operations


async def test_a_whole_is_done_when_all_are(mailbox: Mailbox) -> None:
    whole = whole_of(mailbox, 3)
    for part in (2, 0, 1):
        assert not whole.work.done()
        whole.parts[part].settle()
    assert await whole.work == "all"


async def test_a_whole_fails_with_the_first_error_once_all_are_over(mailbox: Mailbox) -> None:
    whole = whole_of(mailbox, 3)
    errors = [PayloadError("one"), PayloadError("two")]
    whole.parts[2].settle(errors[1])
    whole.parts[1].settle(errors[0])
    assert not whole.work.done()
    whole.parts[0].settle()
    assert whole.work.exception() is errors[0], "in their order, not that of settling"
    assert whole.parts[1].take_error() is None, "it is told of once"
    errors[1].observed = True


async def test_a_whole_carries_the_number_of_the_first(mailbox: Mailbox) -> None:
    whole = whole_of(mailbox, 2)
    for n, part in enumerate(whole.parts):
        part.seq = 7 + n
    whole.sent()
    assert whole.work.seq == 7


async def test_a_whole_that_was_sent_by_parts(mailbox: Mailbox) -> None:
    """A batch was full between them."""
    whole = whole_of(mailbox, 2)
    whole.parts[0].seq = 3
    whole.parts[0].order = Place()
    whole.sent()
    assert whole.work.seq == 3
    assert whole.work.order is None, "it has no place as long as one of them has none"
    whole.parts[0].settle()
    whole.parts[1].seq = 4
    whole.parts[1].order = Place()
    whole.sent()
    assert whole.work.seq == 3
    assert whole.work.order is not None
    whole.parts[1].settle()
    assert await whole.work == "all"


async def test_who_waits_for_a_whole_waits_for_each(mailbox: Mailbox) -> None:
    driver = Driver()
    whole = whole_of(mailbox, 3, driver)
    whole.parts[1].settle()
    whole.before_await(whole.work)
    whole.before_block(whole.work)
    left = [whole.parts[0], whole.parts[2]]
    assert driver.told == [(step, part) for step in ("before_await", "before_block") for part in left]
    for part in left:
        part.settle()


async def test_a_whole_of_which_one_was_captured(mailbox: Mailbox) -> None:
    whole = whole_of(mailbox, 2)
    whole.parts[0].capture()
    whole.parts[1].capture()
    assert whole.work.captured
    assert whole.work.done()


async def test_a_whole_whose_parts_settle_in_many_threads(mailbox: Mailbox) -> None:
    for _ in range(50):
        whole = whole_of(mailbox, 8)
        start = threading.Barrier(8)

        def settle(part: Work[Any], start: threading.Barrier = start) -> None:
            start.wait()
            part.settle()

        threads = [threading.Thread(target=settle, args=(part,)) for part in whole.parts]
        for thread in threads:
            thread.start()
        assert await asyncio.wait_for(whole.work, 20) == "all"
        for thread in threads:
            thread.join()


async def test_the_place_of_a_whole(mailbox: Mailbox) -> None:
    whole = whole_of(mailbox, 2)
    places = [Place(), Place(immediate=False)]
    for part, place in zip(whole.parts, places, strict=True):
        part.order = place
    whole.sent()
    order = whole.work.order
    assert order is not None
    assert not order.immediate
    heard: list[bool] = []
    order.listen(lambda: heard.append(order.issued))
    places[1].issue()
    assert heard == []
    assert not order.issued
    places[0].issue()
    assert heard == [True]
    order.order(STREAM)
    assert [place.ordered for place in places] == [[STREAM]] * 2
    for part in whole.parts:
        part.settle()


# -- one operation for several Works


async def test_a_carrier_settles_all_it_carries(mailbox: Mailbox) -> None:
    fused_work, parts = carrier_of(mailbox, 3, Driver())
    assert not any(part.done() for part in parts)
    fused_work.work.settle()
    assert [await part for part in parts] == [0, 1, 2]


async def test_one_error_for_all(mailbox: Mailbox) -> None:
    fused_work, parts = carrier_of(mailbox, 3, Driver())
    error = BackendError("over")
    fused_work.work.settle(error)
    for part in parts:
        with pytest.raises(BackendError, match="over"):
            await part
    assert fused_work.work.take_error() is None, "whoever has one of the Works is told, and nobody else"


async def test_what_failed_before_stays_as_it_is(mailbox: Mailbox) -> None:
    """The comm broke, and its backend comes to the end of the operation later."""
    fused_work, parts = carrier_of(mailbox, 2, Driver())
    early: AsyncCommError = BackendError("broken")
    for part in parts:
        part.settle(early)
    fused_work.work.settle()
    for part in parts:
        assert part.exception() is early


async def test_a_captured_carrier(mailbox: Mailbox) -> None:
    fused_work, parts = carrier_of(mailbox, 2, Driver())
    fused_work.work.capture()
    assert all(part.captured and part.done() for part in parts)


async def test_who_waits_for_one_waits_for_the_carrier(mailbox: Mailbox) -> None:
    driver = Driver()
    fused_work, parts = carrier_of(mailbox, 2, driver)
    waiting = asyncio.ensure_future(_wait(parts[1]))
    while not driver.told:
        await asyncio.sleep(0)
    assert driver.told == [("before_await", fused_work.work)]
    thread = asyncio.ensure_future(asyncio.to_thread(parts[0].wait, 20))
    while len(driver.told) < 2:
        await asyncio.sleep(0)
    assert driver.told[1] == ("before_block", fused_work.work)
    fused_work.work.settle()
    assert await waiting == 1
    assert await thread == 0


async def _wait(work: Work[Any]) -> Any:
    return await work


async def test_all_stand_where_the_carrier_does(mailbox: Mailbox) -> None:
    fused_work, parts = carrier_of(mailbox, 2, Driver())
    fused_work.sent()
    assert [part.order for part in parts] == [None, None]
    fused_work.work.order = place = Place()
    fused_work.sent()
    assert [part.order for part in parts] == [place, place]
    place.issue()
    assert await parts[1].ordered(STREAM) == 1
    assert place.ordered == [STREAM]
    fused_work.work.settle()


async def test_a_carrier_of_parts_of_a_whole(mailbox: Mailbox) -> None:
    whole = whole_of(mailbox, 2)
    fused_work = FusedWork(whole.parts, Driver())
    fused_work.work = work_of(mailbox, fused_work.settled)
    whole.work.op = GroupedOp((Barrier(), Barrier()))
    fused_work.work.settle(PayloadError("refused"))
    with pytest.raises(PayloadError, match="refused"):
        await whole.work
