"""Tasks that come to their end though nobody waits for them any more, as with cleaning up after a cancelled call.

A task may be cancelled more than once: by whoever awaits it, and by a deadline. The second time hits what the first has
set off, and would leave it half done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_tasks: set[asyncio.Task[Any]] = set()


def detach(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Let ``task`` come to its end, whoever has stopped waiting for it."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def shielded(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await ``coroutine``, which goes on when this is cancelled."""
    return await asyncio.shield(detach(asyncio.ensure_future(coroutine)))


async def shielded_acquire(coroutine: Coroutine[Any, Any, T], give_back: Callable[[T], object]) -> T:
    """The same for one that gets something: it is handed to ``give_back`` when this is cancelled."""
    task = detach(asyncio.ensure_future(coroutine))

    def ended(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            give_back(task.result())

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(ended)
        raise
