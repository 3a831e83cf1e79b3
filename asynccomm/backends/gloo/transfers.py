"""One operation as several of gloo's.

The transfers of one line are run by a gloo group with a single thread: it takes them in order, and calls back between
one and the next. So a line can do with one piece of staging memory: each transfer empties it when it is done, and then
fills it for the next. Nothing of that happens in the call, but for the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

from asynccomm.backends.gloo.staging import Finish


class Transfer(NamedTuple):
    """One operation of gloo's."""

    start: Callable[[], Any]  #: hands it to gloo; returns gloo's work
    finish: Finish | None = None  #: what is to be done when it is over
    fill: Finish | None = None  #: what is to be done just before; only for those that gloo runs one after the other


def run(lines: Sequence[Sequence[Transfer]], settle: Callable[[], object], fail: Callable[[Exception], object]) -> None:
    """Start all transfers. Calls ``settle`` when all are done, or ``fail`` at once with the first failure."""
    countdown = _Latch(sum([len(line) for line in lines]), settle, fail)
    for line in lines:
        if line[0].fill is not None:
            line[0].fill()
        for i, transfer in enumerate(line):
            fill = line[i + 1].fill if i + 1 < len(line) else None
            # if it is done already the rest is done here, and so before the next is started, too
            transfer.start().get_future().add_done_callback(partial(countdown.done, transfer.finish, fill))


@final
class _Latch:
    def __init__(self, count: int, settle: Callable[[], object], fail: Callable[[Exception], object]) -> None:
        self._left = count
        self._settle = settle
        self._fail = fail
        self._failed = False
        self._lock = threading.Lock()

    def done(self, finish: Finish | None, fill: Finish | None, future: Any) -> None:
        """A transfer is over; ``fill`` is the next one's. On gloo's thread."""
        try:
            future.value()
            if finish is not None:
                finish()
            if fill is not None:
                fill()
        except Exception as exc:
            with self._lock:
                first, self._failed = not self._failed, True
            if first:
                self._fail(exc)
            return
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:  # never, if one has failed
            self._settle()
