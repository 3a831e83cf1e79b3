"""Progress of the side channel while the event loop is blocked.

As a rule the event loop drives the side channel. A program may block its loop until kernels have run, as reading a
value from the device does. These kernels may stand behind a transfer or a collective in the hardware's queues, although
they lie on other streams, and the other rank may start its half only after a message of this rank. So Works of the side
channel that take long are completed without the event loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, final

from asynccomm.backends.nccl.poller import Poller
from asynccomm.core.work import Driver, Work

OVERDUE_SECONDS: Final = 5e-3  # a loop that is not blocked is back sooner, as a rule


@final
class OverdueWorks:
    """The Works in flight, and a check by the poller for those older than OVERDUE_SECONDS. From any thread.

    Args:
        clock: seconds; for tests.
    """

    def __init__(self, poller: Poller[Any], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._poller = poller
        self._clock = clock
        self._lock = threading.Lock()
        self._works: dict[Work[Any], tuple[Driver, float]] = {}  # with the time of the submission; oldest first
        self._checked = False

    def add(self, work: Work[Any], driver: Driver) -> None:
        """Note a Work that was submitted now. Raises: ClosedError, see ``Poller.ask``."""
        with self._lock:
            self._works[work] = driver, self._clock()
            if self._checked:
                return
            self._checked = True
        self._poller.ask(self._check, every=OVERDUE_SECONDS, first=OVERDUE_SECONDS)

    def remove(self, work: Work[Any]) -> None:
        """Forget a Work that is over."""
        with self._lock:
            self._works.pop(work, None)

    def _check(self) -> bool:
        """Complete the overdue Works; returns whether to check again."""
        latest = self._clock() - OVERDUE_SECONDS
        with self._lock:
            overdue = []
            for work, (driver, since) in self._works.items():
                if since > latest:
                    break
                overdue.append((work, driver))
            for work, _ in overdue:
                del self._works[work]
            self._checked = bool(self._works)
            checked = self._checked
        for work, driver in overdue:
            if not work.done():  # one may have ended before it was added
                driver.before_block(work)
        return checked
