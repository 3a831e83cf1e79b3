"""Functions that run on a thread of their own, also while the interpreter ends.

Since Python 3.12, no thread can be started once the interpreter has begun to end, and so none by atexit:
https://docs.python.org/3/library/atexit.html. Parts that may have to end in a thread at that time call :func:`reserve`
before; then a few threads of the process wait for such functions.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, final

from asynccomm.core.per_process import PerProcess

THREADS: Final = 4  # one that hangs leaves others: a comm ends by up to three functions at once

_log = logging.getLogger("asynccomm")


@final
class BackgroundCall:
    """A function that runs on another thread."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        self._over = threading.Event()

    def run(self) -> None:
        """Run the function; logs an exception."""
        function, self._function = self._function, None  # it may keep the object that keeps this one
        assert function is not None
        try:
            function()
        except BaseException:  # also one that asks a thread to end: that may be a reserved one
            _log.exception("error in the background")
        del function
        self._over.set()

    def join(self, seconds: float) -> bool:
        """Block until the function has returned; False if it has not within ``seconds``."""
        return self._over.wait(seconds)


@final
class _ReservedThreads:
    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[BackgroundCall] = queue.SimpleQueue()
        self.put = self._calls.put
        for _ in range(THREADS):
            threading.Thread(target=self._main, name="asynccomm end", daemon=True).start()

    def _main(self) -> None:
        while True:
            self._calls.get().run()


_reserved: Final = PerProcess(_ReservedThreads)


def reserve() -> None:
    """Have threads for functions that run when the interpreter ends. Once per process, for good."""
    with contextlib.suppress(RuntimeError):  # the process cannot have more threads
        _reserved()


def in_background(name: str, function: Callable[[], object]) -> BackgroundCall:
    """Start ``function`` on a new daemon thread called ``name``, or else on a reserved one. Logs its exceptions.

    Raises: RuntimeError if no thread can be started, and none is reserved.
    """
    call = BackgroundCall(function)
    try:
        threading.Thread(target=call.run, name=name, daemon=True).start()
    except RuntimeError:
        if _reserved.made is None:
            raise
        _reserved.made.put(call)
    return call
