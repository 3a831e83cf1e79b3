"""Observing a comm: events and hooks."""

from __future__ import annotations

from collections.abc import Callable

from asynccomm.comm.methods.base import CommBase
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
        "membership" when a rank leaves or is lost, and, with the hint ``metrics``, "arrivals" with the times of all
        ranks' calls. A call that the fast path completes at once gives its three events when it is done. Any number of
        streams may be open; each has one reader. ``close()`` ends a stream early. Cancelling is safe.

        Args:
            size: number of notes kept for the reader. A slower reader loses the oldest, and ``stream.dropped`` counts
                them.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be a positive integer, got {size!r}")
        self._submitter.check_open()
        stream = EventStream(self._submitter.mailbox, size, self._submitter.unwatch)
        self._submitter.watch(stream)
        return stream

    def add_hook(
        self,
        *,
        pre: Callable[[Event], object] | None = None,
        post: Callable[[Event], object] | None = None,
        abort: Callable[[BrokenError], object] | None = None,
    ) -> Hook:
        """Call functions at events of this rank; ``remove()`` of the result ends that. From any thread.

        Calls take the ordinary path while there is a hook, which costs some microseconds for each call in shared
        memory; ``events`` costs less.

        Args:
            pre: called with the "call" event in the calling thread, before the operation is sent. An exception refuses
                the call: the method raises it, and nothing is sent.
            post: called with the "completion" or "failure" event, in the thread that finds the end; must be quick. An
                exception goes to ``threading.excepthook``.
            abort: called with the error when the comm breaks, like ``post``.
        """
        for name, function in (("pre", pre), ("post", post), ("abort", abort)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be callable, got {function!r}")
        self._submitter.check_open()
        hook = Hook(pre, post, abort, self._submitter.unwatch)
        self._submitter.watch(hook)
        return hook
