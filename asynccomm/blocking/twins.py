"""The mechanism of blocking forms: a twin holds an awaitable object and the loop on which its coroutines run.

``here`` makes a method that runs on the calling thread; ``there`` makes a method that runs a coroutine method on the
loop and blocks meanwhile; ``making`` makes a method that also returns a twin of the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar

from asynccomm.blocking.loop_thread import EXIT_SECONDS, at_exit, on_a_thread
from asynccomm.blocking.portal import Portal, refuse_on_a_loop

P = ParamSpec("P")
T = TypeVar("T")

Place: TypeAlias = Callable[..., Any]  # an empty function that a twin's method replaces, so that type checkers see it


A = TypeVar("A", covariant=True)


class Twin(Generic[A]):
    """The blocking form of an object on a loop: ``with`` in place of ``async with``, ``close`` of ``aclose``.

    It keeps the loop until it is closed, or collected. If it is open when the process ends, it is closed then.
    """

    _original: A
    _portal: Portal

    def _hold(self, original: A, portal: Portal) -> None:  # type: ignore[misc]  # called once, by the maker
        self._original, self._portal = original, portal
        at_exit(self)

    async def _leave(self, exc: BaseException | None) -> None:
        """Leave the original's context, on the loop; ``exc`` is the exception that ends the body of ``with``."""
        original: Any = self._original
        await original.__aexit__(None if exc is None else type(exc), exc, None if exc is None else exc.__traceback__)

    async def _leave_last(self) -> None:
        """As ``_leave``, at the end of the process."""
        await self._leave(None)

    def close(self) -> None:
        """Leave the context of the original, and block until that is done. Idempotent.

        An exception that interrupts the call (Ctrl-C) cancels it: a comm is aborted then. A forked child closes
        nothing: the original is its parent's.
        """
        self._end(lambda: self._leave(None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None and asyncio._get_running_loop() is not None and self._portal.held:
            self._portal.leave_soon(lambda: self._leave(exc))  # an error of blocking here would hide ``exc``
        else:
            self._end(lambda: self._leave(exc))

    def end_of_process(self) -> None:
        """Close within ``EXIT_SECONDS``. Not for users."""

        async def closing() -> None:
            with contextlib.suppress(TimeoutError):  # a cancelled original ends at once
                async with asyncio.timeout(EXIT_SECONDS):
                    await self._leave_last()

        self._end(closing)

    def __del__(self) -> None:
        portal = getattr(self, "_portal", None)
        if portal is not None and portal.held:  # this may be the loop's thread
            on_a_thread(portal.release)

    def _end(self, end: Callable[[], Awaitable[None]]) -> None:
        if not self._portal.held:
            return
        if self._portal.in_child:  # the original is its parent's
            self._portal.release()
            return
        refuse_on_a_loop()  # before the end: the original stays open, and may be closed elsewhere
        try:
            self._portal.call(end)
        finally:
            self._portal.release()


def here(method: Callable[Concatenate[A, P], T]) -> Callable[[Place], Callable[Concatenate[Twin[A], P], T]]:
    """A decorator: in place of the function, a method of the original that any thread may call."""

    @functools.wraps(method)
    def called(self: Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._original, *args, **kwargs)

    return lambda _: called


def there(method: Callable[Concatenate[A, P], Awaitable[T]]) -> Callable[[Place], Callable[Concatenate[Twin[A], P], T]]:
    """A decorator: in place of the function, the blocking twin of a coroutine method."""

    @functools.wraps(method)
    def called(self: Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._portal.call(lambda: method(self._original, *args, **kwargs))

    return lambda _: called


def making(
    method: Callable[Concatenate[A, P], Awaitable[Any]], twin: Callable[[Any, Portal], T]
) -> Callable[[Place], Callable[Concatenate[Twin[A], P], T]]:
    """A decorator: in place of the function, the blocking twin of a method that makes an object, as ``twin`` of it."""

    @functools.wraps(method)
    def called(self: Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return made(lambda: method(self._original, *args, **kwargs), twin)

    return lambda _: called


def made(make: Callable[[], Awaitable[Any]], twin: Callable[[Any, Portal], T]) -> T:
    """``twin`` of the object that ``make`` makes on the loop, with a hold on the loop of its own."""
    portal = Portal()
    try:
        return twin(portal.call(make), portal)
    except BaseException:
        portal.release()
        raise
