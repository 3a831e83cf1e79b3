"""Handles: objects that stand for something live, such as connections, operations in flight, or other ranks' turns.

A second one would end or repeat what the first one does. So a handle is passed around, and stays one: its copies are
itself, also within something larger that is copied (a model that holds a comm, say), and it cannot be pickled.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self


class Handle:
    """What is never copied."""

    __slots__ = ()
    _instead: ClassVar[str]  # of pickling: what to do, for the error

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled, as it belongs to this process: {self._instead}")
