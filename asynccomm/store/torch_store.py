"""Adapters between asynccomm's stores and torch's: a torch Store as a :class:`Store`, and the reverse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent import futures
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, final

import anyio
import anyio.to_thread
from torch import distributed as dist

from asynccomm.errors import StoreError, StoreTimeoutError
from asynccomm.options import duration
from asynccomm.store.base import DEFAULT_TIMEOUT, Store, answered, to_amount, to_bytes, to_key, to_keys, to_limit
from asynccomm.store.routes import address_towards

T = TypeVar("T")
FIRST_POLL = 1e-3  # seconds before the first repeated check of a wait; doubles up to LAST_POLL
LAST_POLL = 50e-3
LOOK_SECONDS = 0.2  # seconds between checks that the event loop is still open
THREADS = 4  # of the store's own limiter, so that no other user of anyio's threads can take the last one


@final
class ServerAddress(NamedTuple):
    """The address of a TCPStore's server, as its clients know it."""

    host: str
    port: int
    prefixed: bool  #: whether the store puts prefixes before its keys


@final
class TorchStore(Store):
    """Any ``torch.distributed.Store``, used from threads so that the loop never blocks.

    torch's clients hold a lock while they wait, which would block all other users of the store. A wait therefore
    repeats ``check``, at most 20 times a second.

    Args:
        store: TCPStore, FileStore, HashStore, PrefixStore, ...; as ``torchs`` later
        timeout: seconds that ``get`` and ``wait`` allow by default.
    """

    def __init__(self, store: dist.Store, timeout: float | timedelta = DEFAULT_TIMEOUT) -> None:
        self.torchs: dist.Store = store
        self._timeout = duration("timeout", timeout)

    @cached_property
    def _limiter(self) -> anyio.CapacityLimiter:
        return anyio.CapacityLimiter(THREADS)

    async def _call(self, call: Callable[[], T]) -> T:
        try:
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        except (RuntimeError, ValueError) as exc:  # torch's DistError family; ADD to a value that is no number
            raise StoreError(f"{type(self.torchs).__name__}: {exc}") from exc

    async def set(self, key: str, value: bytes | str) -> None:
        name, data = to_key(key), to_bytes("value", value)
        await self._call(lambda: self.torchs.set(name, data))  # type: ignore[arg-type]  # bytes work, the stub says str

    async def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        limit = to_limit(timeout, self._timeout)
        deadline = time.monotonic() + limit
        await self._wait([key], limit, deadline)
        return await self._answered(self._call(lambda: self.torchs.get(key)), deadline)

    def _answered(self, reply: Awaitable[T], deadline: float) -> Awaitable[T]:
        return answered(reply, deadline, type(self.torchs).__name__)

    async def add(self, key: str, amount: int) -> int:
        name, number = to_key(key), to_amount(amount)
        return await self._call(lambda: self.torchs.add(name, number))

    async def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        name, want, new = to_key(key), to_bytes("expected", expected), to_bytes("desired", desired)
        return await self._call(lambda: self.torchs.compare_set(name, want, new))  # type: ignore[arg-type]

    async def check(self, keys: Sequence[str]) -> bool:
        names = to_keys(keys)
        return await self._call(lambda: self.torchs.check(names))

    async def wait(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> None:
        limit = to_limit(timeout, self._timeout)
        await self._wait(keys, limit, time.monotonic() + limit)

    async def _wait(self, keys: Sequence[str], limit: float, deadline: float) -> None:
        pause = FIRST_POLL
        while not await self._answered(self.check(keys), deadline):  # also with a limit of 0
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreTimeoutError(f"keys {list(keys)} did not all appear within {limit:g} s")
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, LAST_POLL)

    async def delete(self, key: str) -> bool:
        name = to_key(key)
        return await self._call(lambda: self.torchs.delete_key(name))

    async def append(self, key: str, value: bytes | str) -> None:
        name, data = to_key(key), to_bytes("value", value)
        await self._call(lambda: self.torchs.append(name, data))  # type: ignore[attr-defined]

    async def num_keys(self) -> int:
        return await self._call(self.torchs.num_keys)

    def server(self) -> ServerAddress | None:
        """The server of a TCPStore, perhaps behind prefixes; None for other stores.

        Subclasses count as these: it must be the same on all ranks, of which one may log its calls, say.
        """
        store = self.torchs
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, dist.TCPStore):
            return None
        return ServerAddress(store.host, store.port, store is not self.torchs)

    def local_address(self) -> str | None:
        server = self.server()
        return None if server is None else address_towards(server.host, server.port)


@final
class TorchStoreView(dist.Store):
    """A torch view of an asynccomm store, for torch code in another thread while the loop is alive.

    After the loop has closed, and after ``end``, every call raises StoreError, including calls that are already
    waiting.

    Args:
        store: the store behind the view.
        loop: the running loop that the store belongs to.
        timeout: seconds that ``get`` and ``wait`` allow at least; torch often passes a shorter limit.
    """

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        super().__init__()
        self._ours = store
        self._loop = loop
        self._seconds = timeout
        self._ended = False

    def end(self) -> None:
        """Fail all calls from now on; waiting threads return within ``LOOK_SECONDS``. From any thread."""
        self._ended = True

    def _run(self, method: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        async def call() -> T:  # on the loop: the method itself may send
            return await method(*arguments)

        over = StoreError("the event loop has closed, or does not need this store any more")
        if self._ended:
            raise over
        coroutine = call()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as exc:
            coroutine.close()
            raise over from exc
        while not futures.wait([future], LOOK_SECONDS).done:  # closing the loop leaves the future pending
            if self._loop.is_closed():
                raise over
            if self._ended:
                future.cancel()
        if future.cancelled():  # by the loop above, or by an event loop about to close
            raise over
        return future.result()

    def set(self, key: str, value: str | bytes) -> None:
        self._run(self._ours.set, key, value)

    def get(self, key: str) -> bytes:
        return self._run(self._ours.get, key, self._seconds)

    def add(self, key: str, amount: int) -> int:
        return self._run(self._ours.add, key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._run(self._ours.check, keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._seconds if timeout is None else max(self._seconds, timeout.total_seconds())
        self._run(self._ours.wait, keys, limit)

    def delete_key(self, key: str) -> bool:
        return self._run(self._ours.delete, key)
