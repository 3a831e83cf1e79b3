"""What goes on though its caller is cancelled."""

from __future__ import annotations

import asyncio
import gc

import pytest

from asynccomm.core.tasks import cancel, detach, shielded, shielded_acquire, to_the_end


async def started(call: asyncio.Future[object]) -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    assert not call.done()


async def test_what_is_kept_is_not_collected() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.01)
        ended.set()

    detach(asyncio.ensure_future(work()))
    gc.collect()
    async with asyncio.timeout(20):
        await ended.wait()


async def test_finish_goes_on_when_it_is_cancelled() -> None:
    go, ended = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        await go.wait()
        ended.set()
        return 3

    go.set()
    assert await shielded(work()) == 3
    go.clear()
    ended.clear()
    call = asyncio.ensure_future(shielded(work()))
    await started(call)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not ended.is_set()
    go.set()
    async with asyncio.timeout(20):
        await ended.wait()


async def test_finish_passes_on_what_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await shielded(fail())


@pytest.mark.parametrize("fails", [False, True])
async def test_what_was_obtained_is_given_back_when_nobody_waits_for_it(fails: bool) -> None:
    go, back = asyncio.Event(), []
    over = asyncio.Event()

    async def get() -> str:
        try:
            await go.wait()
            if fails:
                raise ValueError("there is none")
            return "it"
        finally:
            over.set()

    call = asyncio.ensure_future(shielded_acquire(get(), back.append))
    await started(call)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go.set()
    async with asyncio.timeout(20):
        await over.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert back == ([] if fails else ["it"])


async def test_what_was_obtained_in_time_stays() -> None:
    async def get() -> str:
        return "it"

    back: list[str] = []
    assert await shielded_acquire(get(), back.append) == "it"
    assert not back


async def test_a_cancellation_waits_for_the_end() -> None:
    go = asyncio.Event()

    async def work() -> int:
        await go.wait()
        return 3

    call = asyncio.ensure_future(to_the_end(work()))
    await started(call)
    for _ in range(2):
        call.cancel()
        await started(call)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await to_the_end(work()) == 3


async def test_a_task_has_ended_once_it_is_cancelled() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended = True
            raise ValueError("which is the task's own")

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    await cancel(task)
    assert ended
    assert isinstance(task.exception(), ValueError)
    await cancel(task)  # does nothing
