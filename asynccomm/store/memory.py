"""A store in this process's memory, for loopback comms and tests. One event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import final

from asynccomm.errors import StoreError, StoreTimeoutError
from asynccomm.options import duration
from asynccomm.store.base import DEFAULT_TIMEOUT, Store, to_amount, to_bytes, to_key, to_keys, to_limit, within


@final
class MemoryStore(Store):
    """A dict with the semantics of torch's stores.

    Args:
        timeout: seconds that ``get`` and ``wait`` allow by default.
    """

    _instead = "other processes need a store they can reach, such as a StoreClient's"

    def __init__(self, timeout: float | timedelta = DEFAULT_TIMEOUT) -> None:
        self._timeout = duration("timeout", timeout)
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}  # by the key that each waits for

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def _appears(self, key: str) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, set()).add(waiter)
        try:
            await waiter
        finally:
            others = self._waiters.get(key)
            if others is not None:
                others.discard(waiter)
                if not others:
                    del self._waiters[key]

    async def set(self, key: str, value: bytes | str) -> None:
        self._put(to_key(key), to_bytes("value", value))

    async def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        limit = to_limit(timeout, self._timeout)
        deadline = time.monotonic() + limit
        try:
            while to_key(key) not in self._values:  # the key may have been deleted again before its waiter ran
                await self.wait([key], max(0.0, deadline - time.monotonic()))
        except StoreTimeoutError:
            raise StoreTimeoutError(f"keys {[key]} did not appear within {limit:g} s") from None
        return self._values[key]

    async def add(self, key: str, amount: int) -> int:
        number = to_amount(amount)
        try:
            total = int(self._values.get(to_key(key), b"0")) + number
        except ValueError as exc:
            raise StoreError(f"key {key!r} does not hold a number but {self._values[key]!r}") from exc
        self._put(key, str(total).encode())
        return total

    async def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        want = to_bytes("expected", expected)
        if to_key(key) not in self._values and want:
            return want
        if self._values.get(key, b"") == want:
            self._put(key, to_bytes("desired", desired))
        return self._values[key]

    async def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in to_keys(keys))

    async def wait(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> None:
        names = to_keys(keys)
        limit = to_limit(timeout, self._timeout)
        try:
            async with within(limit):
                while missing := [key for key in names if key not in self._values]:
                    await self._appears(missing[0])
        except TimeoutError:
            missing = [key for key in names if key not in self._values]
            raise StoreTimeoutError(f"keys {missing} did not appear within {limit:g} s") from None

    async def delete(self, key: str) -> bool:
        return self._values.pop(to_key(key), None) is not None

    async def append(self, key: str, value: bytes | str) -> None:
        self._put(key, self._values.get(to_key(key), b"") + to_bytes("value", value))

    async def num_keys(self) -> int:
        return len(self._values)
