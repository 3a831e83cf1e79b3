"""Where a process is, asked from another thread while it is there."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from asynccomm.core.mailbox import Mailbox
from asynccomm.core.stacks import DEPTH, format_stacks
from asynccomm.core.work import Work
from asynccomm.ops import Barrier
from tests.cases import cases
from tests.testing.conftest import wait_until

MAIN = threading.get_ident()


async def described(*coroutines: Coroutine[Any, Any, Any]) -> str:
    """What another thread sees of this loop once all these tasks have got as far as they can."""
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(coroutine, name=f"task {n}") for n, coroutine in enumerate(coroutines)]

    def look() -> str:
        wait_until(lambda: sys._current_frames()[MAIN].f_code.co_name == "select", "an idle loop")
        return format_stacks(MAIN, loop)

    text = await loop.run_in_executor(None, look)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return text


def new_work() -> Work[None]:
    mailbox = Mailbox(asyncio.get_running_loop())
    return Work(Barrier(), 7, mailbox, value=None, timeout=60.0, on_settled=lambda work: None)


async def inner(awaitable: Any) -> None:
    await awaitable  # the innermost


async def outer(awaitable: Any) -> None:
    await inner(awaitable)  # the outer


async def test_chain_of_awaits_down_to_the_work() -> None:
    work = new_work()
    text = await described(outer(work))
    work.settle()
    task = text[text.index("task 'task 0':") :]
    assert task.index("await inner(awaitable)  # the outer") < task.index("await awaitable  # the innermost")
    assert task.count("File ") >= 2
    assert f'File "{__file__}", line ' in task
    assert "waiting for <Work #7 barrier() pending>" in task
    assert "work.py" not in task, "the inside of a Work says nothing"


async def test_every_task_has_its_own_part() -> None:
    text = await described(inner(asyncio.Event().wait()), outer(asyncio.sleep(1000)))
    first, second = text[text.index("task 'task 0'") :].split("task 'task 1'")
    assert "in wait" in first
    assert "in sleep" in second
    assert "waiting for" not in first


async def test_own_tasks_are_left_out() -> None:
    helper = asyncio.create_task(asyncio.sleep(1000), name="asynccomm store reader")
    text = await described()
    helper.cancel()
    assert "asynccomm store reader" not in text


async def test_context_managers_and_generators() -> None:
    @asynccontextmanager
    async def managed() -> AsyncIterator[None]:
        yield
        await asyncio.sleep(1000)  # in the exit

    async def enter() -> None:
        async with managed():
            pass

    assert "async with managed()" in await described(enter())


async def test_idle_thread_is_not_shown() -> None:
    assert not (await described()).startswith("main thread:")


def test_busy_threads_are_shown() -> None:
    release, reached = threading.Event(), threading.Event()

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            reached.set()
            release.wait()  # blocked here

    thread = threading.Thread(target=deep, args=(50,))
    thread.start()
    assert reached.wait(60)
    text = format_stacks(thread.ident or 0, None)
    release.set()
    thread.join()
    main, other = text.split("event loop's thread:\n")
    assert main.startswith("main thread:\n")
    assert "in test_busy_threads_are_shown" in main
    assert other.count("File ") <= DEPTH
    assert "in deep" in other


@cases("thread_id", [MAIN, -1])
def test_main_thread_is_shown_once_and_a_thread_that_is_gone_is_left_out(thread_id: int) -> None:
    text = format_stacks(thread_id, None)
    assert text.startswith("main thread:\n")
    assert text.count("thread:\n") == 1
