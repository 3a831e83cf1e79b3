"""The ranks of a queue compare their arguments over the store, before any of them attaches.

Each queue has a place of its own in the store, where the ranks meet:

1. Each rank writes its terms, the arguments that hold for the whole queue; the host adds its handle.
2. The last rank to come compares them, and publishes a verdict: the handle, or the first difference.

A rank that gives up publishes a verdict, too. The first verdict counts for all ranks: also for a rank that comes later,
which thus fails at once. So a failed meeting stays failed, and a rank that fell behind catches up call by call. If the
verdict is the handle already, a rank that gives up leaves its reason for the host, which waits until all have attached.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar, final

from msgspec.structs import asdict

from asynccomm.control.transport.schema import Message, MessageError, dumps, loads
from asynccomm.core.tasks import shielded
from asynccomm.errors import AsyncCommError, BackendError, StoreProtocolError
from asynccomm.store.base import Store

M = TypeVar("M", bound=Message)
STORE_SECONDS: Final = 0.5  # for the store to answer a rank past its limit


@final
class QueueTerms(Message, frozen=True):
    """The arguments of one rank that must be the same on all ranks."""

    writer: int | None
    reader: int | None
    capacity: int
    overflow: str
    on_lost: str


@final
class _OfferedTerms(Message, frozen=True):
    terms: QueueTerms
    handle: str  #: empty: the rank is not the host


@final
class _Verdict(Message, frozen=True):
    handle: str = ""
    differing: str = ""  #: the argument that differs, and its values
    problem: str = ""

    def result(self) -> str:
        """The handle. Raises: ValueError: the arguments differ; BackendError: a rank gave up."""
        if self.differing:
            raise ValueError(self.differing)
        if self.problem:
            raise BackendError(self.problem)
        return self.handle


@final
class TermsMeeting:
    """One rank's part in the meeting for one queue.

    Args:
        room: the part of the store for this meeting alone.
        ranks: of the queue, in the same order on all of them.
        terms: of this rank.
    """

    def __init__(self, room: Store, rank: int, ranks: Sequence[int], terms: QueueTerms) -> None:
        self._room = room
        self._rank = rank
        self._terms = terms
        self._arrivals: dict[int, str] = {each: f"arrived/{each}" for each in ranks}

    async def agree(self, handle: str = "") -> str:
        """Come to the meeting; returns the handle of the host, which gives its own.

        Raises: ValueError, BackendError: the verdict of all ranks; StoreError.
        """
        verdict = await shielded(self._arrive(_OfferedTerms(self._terms, handle)))
        return (verdict or _read(_Verdict, await self._room.get("verdict", float("inf")))).result()

    async def _arrive(self, offer: _OfferedTerms) -> _Verdict | None:
        """The verdict, if this rank is the last one to come."""
        await self._room.set(self._arrivals[self._rank], dumps(offer))
        if await self._room.add("arrivals", 1) < len(self._arrivals):
            return None
        texts = await self._room.multi_get(list(self._arrivals.values()), float("inf"))
        return await self._decide(
            _compare({rank: _read(_OfferedTerms, text) for rank, text in zip(self._arrivals, texts, strict=True)})
        )

    async def _decide(self, mine: _Verdict) -> _Verdict:
        """Publish a verdict, unless there is one; returns the verdict that counts."""
        decided = await self._room.compare_set("decided", "", dumps(mine))
        await self._room.set("verdict", decided)  # a separate key: compare_set does not wake waiting ranks
        await self._room.check([])  # the reply shows that the server has the verdict, so this rank may leave
        return _read(_Verdict, decided)

    async def late(self, limit: float) -> str:
        """The handle, if the verdict has come with the limit; else the verdict is that ranks are missing.

        Raises: as ``agree``.
        """
        try:
            async with asyncio.timeout(STORE_SECONDS):
                came = await asyncio.gather(*(self._room.check([key]) for key in self._arrivals.values()))
                missing = [rank for rank, there in zip(self._arrivals, came, strict=True) if not there]
                problem = (
                    f"ranks {missing} did not come to the queue within {limit:g} s, the limit of rank {self._rank}"
                )
                verdict = await self._decide(_Verdict(problem=problem))
        except TimeoutError as exc:
            raise BackendError(f"the store did not answer, and no queue was made within {limit:g} s") from exc
        return verdict.result()

    async def give_up(self, reason: str) -> None:
        """Let the other ranks know that this rank takes no part; after a verdict of failure, they do."""
        problem = f"rank {self._rank} gave up the queue: {reason}"
        with contextlib.suppress(AsyncCommError):  # the store has gone, and with it the meeting
            if (await self._decide(_Verdict(problem=problem))).handle:
                await self._room.set("left", problem)

    async def left(self) -> None:
        """Raise BackendError once a rank gives up after the verdict; for the host, while it waits for the ranks."""
        raise BackendError((await self._room.get("left", float("inf"))).decode(errors="replace"))

    async def tidy(self) -> None:
        """Delete the keys, which no rank reads any more: all have attached."""
        keys = [*self._arrivals.values(), "arrivals", "decided", "verdict"]
        await asyncio.gather(*(self._room.delete(key) for key in keys))


def _compare(offers: Mapping[int, _OfferedTerms]) -> _Verdict:
    (first, expected), *others = ((rank, asdict(offer.terms)) for rank, offer in offers.items())
    for rank, terms in others:
        for name, value in expected.items():
            if terms[name] != value:
                return _Verdict(
                    differing=f"{name} must be the same on all ranks of the queue, "
                    f"got {value!r} on rank {first} and {terms[name]!r} on rank {rank}"
                )
    return _Verdict(handle=next(offer.handle for offer in offers.values() if offer.handle))


def _read(kind: type[M], text: bytes) -> M:
    try:
        found: M = loads(kind, text)
    except MessageError as exc:
        raise StoreProtocolError(f"the store has an invalid message of a queue's rank: {exc}") from None
    return found
