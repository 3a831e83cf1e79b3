"""The handle of an operation, with torchcomms' methods; in a coroutine it is awaited."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, final

import torch

from asynccomm.blocking.portal import awaited
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work


@final
class TorchWork(Handle):
    """Handle of one operation; ``await`` it on any loop, or ``wait()`` without a loop.

    Awaiting gives the output, where torchcomms has none. Cancelling abandons the wait alone.
    """

    _instead = "wait for it here, and send its output there"
    __slots__ = ("_waited_for", "_work")

    def __init__(self, work: Work[Any]) -> None:
        """Not for users: methods of TorchComm return it."""
        self._work = work
        self._waited_for: Callable[[], object] | None = None  # a hook's, called at the first wait

    def _waits(self) -> None:
        called, self._waited_for = self._waited_for, None
        if called is not None:
            called()

    def __await__(self) -> Generator[Any, None, Any]:
        self._waits()
        return awaited(self._work).__await__()

    def is_completed(self) -> bool:
        """Whether the operation has succeeded or failed."""
        return self._work.done()

    def wait(self) -> None:
        """On a GPU, let the current stream wait; else block the thread until the operation is done.

        Raises: the error of the operation; WouldBlockError on the CPU in a coroutine.
        """
        self._waits()
        self._work.wait()

    def wait_blocking(self) -> None:
        """Block the thread until the host may read the output. Raises: as :meth:`wait`."""
        self.wait()
        if self._work.order is not None:
            torch.cuda.current_stream().synchronize()

    def __repr__(self) -> str:
        return repr(self._work)
