"""Comms for the faces of libraries with blocking calls: used without a loop, or awaited in a coroutine.

One rule holds for these faces. On a thread without an event loop a call blocks and returns its result, as in the
library. In a coroutine the same call gives an awaitable of the result, on any loop, and never blocks. A comm made
without a loop belongs to the loop of ``asynccomm.blocking``; one made in a coroutine, to the running loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ParamSpec, TypeVar, final

from asynccomm.blocking.comm import BlockingComm, comm_or_none
from asynccomm.blocking.loop_thread import detached
from asynccomm.blocking.portal import Portal, awaited, made
from asynccomm.blocking.twins import made as made_there
from asynccomm.comm.comm import Comm
from asynccomm.comm.pending import PendingComm
from asynccomm.core.work import Work

P = ParamSpec("P")
T = TypeVar("T")


@final
class EitherComm:
    """A comm, and the means to call and close it with and without a loop.

    Args:
        comm: the awaitable comm.
        blocking: its blocking form, which keeps its loop; None if the comm was made in a coroutine.
    """

    def __init__(self, comm: Comm, blocking: BlockingComm | None) -> None:
        self.comm: Comm = comm
        self._blocking = blocking

    @classmethod
    def make(cls, make: Callable[[], PendingComm[Any]], then: Callable[[EitherComm | None], T]) -> Any:
        """``then(comm)`` of the comm that ``make()`` makes, or an awaitable of it; None for no comm on this rank."""
        if asyncio._get_running_loop() is None:
            blocking = made_there(make, comm_or_none)
            return then(None if blocking is None else cls(blocking.comm, blocking))

        async def making(pending: PendingComm[Any]) -> T:
            comm = await pending
            return then(None if comm is None else cls(comm, None))

        return making(make())  # the arguments are checked at the call

    def derive(self, make: Callable[[], PendingComm[Any]], then: Callable[[EitherComm | None], T]) -> Any:
        """As :meth:`make`, for a comm of ranks of this one, on the same loop."""

        async def making() -> T:
            comm = await make()
            if comm is None:
                return then(None)
            return then(EitherComm(comm, None if self._blocking is None else BlockingComm(comm, Portal(comm.loop))))

        return made(self.comm.loop, making)

    def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the comm that sends, also in a coroutine of another loop."""
        running = asyncio._get_running_loop()
        if running is None or running is self.comm.loop:
            return method(*args, **kwargs)
        with detached():
            return method(*args, **kwargs)

    def awaited(self, function: Callable[[], Awaitable[T]]) -> Any:
        """The result of ``await function()`` on the comm's loop, or an awaitable of it."""
        return made(self.comm.loop, function)

    def close(self) -> Any:
        """Wait for the operations in flight, and free everything; or an awaitable of that."""
        running = asyncio._get_running_loop()
        if self._blocking is None:
            return made(self.comm.loop, self.comm.aclose)
        return self._blocking.close() if running is None else asyncio.to_thread(self._blocking.close)


def outcome(work: Work[Any], finish: Callable[[Any], T]) -> Any:
    """``finish(output)`` of ``work``, by blocking the thread, or an awaitable of it where a loop runs."""
    if asyncio._get_running_loop() is None:
        return finish(work.wait())
    return _finished(work, finish)


async def _finished(work: Work[Any], finish: Callable[[Any], T]) -> T:
    return finish(await awaited(work))


async def nothing(value: T) -> T:
    """An awaitable of ``value``, for calls that send nothing."""
    return value


def at_once(value: T) -> Any:
    """``value``, or an awaitable of it where a loop runs: for calls that send nothing."""
    return value if asyncio._get_running_loop() is None else nothing(value)


def in_order(calls: Sequence[Callable[[], Any]], then: Callable[[list[Any]], T]) -> Any:
    """``then(results)`` of calls that block, or are awaited, one after the other; or an awaitable of it."""
    if asyncio._get_running_loop() is None:
        return then([call() for call in calls])
    return _in_order(calls, then)


async def _in_order(calls: Sequence[Callable[[], Any]], then: Callable[[list[Any]], T]) -> T:
    return then([await call() for call in calls])


def same(value: T) -> T:
    """``value``, where a function of a result is due."""
    return value
