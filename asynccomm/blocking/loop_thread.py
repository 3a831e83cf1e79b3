"""The threads behind comms in programs without an event loop.

One thread runs the loop of all these comms, which connects the comms and keeps their deadlines. The thread exists as
long as such a comm, or a group of torch over one, does. Calls and waits of the program run on the caller's thread, not
on the loop's thread.

A callback that a program adds to a future of torch may block, and may wait for other futures. So separate threads
complete the futures, and their number grows as needed.

When the process ends with open comms, they are closed before the interpreter joins threads: some threads of a loop end
only with the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Final, Protocol, final

from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from asynccomm.core.thread_event import ThreadEvent

EXIT_SECONDS: Final = 5.0  # for operations in flight, when the process ends with a comm open
MOST_THREADS: Final = 4096  # completing futures; the pool starts a thread only if all others are busy


class ExitHandler(Protocol):
    """Object to close before the process ends."""

    def end_of_process(self) -> None: ...


def _new_loops() -> BlockingPortalProvider:
    return BlockingPortalProvider("asyncio", {"use_uvloop": find_spec("uvloop") is not None})


_loops = _new_loops()
_portal_loops: weakref.WeakKeyDictionary[BlockingPortal, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()
_left_behind: list[BlockingPortalProvider] = []
_making = threading.Lock()
_completing: ThreadPoolExecutor | None = None
_open: weakref.WeakSet[ExitHandler] = weakref.WeakSet()


def loops() -> BlockingPortalProvider:
    """Context manager that gives a portal to the loop; the loop ends when all users have left the context."""
    return _loops


def lease() -> BlockingPortal:
    """Enter ``loops()`` on a thread of its own, where no signal arrives: to be left by ``loops().__exit__``.

    Not on the loop's thread. An exception of a signal's handler, such as KeyboardInterrupt, ends the wait, and the
    thread leaves the context.
    """
    taken = _Lease(_loops)
    try:
        _start(taken.enter)
        return taken.portal()
    except BaseException:
        taken.abandon()
        raise


def _start(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function, name="asynccomm lease", daemon=True)
    try:
        thread.start()
    except RuntimeError as exc:
        signalled = exc.__context__
        if signalled is None or isinstance(signalled, Exception):
            raise  # the process cannot have more threads
        raise signalled from None  # ``start`` waits for a ``threading.Event``: see ``ThreadEvent``


@final
class _Lease:
    def __init__(self, provider: BlockingPortalProvider) -> None:
        self._provider = provider
        self._over = ThreadEvent()
        self._lock = threading.Lock()
        self._portal: BlockingPortal | None = None
        self._error: BaseException | None = None
        self._abandoned = False

    def enter(self) -> None:
        try:
            portal = self._provider.__enter__()
            loop_of(portal)
        except BaseException as exc:
            self._error = exc
        else:
            with self._lock:
                self._portal = portal
                abandoned = self._abandoned
            if abandoned:
                self._leave()
        self._over.set()

    def portal(self) -> BlockingPortal:
        self._over.wait(math.inf)
        error, self._error = self._error, None
        if error is not None:
            raise error
        assert self._portal is not None
        return self._portal

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            entered = self._portal is not None
        if entered:  # the exit joins the loop's thread
            _start(self._leave)

    def _leave(self) -> None:
        self._provider.__exit__(None, None, None)


def loop_of(portal: BlockingPortal) -> asyncio.AbstractEventLoop:
    """The loop behind a portal. Blocks for a hand-over to the loop's thread, once for each portal."""
    loop = _portal_loops.get(portal)
    if loop is None:
        loop = _portal_loops[portal] = portal.call(asyncio.get_running_loop)
    return loop


def on_a_thread(call: Callable[[], object]) -> None:
    """Run ``call`` on a thread of the pool, where it may block."""
    global _completing
    with _making:
        if _completing is None:
            _completing = ThreadPoolExecutor(MOST_THREADS, "asynccomm future")
        pool = _completing
    try:
        pool.submit(call)
    except RuntimeError:  # the process is ending
        call()


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Hide this thread's running loop, for calls that block also in a coroutine, or belong to another loop."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


def at_exit(who: ExitHandler) -> None:
    """Call ``who.end_of_process()`` when the process ends, if the object still exists."""
    _open.add(who)


def _end_all() -> None:
    for who in list(_open):
        who.end_of_process()


def _renew_in_child() -> None:
    global _loops, _making, _completing
    _left_behind.append(_loops)  # its collection would wait for a thread that the child lacks
    _loops, _making, _completing = _new_loops(), threading.Lock(), None
    _open.clear()


os.register_at_fork(after_in_child=_renew_in_child)
# atexit runs after all non-daemon threads were joined; this hook runs before, as that of concurrent.futures
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
