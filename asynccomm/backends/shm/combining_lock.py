"""The lock that decides which thread drives the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, final

Acquire = tuple[tuple[Any], ...]  #: the columns of arguments of an acquisition: (blocking) or (blocking, timeout)
AT_ONCE: Final[Acquire] = ((False,),)
ANY_TIME: Final[Acquire] = ((True,),)


def within(seconds: float) -> Acquire:
    """Acquire the lock within this time."""
    return (True,), (seconds,)


@final
class CombiningLock:
    """A lock; its holder also serves the threads that find it taken (flat combining, Hendler et al., SPAA 2010).

    A thread that fails to take the lock leaves a request and returns. The holder rechecks for requests after it has
    released the lock, so no request is lost. The lock refers to no function of its owner: a cycle would keep the owner
    alive until the next garbage collection.
    """

    def __init__(self) -> None:
        self.requested: bool = False  #: a request has arrived since the holder last checked
        self._lock = threading.Lock()
        self.locked = self._lock.locked

    def run(
        self,
        allowed: Callable[[], bool],
        serve: Callable[..., object],
        take: Callable[[], tuple[Any, ...]],
        finish: Callable[..., object],
        *args: Any,
    ) -> bool:
        """Serve a request on this thread, or leave it to the thread that holds the lock; returns whether it ran here.

        Args:
            allowed: whether requests may be served now; if not, the request stays.
            serve, take, finish, args: as of ``hold``.
        """
        self.requested = True
        ran = False
        while self.requested and allowed() and self.hold(AT_ONCE, serve, take, finish, *args):
            ran = True
        return ran

    def hold(
        self,
        acquire: Acquire,
        serve: Callable[..., object],
        take: Callable[[], tuple[Any, ...]],
        finish: Callable[..., object],
        *args: Any,
    ) -> bool:
        """Serve all requests so far with the lock held; False if it was not acquired.

        An exception of a signal's handler, such as KeyboardInterrupt, may come in every call from Python, but leaves
        the lock released: the interpreter looks for signals when a call returns, when a function begins and when a loop
        goes back, and so neither between the acquisition and the note of it nor before a release that comes first.

        Args:
            acquire: AT_ONCE, ANY_TIME, or within(seconds).
            serve: called with ``args``.
            take: called before the release, also after an exception; returns the arguments of ``finish``.
            finish: called after the release.
        """
        taken: list[bool] = []
        try:
            taken.extend(map(self._lock.acquire, *acquire))
            if taken[0]:
                self.requested = False
                serve(*args)
        finally:
            if True in taken:
                try:
                    results = take()
                finally:
                    self._lock.release()
                finish(*results)
        return taken[0]
