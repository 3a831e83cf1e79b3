"""The ranks of a queue meet in the store: they compare their arguments, and then wait until all have attached.

Each queue has a place of its own in the store, where its ranks take two decisions:

1. The terms. Each rank writes its terms, the arguments that hold for the whole queue; the host adds its handle. The
   last rank to come compares them, and publishes the verdict: the handle, or the first difference.
2. The queue. Each rank comes once it has attached, and the last one publishes that the queue is complete.

A rank that gives up publishes a verdict, too. The first verdict counts for all ranks: also for a rank that comes later,
which thus fails at once. So a call succeeds on all ranks or on none, a failed meeting stays failed, and a rank that
fell behind catches up call by call. A rank with a call that is over counts itself, and the last one deletes the keys.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar, final

from msgspec.structs import asdict

from asynccomm.control.transport.schema import Message, MessageError, dumps, loads
from asynccomm.core.tasks import detach
from asynccomm.errors import AsyncCommError, BackendError, StoreProtocolError
from asynccomm.store.base import Store

M = TypeVar("M", bound=Message)
STORE_SECONDS: Final = 0.5  # for the store to answer a rank past its limit
CAUSE_SECONDS: Final = 0.5  # for the verdict of another rank, or the error of the comm, after a failure to attach


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
class QueueVerdict(Message, frozen=True):
    """The outcome of a decision."""

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
class Decision:
    """One rank's part in one decision.

    Args:
        room: the part of the store for this decision alone.
        ranks: of the queue, in the same order on all of them.
        task: of the ranks, for the error that some did not come.
    """

    def __init__(self, room: Store, rank: int, ranks: Sequence[int], task: str) -> None:
        self._room = room
        self._rank = rank
        self._task = task
        self._arrivals: dict[int, str] = {each: f"arrived/{each}" for each in ranks}
        self._coming: asyncio.Task[None] | None = None

    async def come(self, offer: str, compare: Callable[[Mapping[int, bytes]], QueueVerdict]) -> None:
        """Come with ``offer``; the last rank to come compares all offers. Goes on when the caller is cancelled."""
        self._coming = detach(asyncio.ensure_future(self._come(offer, compare)))
        await asyncio.shield(self._coming)

    async def _come(self, offer: str, compare: Callable[[Mapping[int, bytes]], QueueVerdict]) -> None:
        await self._room.set(self._arrivals[self._rank], offer)
        if await self._room.add("arrivals", 1) == len(self._arrivals):
            offers = await self._room.multi_get(list(self._arrivals.values()), float("inf"))
            await self.decide(compare(dict(zip(self._arrivals, offers, strict=True))))

    async def decide(self, mine: QueueVerdict) -> QueueVerdict:
        """Publish a verdict, unless there is one; returns the verdict that counts."""
        decided = await self._room.compare_set("decided", "", dumps(mine))
        await self._room.set("verdict", decided)  # a separate key: compare_set does not wake waiting ranks
        await self._room.check([])  # the reply shows that the server has the verdict, so this rank may leave
        return _read(QueueVerdict, decided)

    async def reached(self, coming: Callable[[], Awaitable[None]]) -> str:
        """The result of the decision, to which this rank comes by ``coming``.

        Raises: ValueError, BackendError: the verdict of all ranks; the error of ``coming``; StoreError.
        """
        tasks = asyncio.ensure_future(self._result()), asyncio.ensure_future(coming())
        result, mine = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if not result.done():  # the host may have left after its verdict, or be lost
                await asyncio.wait([result], timeout=CAUSE_SECONDS)
            if not result.done():
                await mine  # raises
            return await result
        finally:
            for task in tasks:
                task.cancel()

    async def _result(self) -> str:
        return _read(QueueVerdict, await self._room.get("verdict", float("inf"))).result()

    async def late(self, limit: float) -> str:
        """The result, if the verdict has come with the limit; else the verdict is that ranks are missing.

        Raises: as ``reached``.
        """
        try:
            async with asyncio.timeout(STORE_SECONDS):
                came = await asyncio.gather(*(self._room.check([key]) for key in self._arrivals.values()))
                missing = [rank for rank, there in zip(self._arrivals, came, strict=True) if not there]
                who = f"ranks {missing}" if missing else "the last rank"
                problem = f"{who} did not {self._task} within {limit:g} s, the limit of rank {self._rank}"
                verdict = await self.decide(QueueVerdict(problem=problem))
        except TimeoutError as exc:
            raise BackendError(f"the store did not answer, and no queue was made within {limit:g} s") from exc
        return verdict.result()

    async def delete(self) -> None:
        keys = [*self._arrivals.values(), "arrivals", "decided", "verdict"]
        await asyncio.gather(*(self._room.delete(key) for key in keys))

    async def wait_written(self) -> None:
        """Wait until a call of ``come`` that was cancelled writes no more."""
        if self._coming is not None:
            await asyncio.wait([self._coming])


@final
class QueueMeeting:
    """One rank's part in the meeting for one queue.

    Args:
        room: the part of the store for this meeting alone.
        ranks: of the queue, in the same order on all of them.
        terms: of this rank.
    """

    def __init__(self, room: Store, rank: int, ranks: Sequence[int], terms: QueueTerms) -> None:
        self._room = room
        self._rank = rank
        self._ranks = len(ranks)
        self._terms = terms
        self.terms: Decision = Decision(room.prefix("terms"), rank, ranks, "come to the queue")
        self.queue: Decision = Decision(room.prefix("queue"), rank, ranks, "attach to the queue")

    async def offer(self, handle: str = "") -> None:
        """Come to the decision on the terms; the host gives its handle."""
        await self.terms.come(dumps(_OfferedTerms(self._terms, handle)), _compare)

    async def attached(self) -> None:
        """Come to the decision on the queue."""
        await self.queue.come("attached", lambda _: QueueVerdict())

    async def leave(self, reason: str | None = None) -> None:
        """Leave the meeting, once; the last rank deletes the keys, which no rank reads or writes any more.

        Args:
            reason: this rank takes no part in the queue, and the others get the reason; after a failure or a complete
                queue, they do not.
        """
        with contextlib.suppress(AsyncCommError):  # the store has gone, and with it the meeting
            mine = QueueVerdict(problem=f"rank {self._rank} gave up the queue: {reason}")
            if reason is not None:  # at once: the queue may be complete soon
                await asyncio.gather(self.terms.decide(mine), self.queue.decide(mine))
            await self.terms.wait_written()
            await self.queue.wait_written()
            if await self._room.add("left", 1) == self._ranks:
                await asyncio.gather(self.terms.delete(), self.queue.delete(), self._room.delete("left"))


def _compare(texts: Mapping[int, bytes]) -> QueueVerdict:
    offers = {rank: _read(_OfferedTerms, text) for rank, text in texts.items()}
    (first, expected), *others = ((rank, asdict(offer.terms)) for rank, offer in offers.items())
    for rank, terms in others:
        for name, value in expected.items():
            if terms[name] != value:
                return QueueVerdict(
                    differing=f"{name} must be the same on all ranks of the queue, "
                    f"got {value!r} on rank {first} and {terms[name]!r} on rank {rank}"
                )
    return QueueVerdict(handle=next(offer.handle for offer in offers.values() if offer.handle))


def _read(kind: type[M], text: bytes) -> M:
    try:
        found: M = loads(kind, text)
    except MessageError as exc:
        raise StoreProtocolError(f"the store has an invalid message of a queue's rank: {exc}") from None
    return found
