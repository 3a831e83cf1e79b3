"""Where the ranks of the world meet: handlers by an URL's scheme, and the barrier over the store that they can pass.

``env``, ``tcp`` and ``file`` are as in ``asynccomm.new_comm``. A handler of a program's own gives ``(store, rank,
world_size)`` as torch's do, from a generator, or from one to be awaited.
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
from asynccomm.rendezvous.spec import StoreSession, connect_store, resolve_spec
from asynccomm.store.base import Store, within
from asynccomm.store.torch_store import TorchStore

__all__ = ["LeaveOnExit", "as_store", "register_rendezvous_handler", "rendezvous", "store_based_barrier"]

Handler: TypeAlias = "Callable[..., Iterable[Any] | AsyncIterator[Any]]"

LEAST_SLICE: Final = 10.0  # seconds between words in the log that a barrier still waits
SLICE_PER_RANK: Final = 1e-3
LEAVE_SECONDS: Final = 10.0  # the rank that hosts the store stays for the others this long
WORD_SECONDS: Final = 1.0  # for the store to take the word of another rank that it leaves
GONE_KEY: Final = "asynccomm/c10d/gone"

_log: Final = logging.getLogger("asynccomm")


def as_store(store: Store | dist.Store) -> Store:
    """One of our stores, or torch's seen as one."""
    if isinstance(store, Store):
        return store
    if isinstance(store, dist.Store):
        return TorchStore(store)
    raise TypeError(f"store must be a Store of asynccomm's or torch's, got {store!r} ({type(store).__name__})")


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, timeout: timedelta = timedelta(minutes=30), **options: Any
) -> AsyncGenerator[Any]:
    """Meet at ``url``: gives the store, this rank and the number of ranks, once.

    The store is open until the generator is closed. If this process hosts it, closing waits for the others to close
    theirs, for some seconds; :class:`LeaveOnExit` is thrown in to wait for fewer of them.

    Args:
        rank, world_size: if the URL and the environment do not say; -1: they do.
        timeout: for the store to be there.
        options: for the handler of the URL's scheme.

    Raises: RuntimeError for a scheme that nobody handles, and at the second item; AssertionError if the URL says rank
        or world_size, too; ValueError naming what is missing; RendezvousError if nobody is there.
    """
    if not isinstance(url, str):
        raise RuntimeError(f"an URL to meet at must be a str, got {url!r}")
    handler = _handlers.get(urlsplit(url).scheme)
    if handler is None:
        raise RuntimeError(f"nobody handles the scheme of {url!r}; known: {', '.join(sorted(_handlers))}")
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
    """Thrown into a meeting to end it.

    Args:
        waits_for: how many ranks the host of the store waits for, this one included.
    """

    def __init__(self, waits_for: int) -> None:
        super().__init__(waits_for)
        self.waits_for = waits_for


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Have URLs of ``scheme`` handled by ``handler(url, timeout=...)``. Raises: RuntimeError if they are already."""
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
    """Say that this rank is done; the host of the store waits for others, who may still need it."""
    stays = meeting.hosted is not None and waits_for > 1
    try:
        async with within(LEAVE_SECONDS if stays else WORD_SECONDS):
            gone = await meeting.store.add(GONE_KEY, 1)
            everybody = (gone - 1) // size * size + waits_for  # the store may have had ranks that met here before
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
    """The URL with rank and world_size in its query, where they are given."""
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
    """Done when ``rendezvous_count`` ranks have come, of torch's or ours: they leave the same words in the store.

    May be passed again, with the same number of ranks: those after the first have keys of their own.

    Raises: DistStoreError if that takes longer than ``timeout``.
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
