"""The position of a batch in a stream; orders other streams after the batch's Works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

import torch

from asynccomm.backends.nccl.device import Device, Event

_lock = threading.Lock()  # for a few assignments; shared by all positions, because a lock each would cost more


@final
class StreamPosition:
    """The progress of a batch: queued on the host, then issued to a stream, then passed.

    Args:
        device: the device of the stream.
        immediate: whether the batch is issued, as a rule, without waiting for peers or the event loop.
    """

    __slots__ = ("_device", "_event", "_listeners", "_over", "_users", "captured", "immediate", "issued")

    def __init__(self, device: Device, *, immediate: bool = True) -> None:
        self._device = device
        self._event: Event | None = None
        self._users = 0  # threads in the middle of ``order``: their event must not be released
        self._over = False
        self._listeners: list[Callable[[], object]] = []
        self.immediate: bool = immediate
        self.issued: bool = False  #: whether the batch is in a stream, or over
        self.captured: bool = False  #: whether the batch is part of a graph, and runs in each replay

    @property
    def over(self) -> bool:
        """Whether the batch has passed, or never will."""
        return self._over

    def issue(self, event: Event, *, captured: bool = False) -> None:
        """Mark the batch as issued to a stream, up to ``event``, which the position owns from now on."""
        with _lock:
            self.captured = captured
            self._event = event
        if self._over:
            self._release()
        self._tell()

    def pass_(self) -> None:
        """Mark the batch as over: it has passed, or never will."""
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
        """Call ``listener`` once the batch is issued or over. On any thread; maybe at once, maybe twice."""
        self._listeners.append(listener)
        if self.issued:
            listener()

    def order(self, stream: torch.cuda.Stream | None) -> None:
        """Order ``stream``, or else the current stream, after the batch, which must be issued."""
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
