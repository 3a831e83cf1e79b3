"""The CPU side channel of a GPU comm: another backend, between the same ranks.

It carries headers, objects and barriers, which then never pass through device memory. The backend is shm where all
ranks can map the same memory, else hierarchical or gloo. The event loop drives it, and while the loop is blocked a
thread does (``loop_watch``).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Self, final

import torch

from asynccomm.backends.base import Backend, BackendContext, BackendWindow, Submission, UnsuitableError
from asynccomm.backends.nccl.device import Event
from asynccomm.backends.nccl.loop_watch import LoopWatch
from asynccomm.backends.nccl.poller import Poller
from asynccomm.backends.registry import candidates, load_backend
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError
from asynccomm.ops import Call, WindowInfo, WindowOp

_CPU = torch.device("cpu")


@final
class SideWindow:
    """A window of the side channel. From any thread."""

    def __init__(self, window: BackendWindow, mailbox: Mailbox, loop_watch: LoopWatch) -> None:
        self.window = window
        self._mailbox, self._loop_watch = mailbox, loop_watch
        self._lock = threading.RLock()  # one call at a time
        self._number = 0

    def submit(self, op: WindowOp, done: Callable[[AsyncCommError | None], object]) -> Work[None]:
        """Run an operation without tensors; as ``SideChannel.submit``."""

        def settled(work: Work[None]) -> None:
            self._loop_watch.remove(work)
            done(work.take_error())

        with self._lock:
            self._number += 1
            work: Work[None] = Work(
                op, self._number, self._mailbox, value=None, timeout=math.inf, on_settled=settled, driver=self.window
            )
            self.window.submit((Submission(Call(op, (), (), None), work),))
        self._loop_watch.add(work, self.window)
        return work


@final
class SideChannel:
    """Runs calls on CPU tensors, each with a callback for its end."""

    def __init__(self, backend: Backend, mailbox: Mailbox, loop_watch: LoopWatch) -> None:
        self._backend, self._loop_watch = backend, loop_watch
        self._lock = threading.RLock()  # one call at a time; a backend may settle a call inside another call
        self._mailbox = mailbox
        self._numbers = [0, 0]  # counts of calls: collectives, messages

    @classmethod
    async def connect(cls, context: BackendContext, name: str, poller: Poller[Event]) -> Self:
        """Connect the backend ``name``, or for ``"auto"`` the first suitable one. Collective."""
        names = candidates(name, _CPU)
        for candidate in names:
            own = replace(
                context,
                group=replace(context.group, device=_CPU),
                store=context.store.prefix(candidate),
                hints={},
                alternatives=candidate != names[-1],
            )
            try:
                backend = await load_backend(candidate, _CPU).connect(own)
            except UnsuitableError:
                if candidate == names[-1]:
                    raise
            else:
                return cls(backend, context.mailbox, LoopWatch(poller, context.mailbox))
        raise AssertionError("no candidates")

    def submit(self, call: Call, done: Callable[[AsyncCommError | None], object]) -> Work[None]:
        """Run ``call``; ``done`` is called at its end, on any thread, with the error. ``done`` must not submit a call.

        Returns: a Work that serves only to drive the call.
        """

        def settled(work: Work[None]) -> None:
            self._loop_watch.remove(work)
            done(work.take_error())

        p2p = call.op.p2p
        with self._lock:
            number = self._numbers[p2p]
            self._numbers[p2p] += 1
            work: Work[None] = Work(
                call.op, number, self._mailbox, value=None, timeout=math.inf, on_settled=settled, driver=self._backend
            )
            self._backend.submit((Submission(call, work),))
        self._loop_watch.add(work, self._backend)
        return work

    async def window(self, window: WindowInfo) -> SideWindow:
        """Make a window on the host, between the same ranks. Collective; see ``Backend.window``."""
        info = replace(window, group=replace(window.group, device=_CPU))
        return SideWindow(await self._backend.window(info), self._mailbox, self._loop_watch)

    @property
    def name(self) -> str:
        """The name of the backend."""
        return self._backend.name

    @property
    def any_source(self) -> bool:
        """Whether a receive may leave its source open."""
        return self._backend.any_source

    def before_await(self, work: Work[None]) -> None:
        self._backend.before_await(work)

    def before_block(self, work: Work[None]) -> None:
        self._backend.before_block(work)

    async def aclose(self) -> None:
        await self._backend.aclose()

    def abort(self) -> None:
        self._backend.abort()

    def close_at_exit(self) -> None:
        self._backend.close_at_exit()
