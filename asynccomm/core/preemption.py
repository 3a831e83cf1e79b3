"""SIGTERM as a request to end: schedulers and container runtimes send it some time before SIGKILL.

``run`` cancels the main task, as Ctrl-C does, so that every ``finally`` runs. A program that asks
``Comm.preempted()`` is not cancelled: all its ranks learn in the same step that one of them has the signal.

The handler is Python's, as that of ``asyncio.run`` for Ctrl-C: a handler of the loop runs only when the loop has a
turn, so a program in a long step of its own could not be ended. It interrupts system calls, too, in which such a
program may wait.

A forked child, such as a worker of ``multiprocessing``, ends by SIGTERM. Python drops the signals that a child gets
before it runs, so the signal is held back from before the fork until the child has the default action.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, final


@final
class Preemption:
    """The state of this process."""

    def __init__(self) -> None:
        self.requested: bool = False  #: whether SIGTERM has arrived
        self.polled: bool = False  #: whether the program asks for it
        self.cancelled: bool = False  #: whether SIGTERM has cancelled the main task
        self._handler: object = None  # while it handles SIGTERM
        self._forking = threading.local()  # by thread: the signals that were held back before it forks
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._release_child)

    @contextmanager
    def watching(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Handle SIGTERM on the running loop, if this is the main thread and the program has no handler of its own."""
        on_main = threading.current_thread() is threading.main_thread()
        if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        loop = asyncio.get_running_loop()
        self.requested = self.polled = self.cancelled = False
        self._handler = handler = partial(self._on_signal, loop, task)
        loop.add_signal_handler(signal.SIGTERM, _nothing)  # has the signal wake the loop, whichever thread gets it
        signal.signal(signal.SIGTERM, handler)
        try:
            yield
        finally:
            self._handler = None
            if signal.getsignal(signal.SIGTERM) is handler:
                loop.remove_signal_handler(signal.SIGTERM)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], *_: object) -> None:
        """Between any two instructions of the main thread."""
        again, self.requested = self.requested, True
        if self.cancelled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif again or not self.polled:
            self.cancelled = True
            task.cancel("SIGTERM")
            loop.call_soon_threadsafe(_nothing)  # the loop may be about to wait

    def _hold(self) -> None:
        if self._handler is not None:
            # read before it is changed, as both calls may end by the exception of a signal handler
            self._forking.__dict__.setdefault("before", signal.pthread_sigmask(signal.SIG_BLOCK, []))
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _release(self) -> None:
        if hasattr(self._forking, "before"):
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.before)
            finally:
                del self._forking.before

    def _release_child(self) -> None:
        handler, self._handler = self._handler, None
        if handler is not None and signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._release()


def _nothing() -> None:
    pass


preemption: Final = Preemption()
