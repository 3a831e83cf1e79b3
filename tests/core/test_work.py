"""The handle to one operation: waiting for it, looking at it, forgetting it. On asyncio's own loop and on uvloop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import inspect
import random
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import uvloop

from asynccomm.core import work as module
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.python_state import STREAK_AWAITS
from asynccomm.core.work import HOPS, Work
from asynccomm.errors import AsyncCommError, BackendError, PayloadError, WouldBlockError
from asynccomm.ops import AllReduce
from asynccomm.ops.reduce_op import ReduceOp
from tests.fake_streams import STREAM, Place
from tests.waiting import lets_others_run

OP = AllReduce(torch.float32, 4, ReduceOp.SUM)
VALUE = object()


class Bench:
    """Makes Works of the running loop, and hears what is told to its exception handler."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.mailbox = Mailbox(self.loop)
        self.settled: list[Work[Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.reports.append(context))

    def work(self, seq: int = 0, *, timeout: float = 600.0) -> Work[Any]:
        return Work(
            OP, seq, self.mailbox, value=VALUE, timeout=timeout, on_settled=lambda work: self.settled.append(work)
        )

    def done(self, error: AsyncCommError | None = None) -> Work[Any]:
        work = self.work()
        work.settle(error)
        self.settled.clear()
        return work


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run ``test(bench, ...)`` on asyncio's own loop and on uvloop."""

    @functools.wraps(test)
    def run(new_loop: Callable[[], asyncio.AbstractEventLoop], **arguments: Any) -> None:
        async def main() -> None:
            await test(Bench(), **arguments)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())

    of_test, of_run = inspect.signature(test), inspect.signature(run, follow_wrapped=False)
    first = next(iter(of_run.parameters.values()))
    run.__signature__ = of_test.replace(  # type: ignore[attr-defined]
        parameters=[first, *list(of_test.parameters.values())[1:]], return_annotation=None
    )
    factories = [asyncio.SelectorEventLoop, uvloop.new_event_loop]
    return pytest.mark.parametrize("new_loop", factories, ids=["asyncio", "uvloop"])(run)


async def turn(times: int = 1) -> None:
    """Let the loop turn."""
    for _ in range(times):
        await asyncio.sleep(0)


async def outcome(work: Work[Any]) -> Any:
    return await work


def drive(work: Work[Any]) -> Iterator[Any]:
    """What awaiting yields to the loop, one by one."""
    return work.__await__()


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


# -- awaiting


@on_both_loops
async def test_await_before_it_settles(bench: Bench) -> None:
    work = bench.work()
    waiter = asyncio.ensure_future(outcome(work))
    await turn()
    assert not waiter.done()
    assert work.settle()
    assert await waiter is VALUE


@on_both_loops
async def test_await_after_it_settled(bench: Bench) -> None:
    assert await bench.done() is VALUE


@on_both_loops
async def test_await_an_error(bench: Bench) -> None:
    error = BackendError("cable cut")
    work = bench.work()
    waiter = asyncio.ensure_future(outcome(work))
    await turn()
    work.settle(error)
    for awaitable in (waiter, work):
        with pytest.raises(BackendError, match="cable cut") as caught:
            await awaitable
        assert caught.value is error


@on_both_loops
async def test_any_number_of_tasks_any_number_of_times(bench: Bench) -> None:
    work = bench.work()

    async def thrice() -> list[Any]:
        return [await work, await work, await work]

    waiters = [asyncio.ensure_future(thrice()) for _ in range(100)]
    await turn()
    thread = in_thread(work.settle)
    assert await asyncio.gather(*waiters) == [[VALUE] * 3] * 100
    thread.join()
    assert await asyncio.gather(work, work) == [VALUE, VALUE]


@on_both_loops
async def test_settled_from_a_thread(bench: Bench) -> None:
    for _ in range(200):
        work = bench.work()
        thread = in_thread(work.settle)
        assert await work is VALUE
        thread.join()


@on_both_loops
async def test_a_finished_work_does_not_suspend(bench: Bench) -> None:
    with pytest.raises(StopIteration) as caught:
        next(drive(bench.done()))
    assert caught.value.value is VALUE
    bench.mailbox.reset_streak()  # the machine may be slow, and a streak is short
    with pytest.raises(BackendError):
        next(drive(bench.done(BackendError("no"))))


@on_both_loops
async def test_a_pending_work_suspends_until_it_is_done(bench: Bench) -> None:
    work = bench.work()
    awaiting = drive(work)
    waiter = next(awaiting)
    assert not waiter.done()
    work.settle()
    await turn(2)
    assert waiter.done()
    with pytest.raises(StopIteration) as caught:
        next(awaiting)
    assert caught.value.value is VALUE


@on_both_loops
async def test_settling_between_the_look_and_the_word_left_is_seen(bench: Bench) -> None:
    work = bench.work()

    class Settling(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            work.settle()

    work._waiters = Settling()
    assert await work is VALUE


@on_both_loops
async def test_one_of_a_streak_lets_the_others_run(bench: Bench) -> None:
    work = bench.done()
    bench.mailbox.reset_streak()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    for _ in range(10 * STREAK_AWAITS):
        assert await work is VALUE
    assert turns >= 10
    task.cancel()


@on_both_loops
async def test_a_streak_of_errors_lets_the_others_run_too(bench: Bench) -> None:
    work = bench.done(BackendError("no"))
    bench.mailbox.reset_streak()
    yields = 0
    for _ in range(3 * STREAK_AWAITS):
        awaiting = drive(work)
        try:
            next(awaiting)
            yields += 1
            next(awaiting)
        except BackendError:
            pass
    assert yields >= 3


@on_both_loops
async def test_cancelling_an_await_leaves_everything_else_alone(bench: Bench) -> None:
    work = bench.work()
    first, second = (asyncio.ensure_future(outcome(work)) for _ in range(2))
    await turn()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    assert not work.done()
    assert not second.done()
    work.settle()
    assert await second is VALUE
    assert await work is VALUE
    assert bench.reports == []


@on_both_loops
async def test_abandoned_awaits_leave_nothing_behind(bench: Bench) -> None:
    work = bench.work()
    for _ in range(10):
        waiter = asyncio.ensure_future(outcome(work))
        await turn()
        waiter.cancel()
        await asyncio.wait([waiter])
    assert work._waiters == []
    work.settle()


@on_both_loops
async def test_cancelling_when_the_outcome_is_known_but_not_delivered(bench: Bench) -> None:
    work = bench.work()
    waiter = asyncio.ensure_future(outcome(work))
    await turn()
    work.settle()
    waiter.cancel()
    await asyncio.wait([waiter])
    assert waiter.cancelled()
    assert await work is VALUE


@on_both_loops
async def test_timeout_around_an_await_ends_only_the_wait(bench: Bench) -> None:
    work = bench.work()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.005):
            await work
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outcome(work), 0.005)
    assert not work.done()
    work.settle()
    async with asyncio.timeout(10):
        assert await work is VALUE


@on_both_loops
async def test_another_loop_is_refused(bench: Bench) -> None:
    pending, finished = bench.work(3), bench.done()
    errors: list[str] = []

    def run() -> None:
        for work in (pending, finished):
            try:
                asyncio.run(outcome(work))
            except RuntimeError as exc:
                errors.append(str(exc))

    await asyncio.to_thread(run)
    assert len(errors) == 2
    assert "#3" in errors[0]
    for text in errors:
        assert "event loop its comm was made on" in text
    pending.settle()
    assert await pending is VALUE


# -- blocking


@on_both_loops
async def test_wait_in_threads(bench: Bench) -> None:
    work = bench.work()
    waits = [asyncio.ensure_future(asyncio.to_thread(work.wait, limit)) for limit in (None, 30.0, timedelta(minutes=1))]
    await turn()
    work.settle()
    assert await asyncio.gather(*waits) == [VALUE] * 3
    assert await asyncio.to_thread(work.wait) is VALUE


@on_both_loops
async def test_wait_raises_the_error(bench: Bench) -> None:
    error = BackendError("cable cut")
    work = bench.work()
    wait = asyncio.ensure_future(asyncio.to_thread(work.wait))
    await turn()
    work.settle(error)
    with pytest.raises(BackendError) as caught:
        await wait
    assert caught.value is error


@on_both_loops
@pytest.mark.parametrize("limit", [0.01, timedelta(milliseconds=10)])
async def test_wait_gives_up(bench: Bench, limit: Any) -> None:
    work = bench.work(7)
    with pytest.raises(TimeoutError, match=r"#7 all_reduce.* was not done within 0\.01 s") as caught:
        await asyncio.to_thread(work.wait, limit)
    assert not isinstance(caught.value, AsyncCommError)
    assert not work.done()
    work.settle()
    assert await work is VALUE


@on_both_loops
async def test_wait_for_ever(bench: Bench) -> None:
    work = bench.work()
    waits = [asyncio.ensure_future(asyncio.to_thread(work.wait, limit)) for limit in (float("inf"), timedelta.max)]
    await turn()
    work.settle()
    assert await asyncio.gather(*waits) == [VALUE] * 2


@on_both_loops
async def test_wait_checks_its_timeout(bench: Bench) -> None:
    work = bench.done()
    with pytest.raises(ValueError, match="timeout must be positive, got -1"):
        await asyncio.to_thread(work.wait, -1)
    with pytest.raises(TypeError, match="timeout must be seconds"):
        await asyncio.to_thread(work.wait, "3")


@on_both_loops
async def test_waits_that_gave_up_leave_nothing_behind(bench: Bench) -> None:
    work = bench.work()

    def poll() -> None:
        for _ in range(10):
            with pytest.raises(TimeoutError):
                work.wait(1e-4)

    await asyncio.to_thread(poll)
    assert work._listeners == []
    work.settle()


@on_both_loops
@pytest.mark.parametrize("finished", [False, True])
async def test_wait_on_the_loops_thread_is_refused(bench: Bench, finished: bool) -> None:
    work = bench.done() if finished else bench.work()
    with pytest.raises(WouldBlockError, match="await"):
        work.wait()
    with pytest.raises(WouldBlockError, match="await"):
        work.wait(1.0)


@on_both_loops
async def test_wait_on_the_thread_of_any_loop_is_refused(bench: Bench) -> None:
    work = bench.done()

    async def elsewhere() -> None:
        with pytest.raises(WouldBlockError):
            work.wait()

    await asyncio.to_thread(asyncio.run, elsewhere())


@on_both_loops
@pytest.mark.parametrize("finished", [False, True])
async def test_there_is_no_stream_to_wait_for(bench: Bench, finished: bool) -> None:
    work = bench.done() if finished else bench.work()
    with pytest.raises(RuntimeError, match=r"wait_stream\(\) orders CUDA streams.*on the CPU"):
        work.wait_stream()


# -- streams


def until(condition: Callable[[], object]) -> None:
    """Wait in a thread."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(1e-4)


def placed(work: Work[Any], **place: bool) -> Place:
    work.order = order = Place(**place)
    return order


@on_both_loops
@pytest.mark.parametrize("immediate", [False, True])
async def test_the_stream_waits_and_the_host_does_not(bench: Bench, immediate: bool) -> None:
    work = bench.work()
    order = placed(work, issued=True, immediate=immediate)
    assert work.wait() is VALUE, "also on the thread of the loop"
    assert work.wait(1e-9) is VALUE
    work.wait_stream(STREAM)
    work.wait_stream()
    assert order.ordered == [None, None, STREAM, None]
    assert await asyncio.to_thread(work.wait) is VALUE
    assert not work.done()
    work.settle()
    assert work.wait() is VALUE
    assert await work is VALUE


@on_both_loops
async def test_wait_blocks_until_it_is_in_a_stream(bench: Bench) -> None:
    work = bench.work()
    order = placed(work)
    waits = [asyncio.ensure_future(asyncio.to_thread(work.wait, limit)) for limit in (None, 60.0)]
    stream = asyncio.ensure_future(asyncio.to_thread(work.wait_stream, STREAM))
    await asyncio.to_thread(until, lambda: len(order.listeners) == 3)
    assert order.ordered == []
    order.issue()
    assert await asyncio.gather(*waits, stream) == [VALUE, VALUE, None]
    assert sorted(order.ordered, key=str) == [None, None, STREAM]
    assert not work.done()
    work.settle()


@on_both_loops
async def test_what_is_prompt_may_block_the_loop_for_a_moment(bench: Bench) -> None:
    work = bench.work()
    order = placed(work)

    def issue() -> None:
        until(lambda: order.listeners)
        order.issue()

    thread = in_thread(issue)
    assert work.wait() is VALUE
    thread.join()
    assert order.ordered == [None]


@on_both_loops
async def test_what_needs_the_loop_may_not_block_it(bench: Bench) -> None:
    work = bench.work()
    order = placed(work, immediate=False)
    for wait in (work.wait, work.wait_stream, lambda: work.wait(1.0)):
        with pytest.raises(WouldBlockError, match=r"other ranks first: use `await work\.ordered\(\)`"):
            wait()
    assert order.listeners == []
    waiting = asyncio.ensure_future(asyncio.to_thread(work.wait))  # a thread may
    await asyncio.to_thread(until, lambda: order.listeners)
    order.issue()
    assert await waiting is VALUE


@on_both_loops
async def test_issued_between_the_look_and_the_word_left(bench: Bench) -> None:
    work = bench.work()

    class Issuing(Place):
        def listen(self, listener: Callable[[], object]) -> None:
            self.issue()  # and whoever did it has looked for listeners already
            super().listen(listener)

    work.order = order = Issuing()
    assert work.wait() is VALUE
    assert order.ordered == [None]
    work.order = order = Issuing()
    assert await work.ordered() is VALUE
    assert order.ordered == [None]


@on_both_loops
async def test_wait_for_a_stream_gives_up(bench: Bench) -> None:
    work = bench.work(7)
    order = placed(work)
    with pytest.raises(TimeoutError, match=r"#7 all_reduce.* was not done within 0\.01 s"):
        await asyncio.to_thread(work.wait, 0.01)
    with pytest.raises(TimeoutError):
        work.wait(timedelta(milliseconds=1))
    assert work._listeners == []
    assert order.ordered == []
    order.issue()
    assert work.wait() is VALUE


@on_both_loops
async def test_it_fails_before_it_is_in_a_stream(bench: Bench) -> None:
    work = bench.work()
    order = placed(work)
    waits = [asyncio.ensure_future(asyncio.to_thread(wait)) for wait in (work.wait, work.wait_stream)]
    await asyncio.to_thread(until, lambda: len(order.listeners) == 2)
    work.settle(BackendError("cable cut"))
    for failed in (*waits, asyncio.to_thread(work.wait)):
        with pytest.raises(BackendError, match="cable cut"):
            await failed
    assert order.ordered == []


@on_both_loops
async def test_it_fails_in_its_stream(bench: Bench) -> None:
    work = bench.work()
    order = placed(work, issued=True)
    work.settle(BackendError("cable cut"))
    for wait in (work.wait, work.wait_stream):
        with pytest.raises(BackendError, match="cable cut"):
            wait()
    with pytest.raises(BackendError, match="cable cut"):
        await work.ordered()
    assert order.ordered == []


@on_both_loops
@pytest.mark.parametrize("early", [False, True])
async def test_what_needs_the_loop_fails_before_it_is_in_a_stream(bench: Bench, early: bool) -> None:
    work = bench.work()
    placed(work, immediate=False)
    waiting = asyncio.ensure_future(work.ordered())
    if not early:
        await turn()
    work.settle(BackendError("cable cut"))
    with pytest.raises(BackendError, match="cable cut"):
        await waiting
    for wait in (work.wait, work.wait_stream):
        with pytest.raises(BackendError, match="cable cut"):
            wait()


@on_both_loops
async def test_ordered_where_there_is_no_stream(bench: Bench) -> None:
    work = bench.work()
    waiting = asyncio.ensure_future(work.ordered())
    await turn()
    assert not waiting.done()
    work.settle()
    assert await waiting is VALUE
    with pytest.raises(BackendError, match="cable cut"):
        await bench.done(BackendError("cable cut")).ordered()


@on_both_loops
@pytest.mark.parametrize("immediate", [False, True])
async def test_ordered_does_not_suspend_once_it_is_in_a_stream(bench: Bench, immediate: bool) -> None:
    work = bench.work()
    order = placed(work, issued=True, immediate=immediate)
    with pytest.raises(StopIteration) as caught:
        work.ordered(STREAM).send(None)
    assert caught.value.value is VALUE
    assert order.ordered == [STREAM]
    assert not work.done()


@on_both_loops
async def test_a_loop_of_ordered_lets_other_tasks_run(bench: Bench) -> None:
    work = bench.work()
    placed(work, issued=True)
    assert await lets_others_run(work.ordered)


@on_both_loops
@pytest.mark.parametrize("immediate", [False, True])
async def test_ordered_suspends_until_it_is_in_a_stream(bench: Bench, immediate: bool) -> None:
    work = bench.work()
    order = placed(work, immediate=immediate)
    waits = [asyncio.ensure_future(work.ordered(stream)) for stream in (None, STREAM)]
    await turn(3)
    assert not any(wait.done() for wait in waits)
    thread = in_thread(order.issue)
    assert await asyncio.gather(*waits) == [VALUE, VALUE]
    thread.join()
    assert order.ordered == [None, STREAM]
    assert not work.done()


@on_both_loops
async def test_cancelling_ordered(bench: Bench) -> None:
    work = bench.work()
    order = placed(work)
    first, second = (asyncio.ensure_future(work.ordered()) for _ in range(2))
    await turn()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    order.issue()
    assert await second is VALUE
    assert order.ordered == [None], "only for the one that is left"
    work.settle()
    await turn(2)
    assert bench.reports == []


@on_both_loops
async def test_ordered_fails_while_it_is_suspended(bench: Bench) -> None:
    work = bench.work()
    placed(work)
    waiting = asyncio.ensure_future(work.ordered())
    await turn()
    thread = in_thread(lambda: work.settle(BackendError("cable cut")))
    with pytest.raises(BackendError, match="cable cut"):
        await waiting
    thread.join()


@on_both_loops
async def test_a_driver_hears_of_waits_for_a_stream(bench: Bench) -> None:
    heard: list[str] = []

    class Driver:
        def before_await(self, work: Work[Any]) -> None:
            heard.append("before_await")

        def before_block(self, work: Work[Any]) -> None:
            heard.append("before_block")
            order.issue()

    work: Work[Any] = Work(
        OP, 0, bench.mailbox, value=VALUE, timeout=600, on_settled=lambda work: None, driver=Driver()
    )
    order = placed(work)
    assert work.wait() is VALUE, "before it blocks"
    assert heard == ["before_block"]
    work.wait()
    work.wait_stream()
    await work.ordered()
    assert heard == ["before_block"], "the stream waits, and nobody else"


@on_both_loops
async def test_the_traceback_of_a_cancelled_await_does_not_hold_the_driver(bench: Bench) -> None:
    class Driver:
        def before_await(self, work: Work[Any]) -> None:
            pass

        def before_block(self, work: Work[Any]) -> None:
            pass

    driver = Driver()
    work: Work[Any] = Work(OP, 0, bench.mailbox, value=VALUE, timeout=600, on_settled=lambda work: None, driver=driver)
    seen = weakref.ref(driver)
    del driver
    waiting = asyncio.ensure_future(work)
    await turn()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await waiting
    work.settle()
    gc.collect()
    assert seen() is None, caught.value


@on_both_loops
async def test_captured(bench: Bench) -> None:
    work = bench.work(3)
    order = placed(work, issued=True)
    called: list[object] = []
    work.add_done_callback(called.append)
    work.capture()
    assert work.captured
    assert work.done()
    assert work.exception() is None
    assert repr(work) == "<Work #3 all_reduce(float32[4], SUM) captured>"
    assert bench.settled == [work]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"#3 .* is part of a CUDA graph: .* use wait\(\) or wait_stream\(\)"):
            await work
        with pytest.raises(RuntimeError, match="part of a CUDA graph"):
            work.result()
    assert work.wait() is VALUE
    work.wait_stream(STREAM)
    assert await work.ordered() is VALUE
    assert order.ordered == [None, STREAM, None]
    await turn(2)
    assert called == [work]


@on_both_loops
async def test_a_captured_work_may_be_dropped(bench: Bench) -> None:
    bench.work().capture()
    gc.collect()
    await turn(2)
    assert bench.reports == []


@on_both_loops
async def test_what_is_not_captured(bench: Bench) -> None:
    assert not bench.work().captured
    assert not bench.done().captured


# -- looking


@on_both_loops
async def test_looking_at_a_pending_work(bench: Bench) -> None:
    work = bench.work(5, timeout=3.0)
    assert not work.done()
    assert not work.is_completed()
    assert work.duration is None
    assert work.finished is None
    assert (work.op, work.seq, work.timeout) == (OP, 5, 3.0)
    for look in (work.result, work.exception):
        with pytest.raises(asyncio.InvalidStateError, match=r"#5 all_reduce.*pending.* is not done"):
            look()
    assert repr(work) == "<Work #5 all_reduce(float32[4], SUM) pending>"


@on_both_loops
async def test_output_that_cannot_be_made_is_the_error(bench: Bench) -> None:
    tried = []

    def finish(value: object) -> object:
        tried.append(value)
        raise PayloadError("it cannot be decoded")

    settled: list[Work[Any]] = []
    work: Work[Any] = Work(OP, 0, bench.mailbox, value=VALUE, timeout=1.0, finish=finish, on_settled=settled.append)
    work.settle()
    error = work.exception()
    assert isinstance(error, PayloadError)
    assert "failed: PayloadError" in repr(work)
    for read in (outcome(work), asyncio.to_thread(work.wait)):
        with pytest.raises(PayloadError) as caught:
            await read
        assert caught.value is error
    assert work.exception() is error
    assert tried == [VALUE]


@on_both_loops
async def test_the_error_of_making_the_output_does_not_keep_the_work(bench: Bench) -> None:
    def finish(value: object) -> object:
        raise PayloadError("it cannot be decoded")

    work: Work[Any] = Work(OP, 0, bench.mailbox, value=VALUE, timeout=1.0, finish=finish, on_settled=lambda work: None)
    work.settle()
    error, gone = work.exception(), weakref.ref(work)
    gc.disable()
    try:
        del work
        assert error is not None
        assert gone() is None, "the error keeps it"
    finally:
        gc.enable()


@on_both_loops
async def test_a_wait_for_the_first_exception(bench: Bench) -> None:
    """asyncio's types ask for futures; it needs no more than these methods."""
    good, bad, pending = (bench.work() for _ in range(3))
    waiting = asyncio.ensure_future(
        asyncio.wait([good, bad, pending], return_when=asyncio.FIRST_EXCEPTION)  # type: ignore[type-var]
    )
    await turn()
    good.settle()
    await turn(4)
    assert not waiting.done()
    bad.settle(BackendError("cable cut"))
    done, left = await asyncio.wait_for(waiting, 10)
    assert (done, left) == ({good, bad}, {pending})
    assert bench.reports == []
    pending.settle()
    bench.settled.clear()


@on_both_loops
async def test_looking_at_a_finished_work(bench: Bench) -> None:
    work = bench.done()
    assert work.done()
    assert work.is_completed()
    assert work.result() is VALUE
    assert work.exception() is None
    assert work.finished is not None
    assert work.duration == work.finished - work.started
    assert work.duration >= 0
    assert repr(work) == "<Work #0 all_reduce(float32[4], SUM) done>"


@on_both_loops
async def test_looking_at_a_failed_work(bench: Bench) -> None:
    error = BackendError("cable cut")
    work = bench.done(error)
    assert work.done()
    assert work.exception() is error
    with pytest.raises(BackendError) as caught:
        work.result()
    assert caught.value is error
    assert work.duration is not None
    assert "failed: BackendError" in repr(work)


@on_both_loops
async def test_duration_is_measured_from_the_call(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    work = bench.work()
    now[0] += 2.5
    work.settle()
    now[0] += 4.0
    work.settle()
    assert work.duration == 2.5
    monkeypatch.undo()


# -- settling


@on_both_loops
async def test_settling_decides_once(bench: Bench) -> None:
    work = bench.work()
    assert work.settle()
    assert not work.settle(BackendError("too late"))
    assert not work.settle()
    assert await work is VALUE
    assert bench.settled == [work]


@on_both_loops
async def test_an_error_decides_once(bench: Bench) -> None:
    work = bench.work()
    first = BackendError("first")
    assert work.settle(first)
    assert not work.settle(BackendError("second"))
    assert not work.settle()
    assert work.exception() is first


@on_both_loops
async def test_races_of_settlers_are_decided_once(bench: Bench) -> None:
    works = [bench.work(i) for i in range(2000)]
    errors = [BackendError(str(i)) for i in range(2000)]
    won: list[list[int]] = [[], []]
    start = threading.Barrier(2)

    def settle(side: int) -> None:
        start.wait(10)
        for i, work in enumerate(works):
            if work.settle(errors[i] if side else None):
                won[side].append(i)

    threads = [in_thread(lambda side=side: settle(side)) for side in range(2)]
    results = await asyncio.gather(*works, return_exceptions=True)
    for thread in threads:
        thread.join()
    assert sorted(won[0] + won[1]) == list(range(2000))
    for i in won[0]:
        assert results[i] is VALUE
    for i in won[1]:
        assert results[i] is errors[i]
    assert len(bench.settled) == 2000


@on_both_loops
async def test_waiting_races_with_settling(bench: Bench) -> None:
    rng = random.Random(0)
    todo: list[Work[Any]] = []
    more = threading.Semaphore(0)

    def settle() -> None:
        for i in range(1000):
            more.acquire()
            todo[i].settle()

    thread = in_thread(settle)
    called: list[Work[Any]] = []
    async with asyncio.timeout(20):
        for i in range(1000):
            work = bench.work(i)
            todo.append(work)
            more.release()
            for _ in range(rng.randrange(300)):
                pass
            work.add_done_callback(called.append)
            assert await work is VALUE
        thread.join()
        await turn(3)
    assert called == todo


@on_both_loops
async def test_the_value_of_a_failed_work_is_let_go(bench: Bench) -> None:
    value = torch.ones(3)
    reference = weakref.ref(value)
    work = Work(OP, 0, bench.mailbox, value=value, timeout=1.0, on_settled=lambda work: None)
    del value
    work.settle(BackendError("no"))
    assert reference() is None
    assert work.exception()


# -- callbacks


@on_both_loops
async def test_callbacks_run_on_the_loop_after_it_settled(bench: Bench) -> None:
    work = bench.work()
    called: list[Work[Any]] = []
    work.add_done_callback(called.append)
    work.add_done_callback(called.append)
    await turn(2)
    assert called == []
    work.settle()
    assert called == []
    await turn(2)
    assert called == [work, work]
    work.add_done_callback(called.append)
    assert called == [work, work]
    await turn(2)
    assert called == [work] * 3


@on_both_loops
async def test_callbacks_keep_their_order_and_context(bench: Bench) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    seen: list[tuple[int, str]] = []
    work = bench.work()
    own = contextvars.copy_context()
    own.run(variable.set, "given")
    variable.set("first")
    work.add_done_callback(lambda work: seen.append((1, variable.get())))
    variable.set("second")
    work.add_done_callback(lambda work: seen.append((2, variable.get())))
    work.add_done_callback(lambda work: seen.append((3, variable.get())), context=own)
    variable.set("third")
    work.settle()
    await turn(2)
    assert seen == [(1, "first"), (2, "second"), (3, "given")]


@on_both_loops
async def test_an_empty_context_is_a_context(bench: Bench) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    seen: list[str] = []
    work = bench.done()
    variable.set("mine")
    work.add_done_callback(lambda work: seen.append(variable.get()), context=contextvars.Context())
    await turn(2)
    assert seen == ["none"]


@on_both_loops
async def test_callbacks_can_be_removed(bench: Bench) -> None:
    work = bench.work()
    first: list[Work[Any]] = []
    second: list[str] = []

    def note(work: Work[Any]) -> None:
        second.append("called")

    work.add_done_callback(first.append)
    work.add_done_callback(note)
    work.add_done_callback(first.append)
    assert work.remove_done_callback(first.append) == 2
    assert work.remove_done_callback(first.append) == 0
    work.settle()
    await turn(2)
    assert first == []
    assert second == ["called"]


@on_both_loops
async def test_an_error_in_a_callback_is_reported(bench: Bench) -> None:
    work = bench.work()
    called: list[Work[Any]] = []
    error = ValueError("broken callback")

    def fail(work: Work[Any]) -> None:
        raise error

    work.add_done_callback(fail)
    work.add_done_callback(called.append)
    work.settle()
    await turn(3)
    assert called == [work]
    assert [report["exception"] for report in bench.reports] == [error]


@on_both_loops
async def test_callbacks_are_added_from_threads(bench: Bench) -> None:
    works = [bench.work(i) for i in range(500)]
    called: list[int] = []
    everything = asyncio.Event()
    loop_thread = threading.get_ident()

    def note(work: Work[Any]) -> None:
        assert threading.get_ident() == loop_thread
        called.append(work.seq)
        if len(called) == 1000:
            everything.set()

    def add() -> None:
        for work in works:
            work.add_done_callback(note)

    def settle() -> None:
        for work in works:
            work.settle()

    threads = [in_thread(add), in_thread(settle), in_thread(add)]
    async with asyncio.timeout(20):
        await everything.wait()
    for thread in threads:
        thread.join()
    assert sorted(called) == sorted([*range(500)] * 2)


@on_both_loops
async def test_a_callback_added_while_others_are_called_is_not_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = bench.work()
    called: list[str] = []
    work.add_done_callback(lambda work: called.append("early"))
    work.settle()
    woken = asyncio.Event()
    go_on = threading.Event()

    class Slow:
        """The module of that name, as the thread sees it."""

        @staticmethod
        def copy_context() -> contextvars.Context:
            bench.loop.call_soon_threadsafe(woken.set)
            assert go_on.wait(10)
            return contextvars.copy_context()

    thread_fails: list[BaseException] = []

    def add() -> None:
        try:
            work.add_done_callback(lambda work: called.append("late"))
        except BaseException as exc:
            thread_fails.append(exc)

    monkeypatch.setattr(module, "contextvars", Slow)
    thread = in_thread(add)
    await woken.wait()  # the thread is within add_done_callback, and the loop has called the early one
    monkeypatch.undo()
    await turn(2)
    assert called == ["early"]
    go_on.set()
    thread.join()
    await turn(3)
    assert thread_fails == []
    assert called == ["early", "late"]


# -- errors that nobody looks at


@on_both_loops
async def test_a_dropped_error_is_reported_once(bench: Bench) -> None:
    error = BackendError("cable cut")
    work = bench.done(error)
    del work
    gc.collect()
    await turn(HOPS + 2)
    assert [report["exception"] for report in bench.reports] == [error]
    assert "all_reduce(float32[4], SUM)" in bench.reports[0]["message"]
    assert "never retrieved" in bench.reports[0]["message"]


@on_both_loops
async def test_an_error_of_many_works_is_reported_once(bench: Bench) -> None:
    error, other = BackendError("cable cut"), BackendError("other")
    works = [bench.done(error) for _ in range(100)]
    works.append(bench.done(other))
    del works
    gc.collect()
    await turn(HOPS + 2)
    assert len(bench.reports) == 2
    assert {report["exception"] for report in bench.reports} == {error, other}


@on_both_loops
async def test_a_dropped_error_is_reported_from_any_thread(bench: Bench) -> None:
    works = [bench.done(BackendError("cable cut"))]

    def drop() -> None:
        works.clear()
        gc.collect()

    await asyncio.to_thread(drop)
    await turn(HOPS + 2)
    assert len(bench.reports) == 1


@on_both_loops
async def test_an_error_that_a_waiting_task_gets_is_not_reported_for_another_work(bench: Bench) -> None:
    error = BackendError("cable cut")
    dropped, awaited = bench.work(), bench.work()
    waiter = asyncio.ensure_future(outcome(awaited))
    await turn()
    dropped.settle(error)
    bench.settled.clear()
    del dropped
    awaited.settle(error)
    await turn(HOPS + 2)
    assert waiter.done()
    assert bench.reports == []


async def _awaited(work: Work[Any]) -> None:
    with pytest.raises(BackendError):
        await work


async def _waited(work: Work[Any]) -> None:
    with pytest.raises(BackendError):
        await asyncio.to_thread(work.wait)


async def _result(work: Work[Any]) -> None:
    with pytest.raises(BackendError):
        work.result()


async def _exception(work: Work[Any]) -> None:
    assert work.exception() is not None


@on_both_loops
@pytest.mark.parametrize("look", [_awaited, _waited, _result, _exception])
async def test_an_observed_error_is_not_reported(bench: Bench, look: Any) -> None:
    error = BackendError("cable cut")
    work, twin = bench.done(error), bench.done(error)
    await look(work)
    del work, twin
    gc.collect()
    await turn(HOPS + 2)
    assert bench.reports == []


@on_both_loops
async def test_an_error_whose_only_waiter_was_cancelled_is_reported(bench: Bench) -> None:
    work = bench.work()
    waiter = asyncio.ensure_future(outcome(work))
    await turn()
    waiter.cancel()
    await asyncio.wait([waiter])
    work.settle(BackendError("cable cut"))
    bench.settled.clear()
    del work, waiter
    gc.collect()
    await turn(HOPS + 2)
    assert len(bench.reports) == 1


@on_both_loops
async def test_dropping_a_good_or_pending_work_says_nothing(bench: Bench) -> None:
    bench.done()
    bench.work()
    gc.collect()
    await turn(HOPS + 2)
    assert bench.reports == []


@on_both_loops
async def test_dropping_an_error_after_the_loop_has_closed_says_nothing(bench: Bench) -> None:
    kept: list[Work[Any]] = []

    async def main() -> None:
        kept.append(Bench().done(BackendError("cable cut")))

    await asyncio.to_thread(asyncio.run, main())
    kept.clear()
    gc.collect()


@on_both_loops
async def test_the_traceback_does_not_grow(bench: Bench) -> None:
    def fail() -> BackendError:
        try:
            raise BackendError("cable cut")
        except BackendError as exc:
            return exc

    error = fail()
    works = [bench.done(error) for _ in range(3)]
    lengths: list[int] = []
    for _ in range(20):
        for work in works:
            for look in (lambda work=work: outcome(work), lambda work=work: asyncio.to_thread(work.wait)):
                try:
                    await look()
                except BackendError as exc:
                    names = [frame.name for frame in traceback.extract_tb(exc.__traceback__)]
                    assert "fail" in names, "where it failed is part of it"
                    lengths.append(len(names))
    assert max(lengths[2:]) == max(lengths[:2])


@on_both_loops
async def test_the_settlers_references_are_dropped(bench: Bench) -> None:
    class Owner:
        def settled(self, work: Work[Any]) -> None:
            pass

    owner = Owner()
    reference = weakref.ref(owner)
    work = Work(OP, 0, bench.mailbox, value=VALUE, timeout=1.0, on_settled=owner.settled)
    del owner
    assert reference() is not None
    work.settle()
    gc.collect()
    assert reference() is None


@on_both_loops
async def test_listeners_are_called_where_it_settles(bench: Bench) -> None:
    work = bench.work()
    heard: list[int] = []
    work.listen(lambda: heard.append(threading.get_ident()))
    thread = in_thread(work.settle)
    thread.join()
    assert heard == [thread.ident]
    work.listen(lambda: heard.append(0))
    assert heard == [thread.ident, 0]
