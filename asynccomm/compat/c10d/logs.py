"""What the functions leave in the log and in torch's counters: errors that they raise, and how long they wait."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar, final

from torch.monitor import _WaitCounter

from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.work import ResultWork, operation_of
from asynccomm.compat.c10d.world import world

__all__ = ["RankHook", "logged", "logged_coroutine", "timed"]

P = ParamSpec("P")
T = TypeVar("T")

_log: Final = logging.getLogger("asynccomm")


def logged(function: Callable[P, T]) -> Callable[P, T]:
    """``function``; what it raises is logged for debugging, with the group it was about.

    That is at the call, or when what it returns has failed, whoever awaits it.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            awaited = function(*args, **kwargs)
        except Exception as exc:
            _report(function, _about(function, args, kwargs), exc)
            raise
        if _log.isEnabledFor(logging.DEBUG):  # now: what is in flight is not to be kept for a log that nobody reads
            _watch(awaited, function, args, kwargs)
        return awaited

    return call


def _watch(awaited: object, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    report = functools.partial(_report, function, _about(function, args, kwargs))  # the world may end before
    if isinstance(awaited, ResultWork):
        awaited.failed = report
        return
    work = operation_of(awaited)
    if work is not None:
        # asking by exception() would pass for somebody who has seen the error
        work.add_done_callback(lambda work: None if work._error is None else report(work._error))


def logged_coroutine(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """The same for a coroutine function, and what awaiting it raises."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(*args, **kwargs)
        except Exception as exc:
            _report(function, _about(function, args, kwargs), exc)
            raise

    return call


def timed(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """A coroutine function; how long it takes is added to torch's wait counter of its name."""
    name = f"pytorch.wait_counter.c10d.{function.__name__}"

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _WaitCounter(name).guard():
            return await function(*args, **kwargs)

    return call


def _report(function: Callable[..., Any], about: str, error: BaseException) -> None:
    _log.debug("%s%s raised %s: %s", function.__name__, about, type(error).__name__, error)


def _about(function: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Which group a call is about; empty if nobody listens. Never raises: what is to be logged matters more."""
    if not _log.isEnabledFor(logging.DEBUG):
        return ""
    try:
        given = inspect.signature(function).bind_partial(*args, **kwargs).arguments.get("group")
        default = world().default_pg
        pg = given if isinstance(given, ProcessGroup) else default
        if pg is None:
            return " on no group"
        rank, everybody = (-1, -1) if default is None else (default.rank(), default.size())
        return (
            f" on group {pg.group_name!r} of backend {pg.backend!r}, rank {pg.rank()} of {pg.size()}, global rank "
            f"{rank} of {everybody}"
        )
    except Exception:
        return ""


@final
class RankHook:
    """In place of ``sys.excepthook``: what that prints, each line after the rank.

    Args:
        rank: the global one.
        before: the hook that prints.
    """

    def __init__(self, rank: int, before: Callable[..., Any]) -> None:
        self._prefix = f"[rank{rank}]: "
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None, /) -> None:
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            self._before(kind, error, traceback)
        lines = text.getvalue().splitlines(keepends=True)
        sys.stderr.write("".join(self._prefix + line if line.strip() else line for line in lines))

    @classmethod
    def install(cls, rank: int) -> RankHook:
        """Put one up, in place of one that is there already."""
        there = sys.excepthook
        hook = cls(rank, there._before if isinstance(there, cls) else there)
        sys.excepthook = hook
        return hook

    def remove(self) -> None:
        """Put back what was there before, unless somebody has put up another one since."""
        if sys.excepthook is self:
            sys.excepthook = self._before
