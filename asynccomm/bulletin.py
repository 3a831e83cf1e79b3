"""News between the ranks of a comm, over the store: who aborted and why, and who has issued what.

News are numbered keys; each rank waits for the next one, which costs nothing until it comes. It works while a
collective hangs, since it needs neither the transport nor an answer from anybody who is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable
from typing import Any, final

from asynccomm.errors import AsyncCommError
from asynccomm.store.base import Store

__all__ = ["Bulletin"]

REPLY_POLL = 5e-3  # seconds between looks for the answers to a roll call


@final
class Bulletin:
    """One rank's view of a comm's news.

    Args:
        store: keys of this comm alone.
        rank: who posts.
        on_news: called on the loop with each item that another rank posted.
    """

    def __init__(self, store: Store, rank: int, on_news: Callable[[dict[str, Any]], object]) -> None:
        self._store = store.prefix("news")
        self._rank = rank
        self._on_news = on_news
        self._read = 0  # items seen
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="asynccomm news")

    async def _watch(self) -> None:
        # a lost store takes the news with it, not the comm: its transport does not need the store
        with contextlib.suppress(AsyncCommError):
            while True:
                item = await self._item(self._read, math.inf)
                self._read += 1
                if item["rank"] != self._rank:
                    self._on_news(item)

    async def post(self, **item: Any) -> int:
        """Tell all ranks; returns the item's number. The server has it when this returns."""
        text = json.dumps({"rank": self._rank, **item})  # first: a number without an item is where all wait for ever
        number = await self._store.add("count", 1) - 1
        await self._store.set(str(number), text)
        await self._store.check([str(number)])
        return number

    async def _item(self, number: int, timeout: float | None = None) -> dict[str, Any]:
        return {"number": number, **json.loads(await self._store.get(str(number), timeout))}

    async def look(self) -> list[dict[str, Any]]:
        """What has been posted and not yet been seen; waits for items that are just being written."""
        first = self._read  # which moves on meanwhile
        count = await self._store.add("count", 0)
        items = [await self._item(number) for number in range(first, count)]
        return [item for item in items if item["rank"] != self._rank]

    async def reply(self, number: int, **answer: Any) -> None:
        """Answer item ``number``."""
        await self._store.set(f"{number}/{self._rank}", json.dumps(answer))

    async def replies(self, number: int, ranks: list[int], timeout: float) -> dict[int, dict[str, Any]]:
        """The answers that came within ``timeout`` seconds, by rank."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while True:
            for rank in ranks:
                if rank not in found and await self._store.check([f"{number}/{rank}"]):
                    found[rank] = json.loads(await self._store.get(f"{number}/{rank}"))
            if len(found) == len(ranks) or time.monotonic() > deadline:
                return found
            await asyncio.sleep(REPLY_POLL)

    def cancel(self) -> None:
        """Stop watching."""
        self._task.cancel()

    async def aclose(self) -> None:
        """Stop watching, and wait until it has. Raises what it failed with, if that was not the store's going."""
        self.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
