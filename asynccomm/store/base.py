"""The key-value store that ranks meet on: the interface, and the view of a store under a prefix.

Every store has the semantics of torch's stores: ``get`` waits until the key exists, ``add`` keeps a decimal number, and
values are bytes. All methods are awaited and safe to cancel; the server may have carried out a cancelled request.
``set`` and ``append`` return once the request is on its way, in order with the same client's later requests. Methods
with a single reply are typed as awaitables, because a client over a connection returns the reply's future itself: the
call sends the request, so many requests at once need no task each.
"""

from __future__ import annotations

import abc
import asyncio
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar, final

from asynccomm.core.handles import Handle
from asynccomm.errors import StoreTimeoutError
from asynccomm.options import number_of_seconds

__all__ = [
    "DEFAULT_TIMEOUT",
    "PrefixStore",
    "Store",
    "answered",
    "to_amount",
    "to_bytes",
    "to_key",
    "to_keys",
    "to_limit",
    "within",
]

T = TypeVar("T")

DEFAULT_TIMEOUT = 300.0  # seconds that get() and wait() allow for a key to appear; torch's default
REPLY_SECONDS = 2.0  # for a reply to get() and wait(), beyond their limit: a limit of 0 finds the keys that exist
REPLY_TURNS = 3  # of the event loop after that: if it was blocked, a reply that has come may not have been read


class Store(Handle, abc.ABC):
    """Bytes under string keys, shared by all ranks."""

    _instead = "connect to the store there"

    @abc.abstractmethod
    async def set(self, key: str, value: bytes | str) -> None:
        """Store ``value`` (a str as UTF-8) under ``key``."""

    @abc.abstractmethod
    async def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        """The value of ``key``, waiting up to ``timeout`` seconds for the key to appear (None: the store's default).

        ``timeout`` may also be a timedelta.

        Raises: StoreTimeoutError naming the key, or the store if it does not answer within 2 s more.
        """

    @abc.abstractmethod
    def add(self, key: str, amount: int) -> Awaitable[int]:
        """Add ``amount`` to the number under ``key`` (a missing key counts as 0) and return the sum.

        ``add(key, 0)`` reads the number and creates a missing key, as in torch.
        """

    @abc.abstractmethod
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> Awaitable[bytes]:
        """Store ``desired`` if the value is ``expected`` (empty: or the key is missing); returns the value afterwards.

        As in torch, a missing key with a non-empty ``expected`` stores nothing and returns ``expected``. Never ``wait``
        on a key that ``compare_set`` writes: torch's servers wake such waiters too often, or never.
        """

    @abc.abstractmethod
    def check(self, keys: Sequence[str]) -> Awaitable[bool]:
        """Whether all ``keys`` exist."""

    @abc.abstractmethod
    async def wait(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> None:
        """Return once all ``keys`` exist. Raises: StoreTimeoutError as ``get``."""

    @abc.abstractmethod
    def delete(self, key: str) -> Awaitable[bool]:
        """Remove ``key``; returns whether the key existed."""

    @abc.abstractmethod
    async def append(self, key: str, value: bytes | str) -> None:
        """Add ``value`` to the end of the value of ``key``."""

    @abc.abstractmethod
    def num_keys(self) -> Awaitable[int]:
        """The number of keys in the whole store, including keys outside of a prefix."""

    async def multi_get(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> list[bytes]:
        """The values of ``keys``, waiting for all of them to exist. Not atomic."""
        await self.wait(keys, timeout)
        return [await self.get(key, timeout) for key in keys]

    async def multi_set(self, items: Mapping[str, bytes | str]) -> None:
        """Store all ``items``. Not atomic."""
        for key, value in items.items():
            await self.set(key, value)

    def flush(self) -> None:
        """Send pending requests now, instead of at the end of the loop iteration."""

    def local_address(self) -> str | None:
        """The address of this host, for other hosts, on its route to the store; None without a route."""
        return None

    async def aclose(self) -> None:
        """Release connections. The store's contents stay with its server."""

    def prefix(self, prefix: str) -> PrefixStore:
        """A view of this store in which every key is ``prefix + "/" + key``, as torch's PrefixStore names it."""
        return PrefixStore(prefix, self)


@final
class PrefixStore(Store):
    """A view of another store under a prefix. Closing the view leaves the underlying store open."""

    def __init__(self, prefix: str, store: Store) -> None:
        self.name = prefix
        self.underlying = store

    def prefix(self, prefix: str) -> PrefixStore:
        return PrefixStore(self._key(prefix), self.underlying)  # one view in place of two

    def _key(self, key: str) -> str:
        return f"{self.name}/{to_key(key)}"

    async def set(self, key: str, value: bytes | str) -> None:
        await self.underlying.set(self._key(key), value)

    async def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        return await self.underlying.get(self._key(key), timeout)

    def add(self, key: str, amount: int) -> Awaitable[int]:
        return self.underlying.add(self._key(key), amount)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> Awaitable[bytes]:
        return self.underlying.compare_set(self._key(key), expected, desired)

    def check(self, keys: Sequence[str]) -> Awaitable[bool]:
        return self.underlying.check([self._key(key) for key in to_keys(keys)])

    async def wait(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> None:
        await self.underlying.wait([self._key(key) for key in to_keys(keys)], timeout)

    def delete(self, key: str) -> Awaitable[bool]:
        return self.underlying.delete(self._key(key))

    async def append(self, key: str, value: bytes | str) -> None:
        await self.underlying.append(self._key(key), value)

    def num_keys(self) -> Awaitable[int]:
        return self.underlying.num_keys()

    async def multi_get(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> list[bytes]:
        return await self.underlying.multi_get([self._key(key) for key in to_keys(keys)], timeout)

    async def multi_set(self, items: Mapping[str, bytes | str]) -> None:
        await self.underlying.multi_set({self._key(key): value for key, value in items.items()})

    def flush(self) -> None:
        self.underlying.flush()

    def local_address(self) -> str | None:
        return self.underlying.local_address()


def to_bytes(name: str, value: bytes | str) -> bytes:
    """``value`` as bytes. Raises: TypeError, ValueError naming the argument."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"{name} must be bytes or a str that UTF-8 can encode, got {value!r}") from exc
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"{name} must be bytes or str, got {value!r}")


def to_key(key: str) -> str:
    """``key``, if it is a str for UTF-8, except for bytes that ``list_keys`` could not decode.

    Raises: TypeError, ValueError.
    """
    if not isinstance(key, str):
        raise TypeError(f"key must be a str, got {key!r}")
    if not key.isascii():
        try:
            key.encode(errors="surrogateescape")
        except UnicodeEncodeError as exc:
            raise ValueError(f"key must be a str that UTF-8 can encode, got {key!r}") from exc
    return key


def to_keys(keys: Sequence[str]) -> list[str]:
    """``keys`` as a list. Raises ``TypeError`` for a single str, which is a sequence of one-letter keys."""
    if isinstance(keys, str):
        raise TypeError(f"keys must be a list of keys, got the str {keys!r}")
    return [to_key(key) for key in keys]


def to_amount(amount: int) -> int:
    """``amount``, if a store can add that number. Raises: ValueError."""
    if isinstance(amount, bool) or not isinstance(amount, int) or not -(2**63) <= amount < 2**63:
        raise ValueError(f"amount must be a 64-bit integer, got {amount!r}")
    return amount


def to_limit(timeout: float | timedelta | None, default: float) -> float:
    """Seconds for a wait. Raises: TypeError; ValueError for nan, which no deadline ever reaches."""
    if timeout is None:
        return default
    limit = number_of_seconds("timeout", timeout)
    if math.isnan(limit):
        raise ValueError(f"timeout must be a number of seconds, got {limit}")
    return limit


async def answered(reply: Awaitable[T], deadline: float, store: str) -> T:
    """The reply of a store, for a call that waits for its keys until ``deadline``, on the monotonic clock.

    Raises: StoreTimeoutError naming the ``store``.
    """
    left = max(0.0, deadline - time.monotonic()) + REPLY_SECONDS
    replied = asyncio.ensure_future(reply)
    try:
        await asyncio.wait([replied], timeout=None if left == math.inf else left)
        for _ in range(REPLY_TURNS):
            if not replied.done():
                await asyncio.sleep(0)
        if not replied.done():
            raise StoreTimeoutError(f"the {store} did not answer in time")
        return replied.result()
    finally:
        replied.cancel()


def path_of(store: Store) -> str:
    """The prefix of the keys of a view; empty for a whole store."""
    names = []
    while isinstance(store, PrefixStore):
        names.append(store.name)
        store = store.underlying
    return "/".join(reversed(names))


def within(limit: float) -> asyncio.Timeout:
    """``asyncio.timeout`` that also accepts ``math.inf``."""
    return asyncio.timeout(None if limit == math.inf else limit)
