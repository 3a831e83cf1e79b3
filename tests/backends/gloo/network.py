"""Messages between ranks in one process, in place of gloo's."""

from __future__ import annotations

from collections import defaultdict
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

Key = tuple[int, int, int]  # source, destination, tag


class Network:
    """Hands messages over; a rank that is poisoned gets none any more."""

    def __init__(self) -> None:
        self._under_way: defaultdict[Key, SimpleQueue[Tensor | None]] = defaultdict(SimpleQueue)
        self.sent: list[Key] = []

    def of(self, rank: int) -> Any:
        """The group as ``rank`` has it."""
        network = self

        class Group:
            def send(self, tensor: Tensor, peer: int, tag: int) -> _Sent:
                network.sent.append((rank, peer, tag))
                network._under_way[rank, peer, tag].put(tensor.clone())
                return _Sent()

            def recv(self, tensor: Tensor, peer: int, tag: int) -> _Coming:
                return _Coming(tensor, network._under_way[peer, rank, tag])

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
