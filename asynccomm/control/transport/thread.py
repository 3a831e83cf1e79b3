"""The thread that the control channels of a process run on, with an event loop of its own.

So a rank answers, hears and is heard while its own loop is blocked or stuck in a call that does not return. The thread
lives as long as somebody uses it, and sleeps in one system call while there is nothing to do. Before it ends, it closes
what is open on its loop, whoever has forgotten that or had no time for it.
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

ENDED: Final = "the control thread has ended"
END_SECONDS: Final = 2.0  # for the thread to end, when the process does

T = TypeVar("T")
_making = threading.RLock()
_thread: ControlThread | None = None


@final
class ControlThread:
    """One thread and its loop; see :func:`control_thread`."""

    def __init__(self) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self._users = 0
        self._calling = threading.RLock()  # held for moments; a comm that is collected within them calls, too
        self._ended = False  # nothing is taken any more
        self._thread = threading.Thread(target=self._run, name="asynccomm control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(_finish())
            with self._calling:
                self._ended = True
            self.loop.run_until_complete(_finish())  # of what came until then
            self.loop.close()

    def acquire(self) -> None:
        """One more user."""
        self._users += 1

    def release(self) -> None:
        """One less; with the last one, the thread ends. From any thread."""
        global _thread
        with _making:
            self._users -= 1
            if self._users == 0:
                if _thread is self:
                    _thread = None
                self.loop.call_soon_threadsafe(self.loop.stop)

    def call(self, function: Callable[[], object]) -> bool:
        """Run ``function`` on the thread, soon; or now, if this is it. From any thread; False if it has ended."""
        if threading.get_ident() == self._thread.ident:  # current_thread() would keep a record of any foreign thread
            function()
            return True
        with self._calling:
            if self._ended:
                return False
            self.loop.call_soon_threadsafe(function)
        return True

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``coroutine`` on the thread. From any other thread. Cancelling the future cancels it.

        Raises: RuntimeError if the thread has ended; the future does if it ends meanwhile.
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
        """Wait until the thread has ended, a little."""
        self._thread.join(END_SECONDS)

    def end(self) -> None:
        """The process ends: no thread may run into that."""
        with _making:
            self._users = 0
            self.call(self.loop.stop)
        self._thread.join(END_SECONDS)


def _pass_on(found: Future[T], task: asyncio.Task[T]) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
        if task.cancelled():
            found.set_exception(RuntimeError(ENDED))
        elif (error := task.exception()) is not None:
            found.set_exception(error)
        else:
            found.set_result(task.result())


async def _finish() -> None:
    """Let the tasks that are left come to their end, and close what is open; nobody is let in meanwhile."""
    end_listening()
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # one may begin another as it ends
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await end_connections()


def control_thread() -> ControlThread:
    """The thread of this process, with one more user: call its ``release`` in the end."""
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


def _forget_in_child() -> None:
    global _thread, _making
    _thread, _making = None, threading.RLock()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_end_thread)
