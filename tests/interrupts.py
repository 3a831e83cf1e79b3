"""Signals that arrive while code runs, as Ctrl-C does."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable

MOST_CALLS = 20_000  # an end, as a finalizer may be interrupted, whose exceptions are ignored


class Interrupt(BaseException):
    """Of a signal's handler."""


def interrupted(times: int, call: Callable[[], object], check: Callable[[], object]) -> None:
    """Repeat ``call`` until a signal interrupts it at a random place, then ``check``; all that so many ``times``."""
    choose = random.Random(0)
    interrupts = 0

    def interrupt(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(times):
            with contextlib.suppress(Interrupt):
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-6, 1e-4))
                for _ in range(MOST_CALLS):
                    call()
            check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > times / 2
