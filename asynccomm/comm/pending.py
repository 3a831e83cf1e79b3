"""The awaitable and context manager that new_comm() and split() return."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, TypeVar, final

from asynccomm.core.handles import Handle

C = TypeVar("C")  # Comm, or Comm | None for calls that may make no comm on this rank


@final
class PendingComm(Handle, Generic[C]):
    """A comm in the making: ``await`` it, or use ``async with``, which closes the comm. May give None: no comm."""

    _instead = "call the function that made it there"

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, C]]) -> None:
        """Not for users: see ``asynccomm.new_comm`` and ``Comm.split``."""
        self._connect = connect
        self._comm: C | None = None

    def __await__(self) -> Generator[Any, None, C]:
        return self._connect().__await__()

    async def __aenter__(self) -> C:
        comm = self._comm = await self._connect()
        return comm

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        comm: Any = self._comm
        if comm is not None:
            await comm.__aexit__(kind, exc, traceback)
