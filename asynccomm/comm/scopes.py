"""The scopes of ``comm.coalesce()`` and ``comm.time_estimator()``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, final

from asynccomm.backends.base import FastCalls
from asynccomm.backends.regions import AccessSet
from asynccomm.batching.batches import planned
from asynccomm.batching.plan import BatchLimiter, Item, conflict
from asynccomm.batching.queue import DeferredQueue
from asynccomm.comm.deferring import DeferredCalls
from asynccomm.core.handles import Handle
from asynccomm.core.state import values_of
from asynccomm.core.work import Work
from asynccomm.errors import AbortedError, WouldBlockError, describe_exception


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

    def __init__(
        self,
        deferred: Sequence[DeferredCalls],
        max_bytes: int | None,
        max_ops: int | None,
        fast: FastCalls | None = None,
    ) -> None:
        """Not for users: see ``comm.coalesce``."""
        check_limit("max_bytes", max_bytes)
        check_limit("max_ops", max_ops)
        self._limits = max_ops, max_bytes
        self._fast = fast  # of the only comm
        # by name, so that all ranks with several comms in common send in the same order
        self._deferred: Final = sorted(deferred, key=lambda each: each.submitter.group.name)
        self._mailbox = self._deferred[0].submitter.mailbox
        self._queues: list[DeferredQueue] = []  # one queue for each comm
        self._since: list[tuple[int, int]] = []  # operations and Works in each queue before this scope
        self._entered = False
        self._works: list[Work[Any]] | None = None  # set when the scope is left

    @property
    def works(self) -> list[Work[Any]]:
        """The Works of the calls in the scope so far."""
        if self._works is not None:
            return self._works
        works: list[Work[Any]] = []
        for queue, (_, since) in zip(self._queues, self._since, strict=True):
            works += queue.works[since:]
        return works

    def flush(self) -> None:
        """Send the operations held by this scope and the scopes around it. All ranks flush at the same place.

        Raises: ValueError if operations of different comms, or messages, share memory with other held operations.
        """
        self._check_apart()
        for queue in self._queues:
            queue.send()

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._all().__await__()

    async def _all(self) -> list[Any]:
        works = self.works
        values = values_of(works)
        suspends = False
        if values is None:
            for work in works:
                if not work.done() or work.exception() is not None:
                    await work
                    suspends = True
            values = [work.result() for work in works]
        if not suspends and self._mailbox.should_yield():  # a finished batch counts as one finished Work
            await asyncio.sleep(0)
        return values

    def wait(self, timeout: float | timedelta | None = None) -> list[Any]:
        """``Work.wait`` for each Work in order; ``timeout`` applies to each of them."""
        return [work.wait(timeout) for work in self.works]

    # -- entering and leaving -----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a scope is entered once; make a new one")
        self._entered = True
        try:
            for deferred in self._deferred:
                queue = deferred.open_queue(BatchLimiter(*self._limits), fast=self._fast)
                self._queues.append(queue)
                self._since.append((queue.count, len(queue.works)))
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
                self._drop(f"the scope was left by {describe_exception(exc)}")
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
        for deferred, queue, (since, _) in zip(self._deferred, self._queues, self._since, strict=False):
            deferred.submitter.drop(deferred.take(queue, since), reason)

    def _leave(self) -> None:
        try:
            if all(queue.depth == 1 for queue in self._queues):
                self.flush()
                while any(queue.items for queue in self._queues):  # a listener of a Work has made calls
                    self.flush()
            else:
                self._check_apart()
                for deferred, queue in zip(self._deferred, self._queues, strict=True):
                    if queue.depth == 1:  # else the outer scope sends it
                        deferred.flush(queue)
        except BaseException as exc:
            self._drop(describe_exception(exc))
            raise

    def _close(self) -> None:
        if len(self._queues) == len(self._deferred):
            self._works = self.works
        for deferred, queue in zip(self._deferred, self._queues, strict=False):
            deferred.close_queue(queue)

    def _check_apart(self) -> None:
        """Raise ValueError if operations of different comms share memory: no order is promised between comms."""
        if len(self._queues) < 2:
            return
        before = AccessSet()
        for i, (deferred, queue) in enumerate(zip(self._deferred, self._queues, strict=True)):
            items = [planned(submission) for submission in deferred.submissions(queue)]
            for item in items:
                if before.conflicts(*item[1:]):
                    name, other = self._partner(item, i)
                    raise ValueError(
                        f"{item[0]} on comm {deferred.submitter.group.name!r} shares memory with {other[0]} on comm "
                        f"{name!r}, which is held in the same scope; await one of them before the other is called"
                    )
            for item in items:
                before.add(*item[1:])

    def _partner(self, item: Item, end: int) -> tuple[str, Item]:
        """The comm, before number ``end``, and its held operation that shares memory with ``item``."""
        pairs = zip(self._deferred[:end], self._queues, strict=False)
        held = [
            (deferred.submitter.group.name, planned(submission))
            for deferred, queue in pairs
            for submission in deferred.submissions(queue)
        ]
        return next((name, other) for name, other in held if conflict(item, other))


@final
class Estimate(Handle):
    """A scope that estimates the time of its operations; made by ``comm.time_estimator()``.

    Attributes:
        seconds: the time of all operations called in the scope, once it is left; 0.0 before, or if the body raised.
    """

    _instead = "send its seconds"

    def __init__(self, deferred: DeferredCalls) -> None:
        """Not for users: see ``comm.time_estimator``."""
        self.seconds: float = 0.0
        self._deferred = deferred
        self._submitter = deferred.submitter
        self._queue: DeferredQueue | None = None

    def __enter__(self) -> Self:
        if asyncio._get_running_loop() is not None:
            raise WouldBlockError("leaving the scope would block the event loop of this thread: use `async with`")
        return self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        batches = self._leave(exc)
        if batches:
            loop = self._submitter.mailbox.loop
            self.seconds = asyncio.run_coroutine_threadsafe(self._total(batches), loop).result()

    async def __aenter__(self) -> Self:
        return self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds = await self._total(self._leave(exc))

    def _enter(self) -> Self:
        if self._queue is not None:
            raise RuntimeError("a scope is entered once; make a new one")
        queue = self._deferred.open_queue(BatchLimiter(), _only_estimated)
        if queue.depth > 1:
            self._deferred.close_queue(queue)
            raise RuntimeError("time_estimator() cannot be used within another scope of the same task")
        self._queue = queue
        return self

    def _leave(self, exc: BaseException | None) -> Sequence[Future[float]]:
        """Close the scope and start the estimates, one for each batch; none if the body raised ``exc``."""
        assert self._queue is not None
        deferred = self._deferred
        held = deferred.taken_over(deferred.take(self._queue))
        deferred.close_queue(self._queue)
        try:
            return deferred.estimate(held) if exc is None else ()
        finally:
            self._submitter.drop(held, "it was only estimated")

    async def _total(self, batches: Sequence[Future[float]]) -> float:
        total = 0.0
        limit = self._submitter.in_flight.timeout
        try:
            async with asyncio.timeout(None if limit == math.inf else limit):
                for batch in batches:
                    total += await asyncio.wrap_future(batch)
        except TimeoutError:  # other ranks did not come; the operations that wait for them cannot be taken back
            reason = f"time_estimator() was not done within {limit:g} s"
            self._submitter.on_failure(AbortedError(self._submitter.group.rank, reason))
            raise
        return total


def _only_estimated(queue: DeferredQueue) -> None:
    raise RuntimeError("operations within time_estimator() are not sent, so they cannot be awaited")
