"""A place in the streams of a GPU that is none, for tests of what waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STREAM: Any = "stream"


class Place:
    """An Order: a place in the streams of a GPU, which takes notes."""

    def __init__(self, *, issued: bool = False, immediate: bool = True) -> None:
        self.issued = issued
        self.immediate = immediate
        self.listeners: list[Callable[[], object]] = []
        self.ordered: list[Any] = []  # streams

    def listen(self, listener: Callable[[], object]) -> None:
        self.listeners.append(listener)
        if self.issued:
            listener()

    def issue(self) -> None:
        self.issued = True
        for listener in self.listeners:
            listener()

    def order(self, stream: Any) -> None:
        assert self.issued
        self.ordered.append(stream)
