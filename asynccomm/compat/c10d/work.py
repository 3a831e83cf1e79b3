"""Return values of the functions: handles and other awaitables.

A plain call returns our comm's own Work, at no extra cost. ``async_op=True`` returns a :class:`Work` with the methods
of torch's Work. A call on a group without this rank returns :data:`NOTHING`, or None in place of a handle.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Generator
from datetime import timedelta
from typing import Any, Final, Generic, ParamSpec, TypeVar, final

from asynccomm.core import work as _ours
from asynccomm.core.handles import Handle

P = ParamSpec("P")
T = TypeVar("T")


class Work(Handle):
    """Handle of one submitted operation, with torch's method names; ``await`` it for the output.

    Args:
        work: the comm's Work.
    """

    _instead = "await it here, and send its output there"
    __slots__ = ("_work",)

    def __init__(self, work: _ours.Work[Any]) -> None:
        """Not for users: see ``async_op=True``."""
        self._work = work

    def __await__(self) -> Generator[Any, None, Any]:
        return self._work.__await__()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait as ``asynccomm.Work.wait`` does.

        On a GPU the current stream waits. On the CPU the call blocks the thread, which must not have a running loop.
        """
        self._work.wait(timeout)
        return True

    def synchronize(self) -> None:
        """Wait as :meth:`wait`, without a timeout."""
        self._work.wait()

    def is_completed(self) -> bool:
        """Whether the operation has succeeded or failed."""
        return self._work.done()

    def is_success(self) -> bool:
        """Whether the operation has succeeded."""
        return self._work.done() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        """The error, if the operation has failed; else None."""
        return self._work.exception() if self._work.done() else None

    def result(self) -> Any:
        """The output. Raises the error, or ``asyncio.InvalidStateError`` while the operation is pending."""
        return self._work.result()

    def source_rank(self) -> int:
        """The sender's rank in the group, of a completed receive; -1 for pending receives and other operations."""
        return -1 if self._work.source is None else self._work.source

    _source_rank = source_rank

    def get_future(self) -> asyncio.Future[Any]:
        """A future of the output, on the comm's loop; done if the operation is. Cancelling it does not affect that."""
        if not self._work.done():
            return asyncio.ensure_future(_result(self._work))
        future = asyncio.get_running_loop().create_future()
        error = self._work.exception()
        if error is None:
            future.set_result(self._work.result())
        else:
            future.set_exception(error)
        return future

    def __repr__(self) -> str:
        return repr(self._work)


def operation_of(awaited: object) -> _ours.Work[Any] | None:
    """The comm's Work behind a function's return value: the value itself, or a handle's Work; else None."""
    if isinstance(awaited, _ours.Work):
        return awaited
    return awaited._work if type(awaited) is Work else None


def with_future(function: Callable[P, Any]) -> Callable[P, Any]:
    """Decorator: return a handle's future in place of the handle."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        awaited = function(*args, **kwargs)
        return awaited.get_future() if isinstance(awaited, Work) else awaited

    return call


async def _result(work: Awaitable[T]) -> T:
    return await work


@final
class ResultWork(Handle, Generic[T]):
    """An awaitable with a function that turns its output into the result; the function runs once."""

    _instead = "await it here, and send its output there"
    __slots__ = ("_done", "_finish", "_result", "_work", "failed")

    def __init__(self, work: Awaitable[Any], finish: Callable[[Any], T]) -> None:
        self.failed: Callable[[Exception], object] | None = None  #: called with the error that awaiting raises
        self._work = work
        self._finish = finish
        self._done = False
        self._result: Any = None

    def __await__(self) -> Generator[Any, None, T]:
        try:
            value = yield from self._work.__await__()
            if not self._done:
                self._result = self._finish(value)
                self._done = True
        except Exception as exc:
            if self.failed is not None:
                self.failed(exc)
            raise
        return self._result  # type: ignore[no-any-return]


@final
class NoopWork:
    """Awaitable that gives ``value`` at once; returned to ranks outside the group."""

    __slots__ = ("_value",)

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Any]:
        return self._value
        yield


NOTHING: Final = NoopWork()
