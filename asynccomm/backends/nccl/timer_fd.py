"""A timerfd: an alarm for one sleeping thread, which other threads can set while it sleeps.

The timeouts of locks and sleeps fire 50 us late on Linux, and only the sleeping thread can set them. The calls keep the
GIL: to release it costs more, and would wake threads that wait for it.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from typing import final


@final
class TimerFd:
    """An alarm."""

    def __init__(self) -> None:
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = (ctypes.c_long * 4)()  # struct itimerspec: interval (2 words), seconds, nanoseconds
        self._address = ctypes.byref(self._spec)

    def set(self, seconds: float) -> None:
        """End the current or the next wait in ``seconds``; replaces the previous setting. One caller at a time."""
        spec = self._spec
        nanoseconds = 0 if seconds == math.inf else max(1, round(seconds * 1e9))  # 0: never
        spec[2], spec[3] = divmod(nanoseconds, 1_000_000_000)
        self._libc.timerfd_settime(self._fd, 0, self._address, None)

    def wait(self) -> None:
        """Sleep until the alarm fires."""
        os.read(self._fd, 8)

    def close(self) -> None:
        os.close(self._fd)
