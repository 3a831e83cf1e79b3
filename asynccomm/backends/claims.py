"""The claim to a receive from any source that several backends share.

The receive is posted in the queues of each of the backends. The first that has a message for it takes the claim, and
that message is the one received. The others drop their copy of the receive: when they come upon it, or when they are
told to.
"""

from __future__ import annotations

import threading
from typing import final


@final
class Claim:
    """The claim to one receive. All methods may be called from any thread.

    Args:
        backends: the number of backends that the receive is posted in.
    """

    __slots__ = ("_left", "_lock", "winner")

    def __init__(self, backends: int) -> None:
        self.winner: object = None  #: the copy of the receive that has a message
        self._left = backends
        self._lock = threading.Lock()

    def take(self, receive: object) -> bool:
        """Take the claim for ``receive``, the copy of one backend. Returns whether no other backend was faster."""
        with self._lock:
            if self.winner is not None:
                return False
            self.winner = receive
            return True

    def give_up(self) -> bool:
        """Note that a backend will never have a message. Returns whether that holds for all: the receive fails."""
        with self._lock:
            self._left -= 1
            return self.winner is None and not self._left
