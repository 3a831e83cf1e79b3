"""Servers to test against: torch's two real ones, and fake ones that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from torch import distributed as dist

from asynccomm.store.client import StoreClient
from asynccomm.store.server import listen

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Fake:
    """A server whose connections are handled by ``handler``; counts them."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections = 0
        self.port = 0
        self.flowing = asyncio.Event()  # not set: the server is stopped, if ``handler`` looks at this
        self.flowing.set()
        self.chunks: list[bytes] = []  # what clients wrote, if ``handler`` keeps it
        self.errors: list[BaseException] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            await self.handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client left, or the test ended
        except Exception as exc:
            self.errors.append(exc)
        finally:
            writer.close()

    def cut(self) -> None:
        """Drop all connections."""
        for writer in self._writers:
            writer.transport.abort()


@pytest.fixture(params=[True, False], ids=["libuv", "legacy"])
def use_libuv(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def server(use_libuv: bool) -> dist.TCPStore:
    """torch's own server, and its client in this process."""
    # an IPv4 socket: on torch's own the server looks up the names of its peers, which may take the resolver seconds
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        use_libuv=use_libuv,
        master_listen_fd=listening.detach(),
    )


@pytest.fixture
async def client(server: dist.TCPStore) -> AsyncIterator[StoreClient]:
    client = await StoreClient.connect("127.0.0.1", server.port, timeout=20, connect_timeout=10)
    yield client
    await client.aclose()


@pytest.fixture
async def fake() -> AsyncIterator[Callable[[Handler], Awaitable[Fake]]]:
    """Start a fake server: ``server = await fake(handler)``."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(handler: Handler) -> Fake:
            double = Fake(handler)
            listening = await asyncio.start_server(double.serve, "127.0.0.1", 0)
            double.port = listening.sockets[0].getsockname()[1]
            stack.callback(double.cut)
            stack.callback(listening.close)
            started.append(double)
            return double

        started: list[Fake] = []
        yield start
    for double in started:
        assert not double.errors, double.errors


@pytest.fixture
async def proxy(server: dist.TCPStore, fake: Callable[[Handler], Awaitable[Fake]]) -> Fake:
    """A way to the real server that counts what the client writes, in ``chunks``, and can be ``cut`` and stopped."""
    chunks: list[bytes] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, log: list[bytes]) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1 << 20):
                await double.flowing.wait()
                log.append(data)
                if writer.is_closing():
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, up_writer, chunks), pump(up_reader, writer, []))

    double = await fake(handler)
    double.chunks = chunks
    return double


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """``await until(condition)``, for what nothing can be awaited for: other threads, the kernel's sockets."""

    async def turn_until(condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0)

    return turn_until


@pytest.fixture
def sockets() -> Callable[[], int]:
    """``sockets()``: how many of them this process has open."""

    def count() -> int:
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # a thread of the server closes its ends meanwhile
                found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        return found

    return count
