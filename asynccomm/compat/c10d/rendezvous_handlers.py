"""Rendezvous of the world's ranks: handlers by URL scheme, and a barrier over the store.

``env``, ``tcp`` and ``file`` work as in ``asynccomm.new_comm``. A program's own handler yields ``(store, rank,
world_size)``, as torch's handlers do, from a generator or an async generator.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from datetime import timedelta
from typing import Any, Final, TypeAlias, final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from torch import distributed as dist

from asynccomm.compat.c10d.logs import timed
from asynccomm.compat.c10d.types import STORE_BASED_BARRIER_PREFIX, DistStoreError
from asynccomm.errors import AsyncCommError, StoreTimeoutError
from asynccomm.rendezvous.job import ANNOUNCE_SECONDS, LEAVE_SECONDS
from asynccomm.rendezvous.spec import StoreSession, connect_store, resolve_spec
from asynccomm.store.base import Store, within
from asynccomm.store.torch_store import TorchStore

Handler: TypeAlias = Callable[..., Iterable[Any] | AsyncIterator[Any]]

LEAST_SLICE: Final = 10.0  # seconds between log records of a waiting barrier
SLICE_PER_RANK: Final = 1e-3
GONE_KEY: Final = "asynccomm/c10d/gone"

_log: Final = logging.getLogger("asynccomm")


def as_store(store: Store | dist.Store) -> Store:
    """Return our store unchanged, and wrap torch's store."""
    if isinstance(store, Store):
        return store
    if isinstance(store, dist.Store):
        return TorchStore(store)
    raise TypeError(f"store must be a Store of asynccomm's or torch's, got {store!r} ({type(store).__name__})")


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, timeout: timedelta = timedelta(minutes=30), **options: Any
) -> AsyncGenerator[Any]:
    """Connect to the store at ``url``: an async generator that yields the store, this rank and the world size once.

    The store is open until the generator is closed. If this process hosts the store, closing waits up to
    ``LEAVE_SECONDS`` for the other ranks to close theirs; throw in :class:`LeaveOnExit` to wait for fewer ranks.

    Args:
        rank, world_size: required if the URL and the environment lack them; -1: not given.
        timeout: of connecting to the store.
        options: for the handler of the URL's scheme.

    Raises: RuntimeError for a scheme without a handler, and at the second item; AssertionError if the URL has a rank or
        world_size as well; ValueError naming a missing value; RendezvousError if no store answers.
    """
    if not isinstance(url, str):
        raise RuntimeError(f"an URL to meet at must be a str, got {url!r}")
    handler = _handlers.get(urlsplit(url).scheme)
    if handler is None:
        raise RuntimeError(f"no handler is registered for the scheme of {url!r}; known: {', '.join(sorted(_handlers))}")
    found = handler(_with_query(url, rank, world_size), timeout=timeout, **options)
    return found if isinstance(found, AsyncGenerator) else _each(found)


async def _each(found: Iterable[Any] | AsyncIterator[Any]) -> AsyncGenerator[Any]:
    if isinstance(found, AsyncIterator):
        async for item in found:
            yield item
    else:
        for item in found:
            yield item


@final
class LeaveOnExit(Exception):
    """Thrown into a rendezvous generator to close the store.

    Args:
        waits_for: the number of ranks that the host of the store waits for, including this rank.
    """

    def __init__(self, waits_for: int) -> None:
        super().__init__(waits_for)
        self.waits_for = waits_for


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Register ``handler(url, timeout=...)`` for URLs of ``scheme``. Raises: RuntimeError if it has a handler."""
    if scheme in _handlers:
        raise RuntimeError(f"the scheme {scheme!r} is handled already")
    _handlers[scheme] = handler


async def _at_url(url: str, timeout: timedelta) -> AsyncGenerator[tuple[Store, int, int]]:
    place = resolve_spec(url, None, None)
    meeting = await connect_store(place, timeout.total_seconds())
    try:
        yield meeting.store, place.rank, place.size
        raise RuntimeError(f"the ranks meet at {url} once; there is no meeting again")
    except GeneratorExit:
        await _say_goodbye(meeting, place.size, place.size)
        raise
    except LeaveOnExit as leaving:
        await _say_goodbye(meeting, place.size, leaving.waits_for)
        raise
    finally:
        await meeting.aclose()


async def _say_goodbye(meeting: StoreSession, size: int, waits_for: int) -> None:
    """Report that this rank leaves; the host of the store waits for other ranks, which may still need the store."""
    stays = meeting.hosted is not None and waits_for > 1
    try:
        async with within(LEAVE_SECONDS if stays else ANNOUNCE_SECONDS):
            gone = await meeting.store.add(GONE_KEY, 1)
            everybody = (gone - 1) // size * size + waits_for  # the store may also count ranks of earlier rendezvous
            while stays and gone < everybody:
                await asyncio.sleep(0.01)
                gone = await meeting.store.add(GONE_KEY, 0)
    except TimeoutError:
        if stays:
            _log.warning("not all ranks have destroyed their groups within %g s; the store ends now", LEAVE_SECONDS)
    except AsyncCommError as exc:
        _log.debug("the store was gone before this rank left: %s", exc)


_handlers: Final[dict[str, Handler]] = {"env": _at_url, "tcp": _at_url, "file": _at_url}


def _with_query(url: str, rank: int, world_size: int) -> str:
    """The URL with the given rank and world_size in its query."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value != -1:
            if name in query:
                raise AssertionError(f"{name} is given as {value}, and by the URL {url!r}, too")
            query[name] = str(value)
    return urlunsplit(parts._replace(query=urlencode(query)))


@timed
async def store_based_barrier(
    rank: int,
    store: Store | dist.Store,
    group_name: str,
    rendezvous_count: int,
    timeout: timedelta,
    logging_interval: timedelta = timedelta(seconds=10),
) -> None:
    """Wait until ``rendezvous_count`` ranks have called this barrier or torch's, which uses the same keys of the store.

    The barrier can be repeated with the same number of ranks: each later round has keys of its own.

    Raises: DistStoreError after ``timeout``.
    """
    store = as_store(store)
    key = f"{STORE_BASED_BARRIER_PREFIX}:{group_name}"
    turn = (await store.add(key, 1) - 1) // rendezvous_count
    last = f"{key}:last_worker" if turn == 0 else f"{key}:{turn}:last_worker"
    if await store.add(key, 0) >= (turn + 1) * rendezvous_count:
        await store.set(last, "1")
    start = time.monotonic()
    limit = timeout.total_seconds()
    least = max(logging_interval.total_seconds(), LEAST_SLICE + rendezvous_count * SLICE_PER_RANK)
    while True:
        left = start + limit - time.monotonic()
        try:
            await store.wait([last], max(0.0, min(least, left)))
        except StoreTimeoutError as exc:
            joined = await store.add(key, 0) - turn * rendezvous_count
            state = f"rank {rank}, key {key}: {joined} of {rendezvous_count} ranks have come"
            if left <= least:
                raise DistStoreError(f"the barrier over the store took longer than {limit:g} s on {state}") from exc
            _log.debug("the barrier over the store waits for %.0f s on %s", time.monotonic() - start, state)
        else:
            return
