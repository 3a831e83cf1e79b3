"""The blocking form of a window."""

from __future__ import annotations

from typing import Any, final

from asynccomm.blocking.portal import Portal
from asynccomm.blocking.twins import Twin, here
from asynccomm.core.handles import Handle
from asynccomm.windows.window import Window


@final
class BlockingWindow(Handle, Twin[Window]):
    """A window for programs without an event loop; made by ``BlockingComm.window``.

    The methods are those of :class:`asynccomm.Window`, from any thread; ``wait()`` of their Works blocks. ``with``
    closes the window, as does ``close``: collectively, unless the body has raised or the comm has broken.
    """

    _instead = "make one there, by comm.window()"

    def __init__(self, window: Window, portal: Portal) -> None:
        """Not for users: see ``BlockingComm.window``."""
        self._hold(window, portal)

    async def _leave_last(self) -> None:
        await self._leave(SystemExit())  # the other ranks may be alive for long: wait for none

    @property
    def window(self) -> Window:
        """The awaitable window, for functions that take one; its loop runs in a thread."""
        return self._original

    @property
    def rank(self) -> int:
        """See :attr:`asynccomm.Window.rank`."""
        return self._original.rank

    @property
    def size(self) -> int:
        """See :attr:`asynccomm.Window.size`."""
        return self._original.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """See :attr:`asynccomm.Window.sizes`."""
        return self._original.sizes

    @property
    def signals(self) -> int:
        """See :attr:`asynccomm.Window.signals`."""
        return self._original.signals

    @here(Window.get_size)
    def get_size(self) -> Any: ...

    @here(Window.can_map)
    def can_map(self) -> Any: ...

    @here(Window.tensor)
    def tensor(self) -> Any: ...

    @here(Window.put)
    def put(self) -> Any: ...

    @here(Window.get)
    def get(self) -> Any: ...

    @here(Window.accumulate)
    def accumulate(self) -> Any: ...

    @here(Window.signal)
    def signal(self) -> Any: ...

    @here(Window.wait_signal)
    def wait_signal(self) -> Any: ...

    @here(Window.signal_value)
    def signal_value(self) -> Any: ...

    @here(Window.fence)
    def fence(self) -> Any: ...

    def __repr__(self) -> str:
        return f"<BlockingWindow of {self._original!r}>"
