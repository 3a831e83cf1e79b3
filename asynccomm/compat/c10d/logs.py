"""What the functions leave in the log and in torch's counters: errors that they raise, and how long they wait."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, ParamSpec, TypeVar

from torch.monitor import _WaitCounter

from asynccomm.compat.c10d.process_group import ProcessGroup
from asynccomm.compat.c10d.world import world

__all__ = ["logged", "logged_coroutine", "timed"]

P = ParamSpec("P")
T = TypeVar("T")

_log: Final = logging.getLogger("asynccomm")


def logged(function: Callable[P, T]) -> Callable[P, T]:
    """``function``; what it raises at the call is logged for debugging, with the group it was about."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as exc:
            _report(function, args, kwargs, exc)
            raise

    return call


def logged_coroutine(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """The same for a coroutine function, and what awaiting it raises."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(*args, **kwargs)
        except Exception as exc:
            _report(function, args, kwargs, exc)
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


def _report(function: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> None:
    """Never raises: the error that is on its way matters more."""
    if not _log.isEnabledFor(logging.DEBUG):
        return
    try:
        given = inspect.signature(function).bind_partial(*args, **kwargs).arguments.get("group")
        known = world()
        pg = given if isinstance(given, ProcessGroup) else known.default_pg
        about = "no group"
        if pg is not None:
            everybody = known.default_pg.size() if known.default_pg is not None else -1
            rank = known.default_pg.rank() if known.default_pg is not None else -1
            about = (
                f"group {pg.group_name!r} of backend {pg.backend!r}, rank {pg.rank()} of {pg.size()}, global rank "
                f"{rank} of {everybody}"
            )
        _log.debug("%s on %s raised %s: %s", function.__name__, about, type(error).__name__, error)
    except Exception:
        _log.debug("%s raised %s", function.__name__, type(error).__name__)
