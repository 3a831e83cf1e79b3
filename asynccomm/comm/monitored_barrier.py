"""A barrier over the store that names missing ranks; it uses no tensor, no transport and no device.

Each call of a rank is a round, numbered by the rank's earlier calls. In a round:

1. Collect: each rank sets a key to announce its arrival; rank 0 waits for the keys of all ranks.
2. Release: rank 0 publishes a verdict, the list of missing ranks; the other ranks wait for it.

A rank past its deadline without a verdict publishes one itself. The first verdict of a round counts for all ranks: also
for rank 0, and for a rank that comes later, which thus fails at once and with the same error. So a failed round stays
failed, and its keys cannot be mistaken for keys of the next round: a rank that fell behind catches up call by call.

A verdict read from the store is validated; an invalid verdict fails the round by an error of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, final

from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, MonitoredBarrierError, StoreProtocolError, StoreTimeoutError
from asynccomm.ops import Op
from asynccomm.ops.validation import CommInfo
from asynccomm.store.base import Store, within

VERDICT_SECONDS = 0.75  # for which a rank past its deadline waits for rank 0, whose deadline may be later
VERDICT_BYTES: Final = 1024  # limit for a verdict, plus RANK_BYTES for each rank
RANK_BYTES: Final = 24
SHOWN: Final = 200  # characters of an invalid verdict that an error shows
STORE_SECONDS = 0.5  # for the store to answer after that; else the error names the store


@final
@dataclass(frozen=True, slots=True)
class MonitoredBarrier(Op):
    """A barrier over the store; not a collective of the backend."""

    kind = "monitored_barrier"
    p2p = True  # no part of the sequence of collectives
    wait_all_ranks: bool = False

    def __str__(self) -> str:
        return "monitored_barrier()"


@final
class MonitoredBarriers:
    """One rank's part in a comm's monitored barriers.

    Args:
        group: the comm.
        room: the part of the store for the keys of this comm alone.
    """

    def __init__(self, group: CommInfo, room: Store) -> None:
        self._group = group
        self._room = room.prefix("monitored")
        self._turn = asyncio.Lock()  # a rank takes part in one round at a time, the oldest
        self._round = 0
        self._swept = 0  # verdicts of the rounds before this one are deleted

    async def pass_through(self, work: Work[None]) -> None:
        """Take part in the next round, for ``work``, the Work of a MonitoredBarrier.

        Raises: MonitoredBarrierError, StoreError; StoreProtocolError for an invalid verdict in the store.
        """
        limit = work.timeout + VERDICT_SECONDS + STORE_SECONDS
        async with self._turn:
            number = self._round
            self._round += 1
            room = self._room.prefix(str(number))
            try:
                async with within(max(STORE_SECONDS, work.started + limit - time.monotonic())):
                    side = self._collect if self._group.rank == 0 else self._report
                    verdict = await side(room, work)
                    await self._tidy(number, verdict)
            except TimeoutError as exc:
                raise StoreTimeoutError(f"the store did not answer within {limit:g} s in a monitored barrier") from exc
        if verdict["missing"]:
            raise MonitoredBarrierError(
                self._group.name, verdict["rank"], tuple(verdict["missing"]), float(verdict["elapsed"])
            )

    async def _collect(self, room: Store, work: Work[None]) -> dict[str, Any]:
        """Do rank 0's part of a round; returns the verdict."""
        await room.set("arrived/0", b"1")
        arrivals = [f"arrived/{rank}" for rank in range(self._group.size)]
        try:
            await _first(room.wait(arrivals, _left(work)), room.wait(["verdict"], _left(work)))
        except StoreTimeoutError:
            missing = await self._missing(room)
        else:
            missing = []  # if ``verdict`` came first, the verdict made here is too late
        return await self._decide(room, work, missing)

    async def _report(self, room: Store, work: Work[None]) -> dict[str, Any]:
        """Do the part of a rank other than 0; returns the verdict."""
        await room.set(f"arrived/{self._group.rank}", b"1")
        with contextlib.suppress(StoreTimeoutError):
            return self._read(await room.get("verdict", _left(work)))
        if await room.check(["arrived/0"]):
            with contextlib.suppress(StoreTimeoutError):
                return self._read(await room.get("verdict", VERDICT_SECONDS))
        return await self._decide(room, work, await self._missing(room) or [0])

    async def _missing(self, room: Store) -> list[int]:
        ranks = range(self._group.size)
        came = await asyncio.gather(*(room.check([f"arrived/{rank}"]) for rank in ranks))
        return [rank for rank in ranks if not came[rank]]

    async def _decide(self, room: Store, work: Work[None], missing: list[int]) -> dict[str, Any]:
        """Publish a verdict, unless the round has one; returns the verdict that counts."""
        assert isinstance(work.op, MonitoredBarrier)
        mine = {
            "rank": self._group.rank,
            "missing": missing if work.op.wait_all_ranks else missing[:1],
            "elapsed": time.monotonic() - work.started,
        }
        decided = await room.compare_set("decided", "", json.dumps(mine))
        await room.set("verdict", decided)  # a separate key: compare_set does not wake waiting ranks
        await room.check([])  # the reply shows that the server has the verdict, so this rank may leave
        return self._read(decided)

    def _read(self, text: bytes) -> dict[str, Any]:
        """Decode and validate a verdict. Raises: StoreProtocolError."""
        try:
            verdict: Any = json.loads(text) if len(text) <= VERDICT_BYTES + RANK_BYTES * self._group.size else None
        except (ValueError, RecursionError):
            verdict = None
        if type(verdict) is not dict or not self._is_verdict(verdict):
            shown = repr(text[:SHOWN]) + ("..." if len(text) > SHOWN else "")
            raise StoreProtocolError(f"the store has an invalid verdict for a monitored barrier: {shown}")
        return verdict

    def _is_verdict(self, verdict: dict[str, Any]) -> bool:
        rank, missing = verdict.get("rank"), verdict.get("missing")
        elapsed: Any = verdict.get("elapsed")
        if type(missing) is not list or len(missing) > self._group.size or not all(map(self._is_rank, missing)):
            return False
        return self._is_rank(rank) and type(elapsed) in (int, float) and 0 <= elapsed < math.inf

    def _is_rank(self, value: object) -> bool:
        return type(value) is int and 0 <= value < self._group.size

    async def _tidy(self, number: int, verdict: dict[str, Any]) -> None:
        """Delete keys that no rank reads any more.

        This rank has left the round; if all ranks came, they all have left the earlier rounds.
        """
        deletions = [self._room.delete(f"{number}/arrived/{self._group.rank}")]
        if self._group.rank == 0 and not verdict["missing"]:
            for old in range(self._swept, number):
                deletions += [self._room.delete(f"{old}/{key}") for key in ("decided", "verdict")]
            self._swept = number
        with contextlib.suppress(AsyncCommError):
            await asyncio.gather(*deletions)


def _left(work: Work[None]) -> float:
    return max(0.0, work.started + work.timeout - time.monotonic())


async def _first(*waits: Coroutine[Any, Any, None]) -> None:
    """Wait until the first of ``waits`` is done, cancel the others, and raise the error of the first, if any."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [task.exception() for task in done]
    if None not in errors:
        assert errors[0] is not None
        raise errors[0]
