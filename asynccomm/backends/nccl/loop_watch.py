"""Progress of the side channel while the event loop is blocked.

As a rule the event loop drives the side channel. A program may block its loop until kernels have run, as reading a
value from the device does. These kernels may stand behind a transfer or a collective in the hardware's queues, although
they lie on other streams, and the other rank may start its half only after a message of this rank. So while a loop does
not run, the Works of the side channel are completed without it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any, Final, final

from asynccomm.backends.nccl.poller import Poller
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Driver, Work
from asynccomm.errors import ClosedError

CHECK_SECONDS: Final = 50e-3  # a loop that does not run within this time counts as blocked

_log = logging.getLogger("asynccomm")


@final
class LoopWatch:
    """Completes Works in flight while the loop of ``mailbox`` does not run; the poller checks that. From any thread."""

    def __init__(self, poller: Poller[Any], mailbox: Mailbox) -> None:
        self._poller, self._mailbox = poller, mailbox
        self._lock = threading.Lock()
        self._works: dict[Work[Any], Driver] = {}
        self._checked = False  # whether the poller has a check
        self._asked = False  # whether the loop has been asked to run ``_answer``, and has not done so

    def add(self, work: Work[Any], driver: Driver) -> None:
        """Note a Work that was submitted now, and for which :meth:`remove` is called when it is over."""
        if work.done():
            return
        with self._lock:
            self._works[work] = driver
            begin, self._checked = not self._checked, True
        if work.done():  # only now, perhaps, and then ``remove`` may have been called too early
            self.remove(work)
        if begin:
            with contextlib.suppress(ClosedError):  # the comm has ended
                self._poller.ask(self._check, every=CHECK_SECONDS, first=CHECK_SECONDS)

    def remove(self, work: Work[Any]) -> None:
        """Forget a Work that is over."""
        with self._lock:
            self._works.pop(work, None)

    def _answer(self) -> None:
        self._asked = False

    def _check(self) -> bool:
        """Complete all Works if the loop has not run since the last check; returns whether to check again."""
        late: list[tuple[Work[Any], Driver]] = []
        with self._lock:
            if self._asked:
                late = list(self._works.items())
                self._works.clear()
            self._checked = again = bool(self._works)
        for work, driver in late:
            if work.done():  # by now
                continue
            try:
                driver.before_block(work)
            except Exception:
                _log.exception("could not complete %s without the event loop", work.op)
        if again:
            self._asked = True
            self._mailbox.post(self._answer)
        return again
