"""Functions that run on a thread of their own, also while the interpreter ends.

Since Python 3.12, no thread can be started once the interpreter has begun to end, and so none by atexit:
https://docs.python.org/3/library/atexit.html. Parts that may have to end in a thread at that time call :func:`reserve`
before; then one thread of the process waits for such functions, and runs them one after the other.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, final

from asynccomm.core.per_process import PerProcess

_log = logging.getLogger("asynccomm")


@final
class BackgroundCall:
    """A function that runs on another thread."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._over = threading.Event()

    def run(self) -> None:
        """Run the function; logs an exception."""
        try:
            self._function()
        except Exception:
            _log.exception("error in the background")
        finally:
            self._over.set()

    def join(self, seconds: float) -> bool:
        """Block until the function has returned; False if it has not within ``seconds``."""
        return self._over.wait(seconds)


@final
class _ReservedThread:
    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[BackgroundCall] = queue.SimpleQueue()
        self.put = self._calls.put
        threading.Thread(target=self._main, name="asynccomm end", daemon=True).start()

    def _main(self) -> None:
        while True:
            self._calls.get().run()


_reserved: Final = PerProcess(_ReservedThread)


def reserve() -> None:
    """Have a thread for functions that run when the interpreter ends. Once per process, for good."""
    _reserved()


def in_background(name: str, function: Callable[[], object]) -> BackgroundCall:
    """Start ``function`` on a new daemon thread called ``name``, or else on the reserved one. Logs its exceptions.

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
