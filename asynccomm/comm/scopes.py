"""The scopes of ``comm.coalesce()`` and ``comm.time_estimator()``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, final

from asynccomm.backends.base import Submission
from asynccomm.backends.regions import AccessSet
from asynccomm.batching.batches import planned
from asynccomm.batching.plan import BatchLimiter, Item, conflict
from asynccomm.batching.queue import DeferredQueue
from asynccomm.comm.submission import Submitter, named
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work


def check_limit(name: str, value: int | None) -> None:
    """Raise TypeError or ValueError unless ``value`` is a positive integer or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a positive integer or None, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be a positive integer or None, got {value}")


@final
class CoalesceScope(Handle):
    """A scope whose operations are sent together; made by ``comm.coalesce()`` and ``asynccomm.coalesce()``.

    ``await batch`` gives the outputs of all operations, in the order of the calls (with several comms, one comm after
    the other, by name). Inside the scope, awaiting first sends the held operations.
    """

    _instead = "open a scope there"

    def __init__(self, many: Sequence[Submitter], max_bytes: int | None, max_ops: int | None) -> None:
        """Not for users: see ``comm.coalesce``."""
        check_limit("max_bytes", max_bytes)
        check_limit("max_ops", max_ops)
        self._limits = max_ops, max_bytes
        # by name, so that all ranks with several comms in common send in the same order
        self._many: Final = sorted(many, key=lambda calls: calls.group.name)
        self._holds: list[DeferredQueue] = []  # one queue for each comm
        self._since: list[tuple[int, int]] = []  # operations and Works in each queue before this scope
        self._entered = False
        self._works: list[Work[Any]] | None = None  # set when the scope is left

    @property
    def works(self) -> list[Work[Any]]:
        """The Works of the calls in the scope so far."""
        if self._works is not None:
            return self._works
        pairs = zip(self._holds, self._since, strict=True)
        return [work for hold, (_, since) in pairs for work in hold.works[since:]]

    def flush(self) -> None:
        """Send the operations held by this scope and the scopes around it. All ranks flush at the same place.

        Raises: ValueError if operations of different comms, or messages, share memory with other held operations.
        """
        self._check_apart()
        for hold in self._holds:
            hold.send()

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._all().__await__()

    async def _all(self) -> list[Any]:
        return [work.result() if work.done() else await work for work in self.works]

    def wait(self, timeout: float | timedelta | None = None) -> list[Any]:
        """``Work.wait`` for each Work in order; ``timeout`` applies to each of them."""
        return [work.wait(timeout) for work in self.works]

    # -- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a scope is entered once; make a new one")
        self._entered = True
        try:
            for calls in self._many:
                hold = calls.open_hold(BatchLimiter(*self._limits))
                self._holds.append(hold)
                self._since.append((hold.count, len(hold.works)))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if exc is None:
                self._leave()
            else:
                self._drop(f"the scope was left by {named(exc)}")
        finally:
            self._close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, exc, traceback)

    def _drop(self, reason: str) -> None:
        """Fail the operations of this scope that are still held."""
        for calls, hold, (since, _) in zip(self._many, self._holds, self._since, strict=False):
            calls.drop(calls.give_up(hold, since), reason)

    def _leave(self) -> None:
        try:
            if all(hold.depth == 1 for hold in self._holds):
                self.flush()
            else:
                for calls, hold in zip(self._many, self._holds, strict=True):
                    if hold.depth == 1:  # else the outer scope sends it
                        calls.flush(hold)
        except BaseException as exc:
            self._drop(named(exc))
            raise

    def _close(self) -> None:
        if len(self._holds) == len(self._many):
            self._works = self.works
        for calls, hold in zip(self._many, self._holds, strict=False):
            calls.close_hold(hold)

    def _check_apart(self) -> None:
        """Raise ValueError if operations of different comms share memory: no order is promised between comms."""
        if len(self._holds) < 2:
            return
        before = AccessSet()
        for i, (calls, hold) in enumerate(zip(self._many, self._holds, strict=True)):
            items = [planned(submission) for submission in hold.items]
            for item in items:
                if before.conflicts(*item[1:]):
                    name, other = self._partner(item, i)
                    raise ValueError(
                        f"{item[0]} on comm {calls.group.name!r} shares memory with {other[0]} on comm {name!r}, which "
                        f"is held in the same scope; await one of them before the other is called"
                    )
            for item in items:
                before.add(*item[1:])

    def _partner(self, item: Item, end: int) -> tuple[str, Item]:
        """The comm, before number ``end``, and its held operation that shares memory with ``item``."""
        pairs = zip(self._many[:end], self._holds, strict=False)
        held = [(calls.group.name, planned(submission)) for calls, hold in pairs for submission in hold.items]
        return next((name, other) for name, other in held if conflict(item, other))


@final
class Estimate(Handle):
    """A scope that estimates the time of its operations; made by ``comm.time_estimator()``.

    Attributes:
        seconds: the time of all operations called in the scope, once it is left; 0.0 before, or if the body raised.
    """

    _instead = "send its seconds"

    def __init__(self, calls: Submitter) -> None:
        """Not for users: see ``comm.time_estimator``."""
        self.seconds = 0.0
        self._calls = calls
        self._hold: DeferredQueue | None = None

    async def __aenter__(self) -> Self:
        if self._hold is not None:
            raise RuntimeError("a scope is entered once; make a new one")
        hold = self._calls.open_hold(BatchLimiter(), _only_estimated)
        if hold.depth > 1:
            self._calls.close_hold(hold)
            raise RuntimeError("time_estimator() cannot be used within another scope of the same task")
        self._hold = hold
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._hold is not None
        calls = self._calls
        held = calls.give_up(self._hold)
        calls.close_hold(self._hold)
        try:
            if exc is None:
                self.seconds = await self._estimate(held)
        finally:
            calls.drop(held, "it was only estimated")

    async def _estimate(self, held: Sequence[Submission]) -> float:
        total = 0.0
        limit = self._calls.options.timeout
        try:
            async with asyncio.timeout(None if limit == math.inf else limit):
                futures = self._calls.estimate(held)
                self._calls.drop(held, "it was only estimated")
                for batch in futures:
                    total += await asyncio.wrap_future(batch)
        except TimeoutError:  # other ranks did not come; the operations that wait for them cannot be taken back
            self._calls.abort(f"time_estimator() was not done within {limit:g} s")
            raise
        return total


def _only_estimated(hold: DeferredQueue) -> None:
    raise RuntimeError("operations within time_estimator() are not sent, so they cannot be awaited")
