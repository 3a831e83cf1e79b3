"""Handles: objects that stand for something live, such as connections, operations in flight, or other ranks' turns.

A second handle would end or repeat the operation of the first. A handle is therefore never duplicated: its copy is the
handle itself, also inside a larger object that is copied (a model that holds a comm, say), and pickling raises an
error.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self


class Handle:
    """Base of objects that are never copied."""

    __slots__ = ()
    _instead: ClassVar[str]  # the alternative to pickling, for the error

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled, as it belongs to this process: {self._instead}")
