"""Log records of errors, torch's wait counters, and the rank on the lines of an uncaught exception."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar, final

from torch.monitor import _WaitCounter

from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.validation import OutsideError, warn_outside
from asynccomm.compat.c10d.work import NOTHING, ResultWork, Work, operation_of
from asynccomm.compat.c10d.world import world
from asynccomm.core import work as _ours
from asynccomm.ops.renamed import Renamed

P = ParamSpec("P")
T = TypeVar("T")

_log: Final = logging.getLogger("asynccomm")


def logged(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: log errors of ``function`` at level DEBUG, with the group.

    It logs an error of the call, and an error of the returned operation, whether or not a task awaits the operation.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            awaited = function(*args, **kwargs)
        except Exception as exc:
            _report(function, _about(function, args, kwargs), exc)
            raise
        if _log.isEnabledFor(logging.DEBUG):  # else the callback would hold operations in flight for an unread log
            _watch(awaited, function, args, kwargs)
        return awaited

    return call


def collective(
    outside: object = NOTHING, depth: int = 3, names: Mapping[str, str] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a function that submits an operation on a group.

    It logs errors as :func:`logged`. ``async_op=True`` returns the Work as a handle. On a rank outside of the group, it
    warns, and returns ``outside``, or None in place of a handle.

    Args:
        depth: ``stacklevel`` of the warning, which points to the caller.
        names: torch's names of arguments, by the names in the comm's errors, where they differ.
    """
    renamed = Renamed(names or {})

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        names = list(inspect.signature(function).parameters)
        place = names.index("async_op") if "async_op" in names else len(names)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            async_op = args[place] if len(args) > place else kwargs.get("async_op", False)
            try:
                awaited = function(*args, **kwargs)
            except OutsideError:
                warn_outside(function.__name__, depth)
                return None if async_op else outside
            except Exception as exc:
                renamed.rename(exc)
                _report(function, _about(function, args, kwargs), exc)
                raise
            if _log.isEnabledFor(logging.DEBUG):
                _watch(awaited, function, args, kwargs)
            return Work(awaited) if async_op and isinstance(awaited, _ours.Work) else awaited

        return call

    return decorate


def _watch(awaited: object, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    report = functools.partial(_report, function, _about(function, args, kwargs))  # as the world may end first
    if isinstance(awaited, ResultWork):
        awaited.failed = report
        return
    work = operation_of(awaited)
    if work is not None:
        # exception() would mark the error as retrieved
        work.add_done_callback(lambda work: None if work._error is None else report(work._error))


def logged_coroutine(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Decorator: log errors of awaiting a coroutine function, as :func:`logged`."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(*args, **kwargs)
        except Exception as exc:
            _report(function, _about(function, args, kwargs), exc)
            raise

    return call


def timed(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Decorator: add the duration of a coroutine function to torch's wait counter of the function's name."""
    name = f"pytorch.wait_counter.c10d.{function.__name__}"

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _WaitCounter(name).guard():
            return await function(*args, **kwargs)

    return call


def _report(function: Callable[..., Any], about: str, error: BaseException) -> None:
    _log.debug("%s%s raised %s: %s", function.__name__, about, type(error).__name__, error)


def _about(function: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Description of a call's group; empty if DEBUG is off. Never raises, as that would hide the error to log."""
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
    """A ``sys.excepthook`` that prefixes each printed line with the rank.

    Args:
        rank: the global rank.
        before: the replaced hook, which prints.
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
        """Install a hook; it replaces an installed RankHook."""
        there = sys.excepthook
        hook = cls(rank, there._before if isinstance(there, cls) else there)
        sys.excepthook = hook
        return hook

    def remove(self) -> None:
        """Restore the replaced hook, unless another hook was installed since."""
        if sys.excepthook is self:
            sys.excepthook = self._before
