"""Messages that inform all ranks that one of them did not call the predicted collective.

The ranks form a ring, and each rank forwards an alarm to the next rank, once. Every rank therefore has a single message
to wait for, whatever the number of ranks: a thread waits for it, from the first prediction on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final, final

import torch

from asynccomm.backends.gloo.torch_gloo import ALARM_TAG, GlooGroup
from asynccomm.backends.ordered_executor import OrderedExecutor

REMEMBERED: Final = 1024  # places whose alarm this rank has forwarded


@final
class Alarms:
    """The alarms of one rank.

    Args:
        gloo: a group on which no other message uses ``ALARM_TAG``.
        name: prefix of the threads' names.
        size: at least 2.
        raised: called with the place of a collective, on a thread.
    """

    def __init__(self, gloo: GlooGroup, name: str, rank: int, size: int, raised: Callable[[int], object]) -> None:
        self._gloo: GlooGroup | None = gloo
        self._name = name
        self._previous = (rank - 1) % size
        self._next = (rank + 1) % size
        self._raised = raised
        self._lock = threading.Lock()
        self._passed_on: dict[int, None] = {}  # oldest first
        self._sending = OrderedExecutor(f"{name}-alarms", 1)
        self._listener: threading.Thread | None = None

    def listen(self) -> None:
        """Receive alarms from now on. A second call does nothing."""
        with self._lock:
            gloo = self._gloo
            if self._listener is None and gloo is not None:
                self._listener = threading.Thread(
                    target=self._listen, args=[gloo], name=f"{self._name}-listener", daemon=True
                )
                self._listener.start()

    def tell(self, place: int) -> None:
        """Raise an alarm, or forward it. Raises: RuntimeError if the group is broken."""
        with self._lock:
            if place in self._passed_on or self._gloo is None:
                return
            self._passed_on[place] = None
            if len(self._passed_on) > REMEMBERED:
                del self._passed_on[next(iter(self._passed_on))]
            text = torch.tensor([place], device="cpu").view(torch.uint8)
            message = self._gloo.send(text, self._next, ALARM_TAG)

        def wait() -> None:
            with contextlib.suppress(RuntimeError):
                message.wait()

        self._sending.put("alarms", wait)

    def close(self, timeout: float) -> None:
        """End the threads, in at most ``timeout`` seconds each; breaks the group if ``listen`` was called."""
        with self._lock:
            gloo, self._gloo = self._gloo, None
        if self._listener is not None and gloo is not None:
            gloo.poison()
            self._listener.join(timeout)
        self._sending.join(timeout)
        self._sending.end()

    def _listen(self, gloo: GlooGroup) -> None:
        text = torch.zeros(8, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError):  # the group is broken
            while True:
                gloo.recv(text, self._previous, ALARM_TAG).wait()
                place = int(text.view(torch.int64).item())
                self.tell(place)
                self._raised(place)
