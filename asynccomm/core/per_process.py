"""Objects of which each process has one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class PerProcess(Generic[T]):
    """An object that is made when it is first needed, once per process; a forked child makes its own. For any thread.

    Args:
        make: makes the object.
        forget: called in a forked child with the object of the parent, if there is one.
    """

    def __init__(self, make: Callable[[], T], forget: Callable[[T], object] | None = None) -> None:
        self.made: T | None = None  #: the object, if it is made
        self._make = make
        self._forget = forget
        self._making = threading.Lock()
        os.register_at_fork(after_in_child=self._renew_in_child)

    def __call__(self) -> T:
        """The object of this process."""
        with self._making:
            if self.made is None:
                self.made = self._make()
            return self.made

    def _renew_in_child(self) -> None:
        made, self.made = self.made, None
        self._making = threading.Lock()  # a thread of the parent may have held the old one
        if made is not None and self._forget is not None:
            self._forget(made)
