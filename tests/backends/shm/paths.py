"""Comms that count by which path calls and scopes are sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asynccomm import Comm, new_comm
from asynccomm.comm.deferring import DeferredCalls
from asynccomm.comm.direct_calls import SubmitterCalls
from asynccomm.comm.submission import Submitter


class Paths:
    """The number of calls or scopes that Python has sent (``ordinary``), or that C has handed over (``adopted``)."""

    def __init__(self) -> None:
        self.ordinary = self.adopted = 0

    def took(self) -> str:
        """The path since the last time."""
        path = "ordinary" if self.ordinary else "fast"
        self.ordinary = self.adopted = 0
        return path

    def count(self, patch: pytest.MonkeyPatch, where: type, method: str, path: str) -> None:
        """Count the calls of ``method``."""
        forward: Callable[..., Any] = getattr(where, method)

        def counting(owner: Any, *args: Any) -> Any:
            setattr(self, path, getattr(self, path) + 1)
            return forward(owner, *args)

        patch.setattr(where, method, counting)


@asynccontextmanager
async def counted(*, scopes: bool = False, **options: Any) -> AsyncIterator[tuple[Comm, Paths]]:
    """A new comm that counts its calls, or its scopes."""
    paths = Paths()
    with pytest.MonkeyPatch.context() as patched:
        ordinary: tuple[type, str] = (DeferredCalls, "_send") if scopes else (Submitter, "call")
        paths.count(patched, *ordinary, "ordinary")
        paths.count(patched, SubmitterCalls, "adopt_held" if scopes else "adopt", "adopted")
        async with new_comm("shm", name="counted", timeout=30, **options) as comm:
            yield comm, paths
