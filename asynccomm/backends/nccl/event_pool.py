"""A pool of CUDA events to reuse: creating an event costs more than recording it.

An event may be given back once no thread will query it and no stream will be made to wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar, final

POOLED: Final = 256  # most events in a pool

E = TypeVar("E")


@final
class EventPool(Generic[E]):
    """The unused events of a device. From any thread.

    Args:
        make: creates an event.
        limit: number of events kept; others are dropped.
    """

    def __init__(self, make: Callable[[], E], limit: int = POOLED) -> None:
        self._make = make
        self._free: deque[E] = deque(maxlen=limit)

    def take(self) -> E:
        """An unused event."""
        try:
            return self._free.pop()  # the latest: the driver's data of it is still in the CPU's cache
        except IndexError:
            return self._make()

    def give(self, event: E) -> None:
        """Put ``event`` back."""
        self._free.append(event)
