"""Clients of TCPStore servers, shared by the comms of one event loop: a rank needs one for each server.

A client that has lost its server is not handed out again. Comms that connect at the same time may each make a client of
their own.
"""

from __future__ import annotations

import asyncio
from typing import final
from weakref import WeakValueDictionary

from asynccomm.store.client import StoreClient

_Place = tuple[asyncio.AbstractEventLoop, str, int, float, object]
_shared: WeakValueDictionary[_Place, SharedClient] = WeakValueDictionary()


@final
class SharedClient:
    """A client, and the number of its users."""

    def __init__(self, client: StoreClient, place: _Place) -> None:
        self.client = client
        self._place = place
        self._users = 1

    @classmethod
    async def connect(cls, host: str, port: int, timeout: float, server: object = None) -> SharedClient:
        """The client of another user, or else a new one. Cancelling is safe.

        Args:
            host, port: the server's address.
            timeout: seconds, for connecting, and that ``get`` and ``wait`` allow by default.
            server: the server, if it is one of this process; an earlier one may have had the address.

        Raises: the errors of ``StoreClient.connect``.
        """
        place = asyncio.get_running_loop(), host, port, timeout, server
        found = _shared.get(place)
        if found is not None and found.client.usable:
            found._users += 1
            return found
        made = cls(await StoreClient.connect(host, port, timeout=timeout), place)
        _shared[place] = made
        return made

    async def release(self) -> None:
        """Give the client up, once for each ``connect``; the last user closes it."""
        self._users -= 1
        if self._users == 0:
            if _shared.get(self._place) is self:
                del _shared[self._place]
            await self.client.aclose()
