"""Observing a comm: events and hooks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.tracing import TraceScope
from asynccomm.core.work import Work
from asynccomm.errors import BrokenError
from asynccomm.observe.events import KEPT, Event, EventStream, Hook


class Observation(CommBase):
    """The methods of a comm that observe it."""

    def events(self, *, size: int = KEPT) -> EventStream:
        """The events of this rank from now on: ``async for event in comm.events()``. Ends when the comm closes.

        ::

            async for event in comm.events():
                if event.kind == "failure":
                    log(event.op, event.site, event.error)

        The kinds are "call", "send", "completion" and "failure" of operations, "failure" and "abort" of the comm,
        "membership" when a rank leaves or is lost and when ``shrink`` or ``reconfigure`` makes another comm of
        ``members``, and, with the hint ``metrics``, "arrivals" with the times of all ranks' calls. A call that the fast
        path completes at once gives its three events when it is done. Any number of streams may be open; each has one
        reader. ``close()`` ends a stream early. Cancelling is safe.

        Args:
            size: number of notes kept for the reader. A slower reader loses the oldest, and ``stream.dropped`` counts
                them.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be a positive integer, got {size!r}")
        self._submitter.check_open()
        stream = EventStream(self._submitter.mailbox, size, self._submitter.watchers, self._submitter.unwatch)
        self._submitter.watch(stream)
        return stream

    def trace(self, path: str | os.PathLike[str]) -> TraceScope:
        """Trace the operations in the scope as Chrome/Perfetto JSON: ``async with comm.trace("out.json"):``.

        The trace has a row for each rank and comm: operations, the part of each that waits for the last rank, arrows
        from the last rank's call to the completion on the other ranks, batches, waits in ``ready()``, and the lag of
        the event loop. Perfetto (ui.perfetto.dev) and Chromium's ``chrome://tracing`` show it.

        With ``async with``, leaving is a collective: rank 0 writes the trace of all ranks to ``path``, by one clock. If
        the body raises or the comm has broken, each rank writes its own to ``out.rank3.json``, and ``asynccomm trace
        merge`` merges these. With ``with``, each rank always writes its own, and no rank waits.

        Raises: TypeError: ``path`` is no path; ValueError: ``path`` is empty or a folder, or, on rank 0, its folder
        does not exist; OSError on leaving, if the file cannot be written.
        """
        try:
            file = Path(path)
        except TypeError:
            raise TypeError(f"path must be a str or an os.PathLike[str], got {path!r}") from None
        if path == "":  # for pathlib, the current folder
            raise ValueError("path must be a file, got ''")
        if file.is_dir():
            raise ValueError(f"path must be a file, and {os.fspath(path)!r} is a folder")
        # other ranks may be on hosts without the folder, or make this call before rank 0 makes the folder
        if self._session.group.rank == 0 and not file.parent.is_dir():
            raise ValueError(f"path must be in a folder that exists, and {str(file.parent)!r} is none")
        return TraceScope(self._session, file, self._gather_part)

    def _gather_part(self, part: object, root: int) -> Work[Any]:
        gather: Any = self
        work: Work[Any] = gather.gather_object(part, root)  # of ``Objects``
        return work

    def add_hook(
        self,
        *,
        pre: Callable[[Event], object] | None = None,
        post: Callable[[Event], object] | None = None,
        abort: Callable[[BrokenError], object] | None = None,
        membership: Callable[[Event], object] | None = None,
    ) -> Hook:
        """Call functions at events of this rank; ``remove()`` of the result ends that at once. From any thread.

        Calls take the ordinary path while there is a hook, which costs some microseconds for each call in shared
        memory; ``events`` costs less.

        Args:
            pre: called with the "call" event in the calling thread, before the operation is sent. An exception refuses
                the call: the method raises it, and nothing is sent.
            post: called with the "completion" or "failure" event, in the thread that finds the end; must be quick. An
                exception goes to ``threading.excepthook``.
            abort: called with the error when the comm breaks, like ``post``.
            membership: called with each "membership" event, like ``post``.
        """
        for name, function in (("pre", pre), ("post", post), ("abort", abort), ("membership", membership)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be callable, got {function!r}")
        self._submitter.check_open()
        hook = Hook(pre, post, abort, membership, self._submitter.unwatch)
        self._submitter.watch(hook)
        return hook
