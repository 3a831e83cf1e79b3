"""Traces of a comm: for a block of a program, and of all comms of a run."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, final

from asynccomm.comm.session import Session
from asynccomm.comm.session import on_close as closing
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError
from asynccomm.observe.chrome import DIRECTORY, write_trace
from asynccomm.observe.tracing import TraceRecorder

T = TypeVar("T")
_log = logging.getLogger("asynccomm")
# of the comms that are traced because of the variable
_recorders: weakref.WeakKeyDictionary[Session, tuple[TraceRecorder, Path]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_tasks: set[asyncio.Task[None]] = set()


@final
class TraceScope(Handle):
    """The result of ``Comm.trace``, a context manager.

    ``async with``: a collective; all ranks leave it at the same place, and rank 0 writes the trace of all ranks. Where
    the body raises, or the comm has broken, each rank writes its own instead. ``with``: each rank writes its own.
    """

    _instead = "call comm.trace() there"

    def __init__(self, session: Session, path: Path, gather: Callable[[object, int], Work[Any]]) -> None:
        self._session = session
        self._gather = gather
        self._path = path
        self._recorder: TraceRecorder | None = None
        self._measuring: asyncio.Task[None] | None = None

    def _own_path(self) -> Path:
        rank = self._session.group.rank
        return self._path.with_name(f"{self._path.stem}.rank{rank}{self._path.suffix}")

    def __enter__(self) -> Self:
        self._on_loop(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = self._on_loop(self._end)
        write_trace(self._own_path(), [recorder.part()])

    def _on_loop(self, call: Callable[[], T]) -> T:
        """The result of ``call``, which the comm's loop makes, also for a thread that runs no loop."""
        loop = self._session.mailbox.loop
        if asyncio._get_running_loop() is not None or not loop.is_running():
            return call()

        async def called() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(called(), loop).result()

    def _begin(self) -> None:
        if self._recorder is not None:
            raise RuntimeError("this trace has begun already: call comm.trace() for another one")
        self._recorder = begin_trace(self._session)
        self._measuring = self._session.mailbox.loop.create_task(measure_offset(self._session, self._recorder))

    def _end(self) -> TraceRecorder:
        recorder = self._recorder
        assert recorder is not None
        self._session.submitter.unwatch(recorder)
        recorder.stop()
        return recorder

    async def __aenter__(self) -> Self:
        self.__enter__()
        assert self._measuring is not None
        try:
            await asyncio.shield(self._measuring)
        except BaseException:  # cancelled: there will be no __aexit__
            self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        part = self._end().part()
        parts: list[Any] | None = None
        if exc is None and self._session.error is None:
            with contextlib.suppress(AsyncCommError):  # broken meanwhile
                parts = await self._gather(part, 0)
                if parts is None:
                    return
        write_trace(self._own_path() if parts is None else self._path, [part] if parts is None else parts)


def begin_trace(session: Session) -> TraceRecorder:
    """Record the operations of a comm from now on. On its loop."""
    session.submitter.check_loop()
    session.submitter.check_open()
    group, identity = session.group, session.identity
    recorder = TraceRecorder(group, identity.key, identity.numbers[group.rank])
    session.submitter.watch(recorder)
    recorder.start(session.mailbox.loop)
    return recorder


async def measure_offset(session: Session, recorder: TraceRecorder) -> None:
    """Estimate the offset of this rank's clock for a trace."""
    if session.reporter is not None:
        with contextlib.suppress(AsyncCommError):
            recorder.offset = await session.reporter.clock_offset()


def trace_if_wanted(session: Session) -> None:
    """Trace a new comm until it closes, if the run is traced. On its loop."""
    directory = os.environ.get(DIRECTORY)
    if directory:
        recorder = begin_trace(session)
        _recorders[session] = recorder, Path(directory) / f"{os.getpid()}-{next(_numbers)}.json"
        task = session.mailbox.loop.create_task(measure_offset(session, recorder))
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)


def _write(session: Session) -> None:
    found = _recorders.pop(session, None)
    if found is None:
        return
    recorder, path = found
    session.submitter.unwatch(recorder)
    recorder.stop()
    try:
        write_trace(path, [recorder.part()])
    except OSError as exc:
        _log.warning("comm %r: the trace could not be written: %s", session.group.name, exc)


def _write_all() -> None:
    """Write the traces of the comms that are still open, at the end of the process."""
    for session in list(_recorders):
        _write(session)


closing.append(_write)
atexit.register(_write_all)
