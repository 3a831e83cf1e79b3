"""Waiting for what is to come, and not for time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from asynccomm.core.python_state import STREAK_AWAITS


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Look at ``condition`` until it holds. Raises: TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


async def lets_others_run(once: Callable[[], Awaitable[object]]) -> bool:
    """Whether the event loop runs other callbacks while this task awaits ``once()`` as often as may be in a row."""
    ran: list[None] = []
    asyncio.get_running_loop().call_soon(ran.append, None)
    for _ in range(STREAK_AWAITS):
        await once()
    return bool(ran)
