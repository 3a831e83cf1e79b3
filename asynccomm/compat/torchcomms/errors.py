"""Errors of the types that torchcomms raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from asynccomm.ops.renamed import Renamed


@final
class RefusedError(RuntimeError, ValueError):
    """A call with a wrong value: a RuntimeError, as in torchcomms, and a ValueError, as everywhere in asynccomm."""


@contextmanager
def refusing(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise RefusedError in place of ValueError; see Renamed for ``names``."""
    try:
        with Renamed(names or {}):
            yield
    except ValueError as exc:
        raise RefusedError(str(exc)) from exc


def made_or_refused(make: Callable[[], Any]) -> Any:
    """``make()``, or an awaitable of it where a loop runs. Raises: RefusedError in place of ValueError, from either."""
    with refusing():
        made = make()
    return made if asyncio._get_running_loop() is None else _awaited(made)


async def _awaited(made: Awaitable[Any]) -> Any:
    with refusing():
        return await made
