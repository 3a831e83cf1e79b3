"""The thread that runs the control channels of a process, with an event loop of its own.

A rank thus answers, receives messages and sends heartbeats while its own loop is blocked or stuck in a call that does
not return. The thread lives as long as it has users, and sleeps in one system call while idle. Before it ends, it
closes all listeners and connections that their owners left open on its loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, Final, TypeVar, final

from asynccomm.control.transport.connection import end_connections
from asynccomm.control.transport.listener import end_listening
from asynccomm.errors import BackendError

ENDED: Final = "the control thread has ended"
END_SECONDS: Final = 2.0  # for the thread to end at process exit

T = TypeVar("T")
_making = threading.RLock()
_thread: ControlThread | None = None
_ending: set[ControlThread] = set()  # threads without users, which have not ended yet


@final
class ControlThread:
    """One thread and its loop; see :func:`control_thread`. Raises: BackendError if the thread cannot start."""

    def __init__(self) -> None:
        self.loop: asyncio.SelectorEventLoop = asyncio.SelectorEventLoop()
        self._users = 0
        self._calling = threading.RLock()  # held briefly; reentrant: a comm that is collected meanwhile calls, too
        self._ended = False  # the thread accepts no more calls
        self._thread = threading.Thread(target=self._run, name="asynccomm control", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            self.loop.close()
            raise BackendError(f"cannot start the control thread: {exc}") from exc

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(_finish())
            with self._calling:
                self._ended = True
            self.loop.run_until_complete(_finish())  # for calls made before _ended was set
            self.loop.close()
            _ending.discard(self)

    def acquire(self) -> None:
        """Add a user."""
        self._users += 1

    def release(self) -> None:
        """Remove a user; the thread ends with its last user. Thread-safe."""
        global _thread
        with _making:
            self._users -= 1
            if self._users == 0:
                if _thread is self:
                    _thread = None
                _ending.add(self)
                self.loop.call_soon_threadsafe(self.loop.stop)

    def call(self, function: Callable[[], object]) -> bool:
        """Run ``function`` on the thread, at once if called there. Thread-safe. Returns False once the thread ended."""
        if threading.get_ident() == self._thread.ident:  # current_thread() would keep a record of any foreign thread
            function()
            return True
        with self._calling:
            if self._ended:
                return False
            self.loop.call_soon_threadsafe(function)
        return True

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``coroutine`` on the thread. Call it from another thread. Cancelling the future cancels the coroutine.

        Raises: RuntimeError: the thread has ended; the future raises it if the thread ends later.
        """
        found: Future[T] = Future()

        def begin() -> None:
            task = self.loop.create_task(coroutine)
            task.add_done_callback(partial(_pass_on, found))
            found.add_done_callback(lambda _: self.call(task.cancel))

        if not self.call(begin):
            coroutine.close()
            raise RuntimeError(ENDED)
        return found

    def join(self) -> None:
        """Wait at most ``END_SECONDS`` for the end of the thread."""
        self._thread.join(END_SECONDS)

    def end(self) -> None:
        """End the thread at process exit: no thread may run during the interpreter's shutdown."""
        with _making:
            self._users = 0
            self.call(self.loop.stop)
        self._thread.join(END_SECONDS)


def _pass_on(found: Future[T], task: asyncio.Task[T]) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller has cancelled the future
        if task.cancelled():
            found.set_exception(RuntimeError(ENDED))
        elif (error := task.exception()) is not None:
            found.set_exception(error)
        else:
            found.set_result(task.result())


async def _finish() -> None:
    """Cancel the remaining tasks, and close all connections; no connection is accepted meanwhile."""
    end_listening()
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # a task may start another as it ends
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await end_connections()


def control_thread() -> ControlThread:
    """The control thread of this process, with one more user; the caller calls ``release`` at the end.

    Raises: BackendError.
    """
    global _thread
    with _making:
        if _thread is None:
            _thread = ControlThread()
        _thread.acquire()
        return _thread


def _end_thread() -> None:
    thread = _thread
    if thread is not None:
        thread.end()
    for each in list(_ending):  # a thread may drop a tensor, which ends the process if the interpreter has ended
        each.join()


def _forget_in_child() -> None:
    global _thread, _making
    _thread, _making = None, threading.RLock()
    _ending.clear()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_end_thread)
