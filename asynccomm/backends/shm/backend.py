"""The shm backend: CPU collectives through shared memory, between ranks on one machine; Linux only.

The modules, lowest first: ``layout`` (offsets in a segment), ``fence`` (memory ordering), ``segment``, ``handshake``
and ``bootstrap`` (creating and sharing a segment), ``rings``, ``endpoint``, ``message_fields`` and ``p2p`` (point to
point), ``board``, ``arena`` and ``peer_memory`` (tensors that ranks lend each other), ``reduction``, ``programs``,
``reference`` and ``executor`` (steps of collectives), ``schedule`` and ``lowering`` (programs of operations),
``fast_path`` (small collectives in C), ``doorbell``, ``rank_words``, ``progress_thread`` and ``engine`` (waking ranks,
and making progress). ``bakery``, ``window_parts`` and ``windows`` are beside these.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Final, Self, final

import anyio.to_thread
import torch
from torch import Tensor

from asynccomm.backends.base import Backend, BackendContext, DirectCalls, FastCalls, Submission
from asynccomm.backends.shm.arena import arena
from asynccomm.backends.shm.bootstrap import PeerMapping, bootstrap_segment, report_unsupported, unsupported
from asynccomm.backends.shm.engine import Engine
from asynccomm.backends.shm.progress_thread import ProgressThread, shared_thread
from asynccomm.backends.shm.settings import HINTS, Settings, spin_seconds, thread_spin_seconds, yield_seconds
from asynccomm.backends.shm.windows import ShmWindow, WindowPace
from asynccomm.core.work import Work
from asynccomm.errors import BackendError
from asynccomm.ops import WindowInfo

NAMED: Final = 8  # messages that a warning names
QUIET_SECONDS: Final = 5.0  # limit of the wait for an aborted transfer to finish its chunk
RELEASE_SECONDS: Final = 0.01  # between checks whether it has

_log = logging.getLogger("asynccomm")


@final
class ShmBackend(Backend):
    """One rank of a comm in shared memory."""

    name = "shm"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    hints = HINTS
    compares = True
    fusion_limit = 128 << 10  # larger operations are faster unmerged than in pieces (measured: 2 ranks on 2 cores)
    fused_limit = 1 << 20

    def __init__(
        self, context: BackendContext, engine: Engine, mapping: PeerMapping, worker: ProgressThread, bell: int
    ) -> None:
        self._context = context
        self._engine = engine
        self._mapping = mapping
        self._worker = worker
        self._bell = bell
        self._loop = context.mailbox.loop
        self._on_error = context.on_error
        self._name = context.group.name
        self._withdrawing = threading.RLock()  # reentrant: garbage collection inside may withdraw another comm
        self._withdrawn = False
        self._released = False
        self._windows: set[ShmWindow] = set()
        self._arena = arena()
        self._loop.add_reader(bell, engine.on_bell, bell)
        for rank, fd in enumerate(mapping.liveness_fds):
            if fd >= 0:
                worker.watch(fd, partial(engine.ended, rank))

    @classmethod
    def check_hints(cls, hints: Mapping[str, str]) -> None:
        Settings.of(hints)
        thread_spin_seconds(hints, 2)
        yield_seconds(hints)

    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        if reason := unsupported():
            await report_unsupported(context, reason)
        settings = Settings.of(context.hints)
        layout = settings.layout(context.group.size)
        patience = spin_seconds(context.hints, context.group.size)
        with contextlib.ExitStack() as unless_connected:
            try:
                worker = shared_thread()
                memory = arena().hold()
                unless_connected.callback(arena().release)
                bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            except (OSError, RuntimeError, BackendError) as exc:  # no descriptors or threads left: the others must know
                await report_unsupported(context, str(exc))
            unless_connected.callback(os.close, bell)
            pauses = thread_spin_seconds(context.hints, context.group.size), yield_seconds(context.hints)
            made: list[Engine] = []
            unless_connected.callback(made.clear)  # the frames of an error would keep the mapping

            def on_mapped(mapping: PeerMapping) -> None:
                made.append(Engine(context, layout, settings, mapping, worker, patience, *pauses))

            shared, bells = settings.as_dict(), (bell, worker.bell)
            mapping = await bootstrap_segment(context, shared, layout, bells, memory, on_mapped)
            unless_connected.callback(mapping.close)
            backend = cls(context, made[0], mapping, worker, bell)
            unless_connected.pop_all()
            return backend

    def submit(self, batch: Sequence[Submission]) -> None:
        self._engine.submit(batch)

    def withdraw(self, receive: Submission) -> None:
        """Settle a receive: another backend has taken its claim. From any thread."""
        self._engine.withdraw(receive)

    def fast_path(self, calls: DirectCalls) -> FastCalls | None:
        return self._engine.fast_path(calls)

    def shared_tensor(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return arena().strided(shape, stride, dtype)

    async def window(self, window: WindowInfo, *, guests: int = 0) -> ShmWindow:
        pace = WindowPace(self._engine.inline_bytes, self._engine.patience)
        made = await ShmWindow.connect(self._context, window, self._worker, pace, guests)
        self._windows = {each for each in self._windows if not each.closed} | {made}
        return made

    def before_await(self, work: Work[object]) -> None:
        self._engine.before_await(work)

    def before_block(self, work: Work[object]) -> None:
        self._engine.before_block(work)

    def drain_before_failure(self) -> None:
        self._engine.drain_before_failure()

    def withdraw_tensors(self) -> None:
        self._engine.withdraw_tensors()

    async def aclose(self) -> None:
        if unreceived := self._engine.unreceived():
            more = f" and {len(unreceived) - NAMED} more" if len(unreceived) > NAMED else ""
            messages = "; ".join(unreceived[:NAMED])
            _log.warning("comm %r was closed with messages that were not received: %s%s", self._name, messages, more)
        self._engine.leave()
        self._withdraw()
        if not self._engine.idle(0.0):
            await anyio.to_thread.run_sync(self._engine.idle, QUIET_SECONDS)
        self._release()

    def abort(self) -> None:
        self._engine.abort()
        for window in list(self._windows):
            window.abort()
        self._withdraw()
        try:
            self._loop.call_soon_threadsafe(self._release)
        except RuntimeError:  # the loop is closed
            if all(window.closed for window in self._windows):  # the thread of an open one may still ring
                self._release()

    def close_at_exit(self) -> None:
        self.abort()
        self._engine.idle(QUIET_SECONDS)
        for window in list(self._windows):
            window.join()

    def _withdraw(self) -> None:
        """Close this rank's liveness pipe, which the peers notice. From any thread."""
        with self._withdrawing:
            if self._withdrawn:
                return
            self._withdrawn = True
            for fd in self._mapping.liveness_fds:
                self._worker.unwatch(fd)
            self._mapping.descriptors.close_one(self._mapping.liveness_fd)

    def _release(self) -> None:
        """Close the descriptors once no thread drives the engine. On the loop; once it is closed, from any thread."""
        if not self._released and not self._engine.idle(0.0):  # a thread is finishing a step
            if not self._loop.is_closed():
                self._loop.call_later(RELEASE_SECONDS, self._release)
            return
        with self._withdrawing:
            if self._released:
                return
            self._released = True
        for window in self._windows:
            window.close()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._bell)
        self._mapping.close()
        self._arena.release()
        os.close(self._bell)
