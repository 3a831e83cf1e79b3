"""Repeated collectives without most of the ordinary path of a call.

Programs repeat their calls, so a backend remembers collectives by their operation. A later call with an equal operation
is checked as every call, and then begins before it has a Work. Everything unusual takes the ordinary path: with a tag
or a limit of its own, in scopes, under agreed ordering.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from typing import Any, Final

from torch.autograd import profiler

from asynccomm.backends.base import DirectCalls
from asynccomm.core.callsite import CallSite, call_site
from asynccomm.core.work import Work

DEPTH: Final = 3  # frames from call_site() to the user's call: call_site, ``submit``, and a method


class CheckedCalls(ABC):
    """``backends.base.FastCalls`` for calls that are checked first.

    Args:
        checks: of the methods that it is for.
    """

    def __init__(self, calls: DirectCalls, checks: Set[Callable[..., Any]]) -> None:
        self._calls = calls
        self._counts = calls.counts
        self._checks = checks

    def submit(self, timeout: Any, hints: Any, tag: Any, check: Callable[..., Any], /, *arguments: Any) -> Work[Any]:
        """See ``FastCalls.submit``."""
        calls, counts = self._calls, self._counts
        if check in self._checks and timeout is None and hints is None and tag is None:
            unusual = counts.detours > calls.compares or counts.scopes or profiler._is_profiler_enabled
            if not (unusual or counts.closed) and asyncio._get_running_loop() in (calls.mailbox.loop, None):
                started = time.monotonic()
                site = call_site(DEPTH) if calls.records_sites else None
                made = check(calls.group, *arguments)
                return self._begin(made, site, started) or calls.submit_made(made, None, None, None)
        return calls.call(timeout, hints, tag, check, *arguments)

    def flush(self, _: list[Any], /) -> None:
        """See ``FastCalls.flush``: no operation is held."""

    @abstractmethod
    def _begin(self, call: Any, site: CallSite | None, started: float) -> Work[Any] | None:
        """Begin a checked call; None: it is not for this path, and nothing has happened."""
