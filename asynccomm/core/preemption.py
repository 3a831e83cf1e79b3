"""SIGTERM as a request to end: schedulers and container runtimes send it some time before SIGKILL.

``run`` cancels the main task, as Ctrl-C does, so that every ``finally`` runs. A program that asks
``Comm.preempted()`` is not cancelled: all its ranks learn in the same step that one of them has the signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, task)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    def _on_signal(self, task: asyncio.Task[Any]) -> None:
        again, self.requested = self.requested, True
        if self.cancelled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif again or not self.polled:
            self.cancelled = True
            task.cancel("SIGTERM")


preemption: Final = Preemption()
