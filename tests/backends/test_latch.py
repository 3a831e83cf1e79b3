"""The last of several events."""

from __future__ import annotations

import threading

from asynccomm import BackendError
from asynccomm.backends.latch import Latch
from asynccomm.errors import AsyncCommError


def test_countdown() -> None:
    ends: list[AsyncCommError | None] = []
    countdown = Latch(3, ends.append)
    first, second = BackendError("first"), BackendError("second")
    for error in (None, first):
        countdown(error)
        assert not ends
    countdown(second)
    assert ends == [first]
    count = 400
    countdown = Latch(count, ends.append)

    def many() -> None:
        for _ in range(count // 8):
            countdown(None)

    threads = [threading.Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [first, None]
