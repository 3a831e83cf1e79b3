"""Messages between ranks in one process, in place of gloo's."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

Key = tuple[int, int, int]  # source, destination, tag


class Network:
    """Hands messages over; a rank that is poisoned gets none any more."""

    def __init__(self) -> None:
        self._under_way: dict[Key, SimpleQueue[Tensor | None]] = {}
        self._lock = threading.Lock()  # both sides of a message may be the first that look for its queue
        self.sent: list[Key] = []

    def _queue(self, key: Key) -> SimpleQueue[Tensor | None]:
        with self._lock:
            return self._under_way.setdefault(key, SimpleQueue())

    def of(self, rank: int) -> Any:
        """The group as ``rank`` has it."""
        network = self

        class Group:
            def send(self, tensor: Tensor, peer: int, tag: int) -> _Sent:
                network.sent.append((rank, peer, tag))
                network._queue((rank, peer, tag)).put(tensor.clone())
                return _Sent()

            def recv(self, tensor: Tensor, peer: int, tag: int) -> _Coming:
                return _Coming(tensor, network._queue((peer, rank, tag)))

            def poison(self) -> None:
                for (_, receiver, _), messages in list(network._under_way.items()):
                    if receiver == rank:
                        messages.put(None)

        return Group()


class _Sent:
    def wait(self, seconds: float | None = None) -> None:
        pass


class _Coming:
    def __init__(self, tensor: Tensor, messages: SimpleQueue[Tensor | None]) -> None:
        self._tensor = tensor
        self._messages = messages

    def wait(self, seconds: float | None = None) -> None:
        try:
            message = self._messages.get(timeout=20 if seconds is None else seconds)
        except Empty:
            raise RuntimeError("timed out") from None
        if message is None:
            raise RuntimeError("closed")
        self._tensor[: len(message)].copy_(message)
