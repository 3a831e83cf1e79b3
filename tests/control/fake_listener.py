"""A listener with all that happens at it, and those who come to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asynccomm.control.transport import connection as connection_module
from asynccomm.control.transport import listener as listener_module
from asynccomm.control.transport.connection import Connection, Look, Tokens, connect
from asynccomm.control.transport.listener import Listener
from asynccomm.control.transport.schema import JsonObject
from asynccomm.control.transport.sockets import local_socket, tcp_socket
from asynccomm.control.transport.topology import RankAddress

from .unauthenticated import descriptors, until

TOKENS = Tokens("ask", "answer")


class Door:
    """A listener, and what happened at it."""

    def __init__(self) -> None:
        self.problem = ""
        self.welcomed: list[tuple[Any, Connection]] = []
        self.received: list[JsonObject] = []
        self.ended: list[str] = []
        self.looks: list[Look] = []
        self.first: list[JsonObject] = []  # what is sent with the welcome
        self.listener = Listener(TOKENS, lambda who: self.problem, self._welcome, self._look)
        self.contact = RankAddress(0, "here", os.getpid())

    def _welcome(self, who: Any, connection: Connection) -> None:
        connection.received = lambda _, message: self.received.append(message)
        connection.ended = lambda _, how: self.ended.append(how)
        self.welcomed.append((who, connection))
        for message in self.first:
            connection.send(message)

    def _look(self, connection: Connection, look: Look) -> None:
        self.looks.append(look)
        connection.send({"seen": True})
        connection.close()

    async def open(self, family: str) -> Door:
        if family == "local":
            name = f"asynccomm/test/{os.getpid()}/{secrets.token_hex(8)}"
            sock = local_socket(name)
            assert sock is not None
            self.contact = RankAddress(0, "here", os.getpid(), name)
        else:
            sock = tcp_socket("127.0.0.1")
            self.contact = RankAddress(0, "here", os.getpid(), "", "127.0.0.1", sock.getsockname()[1])
        self.listener.listen(sock)
        return self


class Guest:
    """One that connects."""

    def __init__(self) -> None:
        self.received: list[JsonObject] = []
        self.ended: list[str] = []

    async def connect(self, contact: RankAddress, tokens: Tokens = TOKENS, who: Any = 7) -> Connection:
        return await connect(
            contact,
            True,
            tokens,
            who,
            lambda _, message: self.received.append(message),
            lambda _, how: self.ended.append(how),
        )


@asynccontextmanager
async def opened(family: str) -> AsyncIterator[Door]:
    """A door that leaves nothing behind."""
    held = descriptors()
    one = await Door().open(family)
    yield one
    one.listener.close()
    for _, connection in one.welcomed:
        connection.close()
    await until(lambda: descriptors() <= held, "all descriptors closed")
    assert not connection_module._open
    assert not listener_module._listening


async def stranger(door: Door) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if door.contact.local:
        return await asyncio.open_unix_connection(f"\0{door.contact.local}")
    return await asyncio.open_connection("127.0.0.1", door.contact.port)


async def refused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """It ends, and nothing was said."""
    data = b""
    with contextlib.suppress(ConnectionError):
        data = await reader.read()
    assert data == b""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
