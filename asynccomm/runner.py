"""The program's entry point: ``asyncio.run`` on uvloop, if installed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from asynccomm.core.preemption import preemption

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None, use_uvloop: bool | None = None) -> T:
    """Run ``main`` on a new event loop and return its result, like ``asyncio.run``.

    SIGTERM cancels ``main``, as Ctrl-C does, and the process ends with exit code 143; a second SIGTERM ends it at once.
    In a program that awaits ``Comm.preempted()`` the first SIGTERM cancels nothing. A program's own handler stays.

    Args:
        main: a coroutine.
        debug: asyncio's debug mode.
        use_uvloop: whether to use uvloop; None: if installed.
    """
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("run() cannot be called from a running event loop: use `await` there")
    if use_uvloop is None:
        use_uvloop = find_spec("uvloop") is not None
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if use_uvloop:
        factory = import_module("uvloop").new_event_loop
    process = os.getpid()
    runner = asyncio.Runner(debug=debug, loop_factory=factory)
    try:
        return runner.run(_watched(main) if asyncio.iscoroutine(main) else main)
    except asyncio.CancelledError:
        if preemption.cancelled:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        if os.getpid() == process:  # in a child that ``main`` has forked, the tasks and connections are the parent's
            runner.close()


async def _watched(main: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    with preemption.watching(task):
        return await main
