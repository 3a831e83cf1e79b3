"""The threads behind the groups of torch, whose programs have no event loop.

One thread runs the loop that the comms of all groups live on: they connect there, and it keeps their deadlines. It is
there as long as a group is. What a program calls does not go through it: calls and waits are made on the caller's
thread.

What torch's users hang on a future may block, and may wait for other futures there. So futures are completed on
threads that do nothing else, as many as it takes.

When the process ends with groups open, they are closed before the interpreter waits for threads: some of those that a
loop has end only with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Final, Protocol

from anyio.from_thread import BlockingPortalProvider

MOST_THREADS: Final = 4096  # that complete futures at once; one is only started when all others are busy


class ExitHandler(Protocol):
    """Who has something to end before the process does."""

    def end_of_process(self) -> None: ...


def _new_loops() -> BlockingPortalProvider:
    return BlockingPortalProvider("asyncio", {"use_uvloop": find_spec("uvloop") is not None})


_loops = _new_loops()
_left_behind: list[BlockingPortalProvider] = []
_making = threading.Lock()
_completing: ThreadPoolExecutor | None = None
_open: weakref.WeakSet[ExitHandler] = weakref.WeakSet()


def loops() -> BlockingPortalProvider:
    """Enter it for a portal to the loop; the loop ends when as many have left as have entered."""
    return _loops


def on_a_thread(call: Callable[[], object]) -> None:
    """Run ``call`` on a thread that may block."""
    global _completing
    with _making:
        if _completing is None:
            _completing = ThreadPoolExecutor(MOST_THREADS, "asynccomm future")
        pool = _completing
    try:
        pool.submit(call)
    except RuntimeError:  # the process is about to end
        call()


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Be on a thread without a running loop: what torch calls blocks, whoever calls it."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


def at_exit(who: ExitHandler) -> None:
    """Have ``who.end_of_process()`` called, if it is still there when the process ends."""
    _open.add(who)


def _end_all() -> None:
    for who in list(_open):
        who.end_of_process()


def _renew_in_child() -> None:
    global _loops, _making, _completing
    _left_behind.append(_loops)  # it would wait for its thread, which is not here, if it were collected
    _loops, _making, _completing = _new_loops(), threading.Lock(), None
    _open.clear()


os.register_at_fork(after_in_child=_renew_in_child)
# what atexit calls comes after all threads but the daemons were waited for; this is where concurrent.futures is called
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
