"""The asyncio client of torch's TCPStore: a thin shell around the codec.

A client has two or more connections. The command connection pipelines requests, and the requests of one loop iteration
leave in one write. A blocked WAIT would disturb the order of replies there, so waits have connections of their own
(``wait_pool``): one from the start, and more when several waits last long.

A cancelled request keeps its place in the queue, so the replies keep their order. An error or a lost connection
permanently fails all requests pending on that connection: a lost reply to ADD cannot be requested again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import socket
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self, TypeVar, cast, final

from asynccomm.errors import ClosedError, RendezvousError, StoreError, StoreProtocolError, StoreTimeoutError
from asynccomm.options import duration, seconds
from asynccomm.store.base import DEFAULT_TIMEOUT, Store, answered, to_bytes, to_key, to_limit, within
from asynccomm.store.codec import MULTI_SET_BYTES, Codec
from asynccomm.store.wait_pool import WaitPool

T = TypeVar("T")

FIRST_RETRY = 0.02  # seconds before the second attempt to connect; doubles up to LAST_RETRY, with jitter
LAST_RETRY = 1.0
_LARGE = 64 << 10  # bytes in the write buffer above which set() waits


@final
class _StoreConnection(asyncio.Protocol):
    """One connection: requests in, futures of their replies out."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._codec = Codec()
        self._pending: deque[asyncio.Future[Any]] = deque()
        self._transport: asyncio.Transport | None = None
        self._flushing = False
        self.error: StoreError | ClosedError | None = None  #: the reason that the connection is unusable
        self._writable = asyncio.Event()
        self._writable.set()
        self.local_address: str | None = None  #: of this end
        self.lost: asyncio.Future[None] = self._loop.create_future()  #: done when the connection is lost

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._transport.set_write_buffer_limits(high=_LARGE)
        self.local_address = str(self._transport.get_extra_info("sockname")[0])

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._codec.receive_data(data)
        except StoreProtocolError as exc:
            self._fail(StoreProtocolError(f"store at {self._peer}: {exc}"))
            return
        pending = self._pending
        for reply in replies:
            future = pending.popleft()
            if not future.done():  # a cancelled request only keeps its place
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f": {exc}" if exc else ""
        self._fail(StoreError(f"the connection to the store at {self._peer} was lost{reason}"))
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # -- for the client

    @property
    def codec(self) -> Codec:
        """The codec that takes requests; raises the connection's error once the connection has failed."""
        if self.error is not None:
            raise self.error
        return self._codec

    def reply(self) -> asyncio.Future[Any]:
        """Send the request in the codec; the future of its reply."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._send(now=not self._pending)  # an idle connection has no write to share: send at once
        self._pending.append(future)
        return future

    def _send(self, *, now: bool) -> None:
        if now:
            self.flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    async def no_reply(self) -> None:
        """Send the requests in the codec; waits only while many bytes are unsent."""
        self._send(now=self._codec.unsent > _LARGE)
        if not self._writable.is_set():
            await self._writable.wait()
            if self.error is not None:
                raise self.error

    def flush(self) -> None:
        self._flushing = False
        data = self._codec.data_to_send()
        if data and self._transport is not None and self.error is None:
            self._transport.write(data)

    def _fail(self, error: StoreError) -> None:
        if self.error is None:
            self.error = error
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()
        while self._pending:
            future = self._pending.popleft()
            if not future.done():
                future.set_exception(self.error)
                future.exception()  # mark it retrieved: the awaiting task may have been cancelled

    @property
    def connected(self) -> bool:
        """Whether the connection was ever made."""
        return self._transport is not None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def close(self, error: StoreError | ClosedError) -> None:
        if self.error is None:
            self.flush()
            self.error = error
            for future in self._pending:
                if not future.done():
                    future.set_exception(error)
                    future.exception()
        if self._transport is not None:
            self._transport.close()
            # close() flushes the write buffer first; a server that reads nothing must not delay this by more than 1 s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.shield(self.lost)
            self._transport.abort()


@final
class StoreClient(Store):
    """A client of a TCPStore server, made with :meth:`connect`."""

    def __init__(
        self, host: str, port: int, command: _StoreConnection, waits: WaitPool, *, libuv: bool, timeout: float
    ) -> None:
        self.host = host
        self.port = port
        self._timeout = timeout
        self._command = command
        self._waits = waits
        self._libuv = libuv
        self._closed = False

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        connect_timeout: float | timedelta | None = None,
    ) -> Self:
        """Connect, retrying with back-off until the server is up.

        Args:
            host, port: the server's address.
            timeout: seconds or a timedelta, that ``get`` and ``wait`` allow by default.
            connect_timeout: the same, for all attempts together; None: ``timeout``.

        Raises: ValueError, TypeError naming the argument; RendezvousError when no server answered in time;
        StoreProtocolError when another service is on that port.
        """
        check_host(host)
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            raise ValueError(f"port must be an integer from 1 to 65535, got {port!r}")
        by_default = duration("timeout", timeout)
        limit = seconds("connect_timeout", connect_timeout, by_default)
        deadline = time.monotonic() + limit
        command = await _open(host, port, deadline, limit)
        try:
            second, libuv = await _open_wait(host, port, deadline, limit)
        except BaseException:
            await command.close(ClosedError("the client was never connected"))
            raise

        def present(keys: Sequence[str]) -> asyncio.Future[bool]:
            command.codec.check(keys)
            return command.reply()

        async def another() -> _StoreConnection:
            line = _StoreConnection(f"{host}:{port}")
            async with within(limit):
                await _greet(line, host, port)
            return line

        waits = WaitPool(second, another, present)
        return cls(host, port, command, waits, libuv=libuv, timeout=by_default)

    @property
    def usable(self) -> bool:
        """Whether the client is open, and still has its connection."""
        return not self._closed and self._command.error is None

    def local_address(self) -> str | None:
        return self._command.local_address

    def _line(self) -> _StoreConnection:
        if self._closed:
            raise ClosedError(f"the client of the store at {self.host}:{self.port} is closed")
        return self._command

    async def set(self, key: str, value: bytes | str) -> None:
        line = self._line()
        line.codec.set(key, value)
        await line.no_reply()

    async def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        limit = to_limit(timeout, self._timeout)
        deadline = time.monotonic() + limit
        if self._libuv and limit > 0:
            if value := await self._answered(self._get(key), deadline):
                return value
            # most likely the key is missing; a wait for an empty value ends at once
            await self._waited([key], deadline, verify=False)
        while (found := await self._get_if_present(key, deadline)) is None:  # also after a wait: it may be deleted
            if not await self._waited([key], deadline, verify=False):
                raise _late([key], limit)
        return found

    async def _waited(self, keys: Sequence[str], deadline: float, *, verify: bool) -> bool:
        """Wait for ``keys``, see ``WaitPool.wait``. Returns False at the deadline."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        try:
            await self._waits.wait(keys, left, verify=verify)
        except StoreTimeoutError:
            return False
        return True

    async def _get_if_present(self, key: str, deadline: float) -> bytes | None:
        if self._libuv and (value := await self._answered(self._get(key), deadline)):
            return value
        # CHECK first: a legacy server drops a client that GETs a missing key
        if not await self._answered(self.check([key]), deadline):
            return None
        return await self._answered(self._get(key), deadline)

    def _answered(self, reply: asyncio.Future[T], deadline: float) -> Coroutine[Any, Any, T]:
        return answered(reply, deadline, f"store at {self.host}:{self.port}")

    def _get(self, key: str) -> asyncio.Future[bytes]:
        """The value at ``key``; of a missing key empty, from libuv's server."""
        line = self._line()
        line.codec.get(key)
        return line.reply()

    def add(self, key: str, amount: int) -> asyncio.Future[int]:
        line = self._line()
        line.codec.add(key, amount)
        return line.reply()

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> asyncio.Future[bytes]:
        line = self._line()
        line.codec.compare_set(key, expected, desired)
        return line.reply()

    def check(self, keys: Sequence[str]) -> asyncio.Future[bool]:
        line = self._line()
        line.codec.check(keys)
        return line.reply()

    async def wait(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> None:
        limit = to_limit(timeout, self._timeout)
        await self._wait(keys, limit, time.monotonic() + limit)

    async def _wait(self, keys: Sequence[str], limit: float, deadline: float) -> None:
        present = await self._answered(self.check(keys), deadline)
        if not present and not await self._waited(keys, deadline, verify=True):
            raise _late(keys, limit)

    def delete(self, key: str) -> asyncio.Future[bool]:
        line = self._line()
        line.codec.delete(key)
        return line.reply()

    async def append(self, key: str, value: bytes | str) -> None:
        line = self._line()
        line.codec.append(key, value)
        await line.no_reply()

    def num_keys(self) -> asyncio.Future[int]:
        line = self._line()
        line.codec.num_keys()
        return line.reply()

    async def multi_get(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> list[bytes]:
        limit = to_limit(timeout, self._timeout)
        deadline = time.monotonic() + limit
        await self._wait(keys, limit, deadline)
        if not keys:
            return []
        line = self._line()
        line.codec.multi_get(keys)
        return await self._answered(line.reply(), deadline)

    async def multi_set(self, items: Mapping[str, bytes | str]) -> None:
        line = self._line()
        values = {to_key(key): to_bytes(f"value of {key!r}", value) for key, value in items.items()}
        if sum(4 * len(key) + len(value) + 17 for key, value in values.items()) < MULTI_SET_BYTES:
            line.codec.multi_set(values)
            await line.no_reply()
        else:
            for key, value in values.items():
                await self.set(key, value)

    def list_keys(self) -> asyncio.Future[list[str]]:
        """All keys on the server. Needs a server of torch 2.10 or newer: an older server drops the connection."""
        line = self._line()
        line.codec.list_keys()
        return line.reply()

    async def ping(self) -> None:
        """One round trip: the server has carried out all earlier requests of this client when ``ping`` returns."""
        line = self._line()
        line.codec.ping(secrets.randbits(32))
        await line.reply()

    def flush(self) -> None:
        """Hand pending writes to the transport now instead of at the end of the loop iteration."""
        self._command.flush()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        error = ClosedError(f"the client of the store at {self.host}:{self.port} was closed")
        try:
            await self._waits.aclose(error)
        finally:
            await self._command.close(error)


def check_host(host: object, argument: str = "host") -> None:
    """Raise ValueError unless ``host`` can be the name or address of a host, which the resolver takes."""
    if isinstance(host, str) and host.startswith("["):
        raise ValueError(f"{argument} must be the name or address of a host, without brackets, got {host!r}")
    try:
        if not isinstance(host, str) or not host or "\0" in host:
            raise UnicodeError("it is no str, or empty, or has a null character")
        host.encode("idna")
    except UnicodeError as exc:
        raise ValueError(f"{argument} must be the name or address of a host, got {host!r}") from exc


def _late(keys: Sequence[str], limit: float) -> StoreTimeoutError:
    return StoreTimeoutError(f"keys {list(keys)} did not all appear within {limit:g} s")


async def _open(host: str, port: int, deadline: float, limit: float) -> _StoreConnection:
    """A connection after the hello. Raises RendezvousError at the deadline."""
    peer = f"{host}:{port}"
    pause = FIRST_RETRY
    while True:
        line = _StoreConnection(peer)
        try:
            async with within(max(0.0, deadline - time.monotonic())) as scope:
                await _greet(line, host, port)
                return line
        except StoreProtocolError:
            raise
        except (OSError, StoreError) as exc:  # a TimeoutError is an OSError
            if scope.expired():
                problem = "the server does not greet back; is it a TCPStore?" if line.connected else "nobody answered"
                raise RendezvousError(f"no store at {peer} within {limit:g} s: {problem}") from None
            if time.monotonic() + pause >= deadline:
                # asyncio's text is only "Connect call failed"; the system's text has the reason
                known = isinstance(exc, OSError) and (exc.errno or 0) > 0
                problem = os.strerror(exc.errno) if known else str(exc)  # type: ignore[union-attr,arg-type]
                raise RendezvousError(f"no store at {peer} within {limit:g} s: {problem}") from exc
        # ranks start together: jitter spreads their attempts
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LAST_RETRY)


async def _greet(line: _StoreConnection, host: str, port: int) -> None:
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: line, host, port)
    try:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.codec.hello(secrets.randbits(32))
        await line.reply()
    except BaseException:
        transport.abort()
        raise


async def _open_wait(host: str, port: int, deadline: float, limit: float) -> tuple[_StoreConnection, bool]:
    """The first wait connection, and whether the server is libuv's, which answers a GET for a missing key."""
    line = await _open(host, port, deadline, limit)
    try:
        async with within(max(0.0, deadline - time.monotonic())):
            line.codec.get(f"asynccomm/no such key/{secrets.token_hex(8)}")
            await line.reply()
    except TimeoutError:
        line.abort()
        raise RendezvousError(f"no store at {host}:{port} within {limit:g} s: the server stopped answering") from None
    except StoreProtocolError:
        raise
    except StoreError:
        return await _open(host, port, deadline, limit), False
    except BaseException:
        line.abort()
        raise
    return line, True
