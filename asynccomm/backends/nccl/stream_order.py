"""A batch on its way through a stream: what its Works are ordered by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

import torch

from asynccomm.backends.nccl.device import Device, Event

_lock = threading.Lock()  # held for some assignments; one for all flights, because a lock each would cost more


@final
class StreamPosition:
    """Queued on the host, then issued to a stream, then passed.

    Args:
        device: whose stream it is.
        immediate: it is issued without anything that peers or the event loop would have to do first, as a rule.
    """

    __slots__ = ("_device", "_event", "_listeners", "_over", "_users", "captured", "immediate", "issued")

    def __init__(self, device: Device, *, immediate: bool = True) -> None:
        self._device = device
        self._event: Event | None = None
        self._users = 0  # threads that are having a stream wait for the event: it is not given back under them
        self._over = False
        self._listeners: list[Callable[[], object]] = []
        self.immediate = immediate
        self.issued = False  #: whether a stream can be ordered after it, or it is over
        self.captured = False  #: it became part of a graph, and runs whenever that is replayed

    @property
    def over(self) -> bool:
        """Whether it has passed, or never will."""
        return self._over

    def issue(self, event: Event, *, captured: bool = False) -> None:
        """It is in a stream, up to ``event``, which is the flight's from now on."""
        with _lock:
            self.captured = captured
            self._event = event
        if self._over:
            self._release()
        self._tell()

    def pass_(self) -> None:
        """It has passed, or never will."""
        if self.captured:
            return
        with _lock:
            self._over = True
        self._release()
        self._tell()

    def _release(self) -> None:
        with _lock:
            event = None
            if self._over and not self._users and not self.captured:
                event, self._event = self._event, None
        if event is not None:
            self._device.release(event)

    def _tell(self) -> None:
        self.issued = True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def listen(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` once it is issued or over, from any thread; maybe at once, maybe twice."""
        self._listeners.append(listener)
        if self.issued:
            listener()

    def order(self, stream: torch.cuda.Stream | None) -> None:
        """Order ``stream``, or else the current one, after it. It is issued."""
        with _lock:
            event = None if self._over else self._event
            self._users += 1
        try:
            if event is not None:
                after = self._device.current_stream() if stream is None else self._device.wrap(stream)
                after.wait(event)
        finally:
            with _lock:
                self._users -= 1
            self._release()
