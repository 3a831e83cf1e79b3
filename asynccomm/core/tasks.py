"""Tasks that run to their end after their caller was cancelled, such as the clean-up of a cancelled call.

A task may be cancelled twice: by its awaiting task, and by a deadline. The second cancellation would interrupt the
clean-up that the first one started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_tasks: set[asyncio.Task[Any]] = set()


def detach(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """Keep ``task`` alive to its end, also without an awaiting task."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def shielded(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await ``coroutine``, which goes on when the caller is cancelled."""
    return await asyncio.shield(detach(asyncio.ensure_future(coroutine)))


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel ``task`` and wait for its end, which may be a result or an error."""
    task.cancel()
    await asyncio.wait([task])


async def to_the_end(awaitable: asyncio.Task[T] | Coroutine[Any, Any, T]) -> T:
    """Await a task or coroutine. A cancellation does not reach it, and is raised once it has ended."""
    task = detach(asyncio.ensure_future(awaitable))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


async def shielded_acquire(coroutine: Coroutine[Any, Any, T], give_back: Callable[[T], object]) -> T:
    """Like ``shielded``, for a coroutine that returns a resource: cancelling passes the result to ``give_back``."""
    task = detach(asyncio.ensure_future(coroutine))

    def ended(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            give_back(task.result())

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(ended)
        raise
