"""SIGTERM as a request to end: schedulers and container runtimes send it some time before SIGKILL.

``run`` cancels the main task, as Ctrl-C does, so that every ``finally`` runs. A program that asks
``Comm.preempted()`` is not cancelled: all its ranks learn in the same step that one of them has the signal.

The handler is Python's, as that of ``asyncio.run`` for Ctrl-C: a handler of the loop runs only when the loop has a
turn, so a program in a long step of its own could not be ended.
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

    @contextmanager
    def watching(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Handle SIGTERM on the running loop, if this is the main thread and the program has no handler of its own."""
        on_main = threading.current_thread() is threading.main_thread()
        if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        loop = asyncio.get_running_loop()
        self.requested = self.polled = self.cancelled = False
        handler = partial(self._on_signal, os.getpid(), loop, task)
        loop.add_signal_handler(signal.SIGTERM, _nothing)  # has the signal wake the loop, whichever thread gets it
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is handler:
                loop.remove_signal_handler(signal.SIGTERM)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, pid: int, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], *_: object) -> None:
        """Between any two instructions of the main thread."""
        if os.getpid() != pid:  # a forked child, which does not run the task
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        again, self.requested = self.requested, True
        if self.cancelled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif again or not self.polled:
            self.cancelled = True
            task.cancel("SIGTERM")
            loop.call_soon_threadsafe(_nothing)  # the loop may be about to wait


def _nothing() -> None:
    pass


preemption: Final = Preemption()
