"""One operation as several gloo operations.

A gloo group with a single thread runs the transfers of a chain: it runs them in order, and calls back between two of
them. One piece of staging memory is therefore enough for a chain: each transfer empties it when it is done, and then
fills it for the next. Only the first transfer is filled in the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

from asynccomm.backends.gloo.staging import Finish


class Transfer(NamedTuple):
    """One gloo operation."""

    start: Callable[[], Any]  #: hands it to gloo; returns gloo's work
    finish: Finish | None = None  #: the step after the operation
    fill: Finish | None = None  #: the step right before; only for transfers that gloo runs one after the other


def run(lines: Sequence[Sequence[Transfer]], settle: Callable[[], object], fail: Callable[[Exception], object]) -> None:
    """Start all transfers. Calls ``settle`` when all are done, or ``fail`` at once with the first failure."""
    countdown = _Latch(sum([len(line) for line in lines]), settle, fail)
    for line in lines:
        if line[0].fill is not None:
            line[0].fill()
        for i, transfer in enumerate(line):
            fill = line[i + 1].fill if i + 1 < len(line) else None
            # if the transfer is done already, the callback runs here, and so still before the next transfer starts
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
        """Finish a transfer that is over, and fill the next with ``fill``. On gloo's thread."""
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
        if last:  # never, if a transfer has failed
            self._settle()
