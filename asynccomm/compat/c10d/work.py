"""What the functions of the face return: handles, and what else can be awaited.

A plain call gives the Work of our comm itself, which costs nothing more. ``async_op=True`` gives a :class:`Work` with
the methods that torch's has. A call on a group that this rank is not in gives :data:`NOTHING`, or None for a handle.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Generator
from datetime import timedelta
from typing import Any, Final, Generic, ParamSpec, TypeVar, final

from asynccomm.core import work as _ours
from asynccomm.core.handles import Handle

__all__ = ["NOTHING", "NoopWork", "ResultWork", "Work", "with_future", "operation_of"]

P = ParamSpec("P")
T = TypeVar("T")


class Work(Handle):
    """One submitted operation; ``await`` it for its output. As our own Work, under the names that torch has.

    Args:
        work: the comm's.
    """

    _instead = "await it here, and send its output there"
    __slots__ = ("_work",)

    def __init__(self, work: _ours.Work[Any]) -> None:
        """Not for users: see ``async_op=True``."""
        self._work = work

    def __await__(self) -> Generator[Any, None, Any]:
        return self._work.__await__()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """As ``asynccomm.Work.wait``: on a GPU, the current stream waits; on the CPU, the thread, if it has no loop."""
        self._work.wait(timeout)
        return True

    def synchronize(self) -> None:
        """The same as :meth:`wait`."""
        self._work.wait()

    def is_completed(self) -> bool:
        """Whether the outcome is known, good or bad."""
        return self._work.done()

    def is_success(self) -> bool:
        """Whether it is done, and without an error."""
        return self._work.done() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        """The error, if it is done and has failed; else None."""
        return self._work.exception() if self._work.done() else None

    def result(self) -> Any:
        """The output. Raises the error, or ``asyncio.InvalidStateError`` while it is pending."""
        return self._work.result()

    def source_rank(self) -> int:
        """The rank in the group that a receive got its message from; -1 until it has, and for what is no receive."""
        return -1 if self._work.source is None else self._work.source

    _source_rank = source_rank

    def get_future(self) -> asyncio.Future[Any]:
        """A future of the output, on the comm's loop. Cancelling it changes nothing for the operation."""
        return asyncio.ensure_future(_result(self._work))

    def __repr__(self) -> str:
        return repr(self._work)


def operation_of(awaited: object) -> _ours.Work[Any] | None:
    """The comm's Work that a function has returned, or a handle of one."""
    if isinstance(awaited, _ours.Work):
        return awaited
    return awaited._work if type(awaited) is Work else None


def with_future(function: Callable[P, Any]) -> Callable[P, Any]:
    """``function``, with the future of a handle in place of the handle."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        awaited = function(*args, **kwargs)
        return awaited.get_future() if isinstance(awaited, Work) else awaited

    return call


async def _result(work: Awaitable[T]) -> T:
    return await work


@final
class ResultWork(Handle, Generic[T]):
    """Something to await, and what is to be done with its output, once, to get the result."""

    _instead = "await it here, and send its output there"
    __slots__ = ("_done", "_finish", "_result", "_work", "failed")

    def __init__(self, work: Awaitable[Any], finish: Callable[[Any], T]) -> None:
        self.failed: Callable[[Exception], object] | None = None  #: is told what awaiting raises
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
    """To be awaited, for ``value``, at once: what a rank gets that is not in the group."""

    __slots__ = ("_value",)

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Any]:
        return self._value
        yield


NOTHING: Final = NoopWork()
