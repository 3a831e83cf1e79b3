"""The TCPStore protocol, without I/O: requests to bytes, bytes to replies. No socket, no await, no clock.

A connection carries requests one after another, without ids or framing, and the replies keep this order. A WAIT or
BARRIER that has to wait is the exception: later replies overtake its answer, which is a bare byte. A connection with an
outstanding WAIT must therefore carry no request but its CANCEL_WAIT; the caller keeps to this rule.

Protocol (native-endian; one opcode byte first; str and blob are a u64 length and bytes):

    0  VALIDATE     u32 magic            -> nothing      10 MULTI_GET    u64 n, n str          -> n blob
    1  SET          str, blob            -> nothing      11 MULTI_SET    u64 n, n (str, blob)  -> nothing
    2  COMPARE_SET  str, blob, blob      -> blob         12 CANCEL_WAIT                        -> u8 1
    3  GET          str                  -> blob         13 PING         u32                   -> u32
    4  ADD          str, i64             -> i64          17 LIST_KEYS                          -> i64 n, n str
    5  CHECK        u64 n, n str         -> u8 0 | 1     18 BARRIER      str, i64              -> u8 0
    6  WAIT         u64 n, n str         -> u8 0          7 GETNUMKEYS                         -> i64
    8  DELETE_KEY   str                  -> i64 0 | 1     9 APPEND       str, blob             -> nothing

Opcodes 14 to 16 (queues) are unused here. 17 exists since torch 2.10, 18 since 2.12; a server answers an unknown opcode
by closing the connection. The source of this description is torch's TCPStore servers (libuv and legacy).
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from asynccomm.errors import StoreError, StoreProtocolError
from asynccomm.store.base import to_amount, to_bytes, to_key, to_keys

MAX_KEY = 8191  # bytes; libuv's server takes 8192 with the "/" and drops the connection above
MAX_VALUE = 8 << 20  # bytes in one request; libuv's server drops the connection above
MAX_KEYS = 131072  # keys in one request; libuv's server drops the connection above
MAX_REPLY = 1 << 30  # bytes; APPEND can grow a value beyond MAX_VALUE, but a corrupt length must not exhaust memory
MULTI_SET_BYTES = 256 << 10  # above this libuv's server gets slow (it parses again from the start every 4 KiB)

_MAGIC = 0x3C85F7CE
_U32 = struct.Struct("=I")
_I64 = struct.Struct("=q")
_U64 = struct.Struct("=Q")

Parser = Generator[None, None, Any]
NUMBER: Parser = iter(())  # type: ignore[assignment]  # never run: stands for "an i64 follows"


class Status(enum.IntEnum):
    """The status bytes of WAIT, BARRIER and CANCEL_WAIT (and, as READY and NOT_READY, of CHECK)."""

    STOP_WAITING = 0
    WAIT_CANCELED = 1


class Codec:
    """One connection's protocol: call a request method, send ``data_to_send()``, feed ``receive_data``.

    Each request method returns its number of replies (0 or 1). ``receive_data`` returns the completed replies, in
    request order, as Python values. An exception from ``receive_data`` makes the connection unusable.

    User keys get the leading ``/`` of torch's client, so both clients see the same keys.
    """

    def __init__(self) -> None:
        self._out: list[bytes] = []
        self.unsent: int = 0  #: bytes that ``data_to_send`` would return
        self._in = bytearray()
        self._at = 0  # offset in ``_in`` of the first unparsed byte
        self._expected: deque[Parser] = deque()
        self._current: Parser | None = None
        self._cancelling = False
        self._failed = False

    # -- requests -----------------------------------------------------------------------------------------------------

    def hello(self, nonce: int) -> int:
        """The handshake and a PING, which must leave in one write; the reply is ``nonce``."""
        return self._request(b"\x00" + _U32.pack(_MAGIC)) + self.ping(nonce)

    def ping(self, nonce: int) -> int:
        return self._request(b"\x0d" + _U32.pack(nonce), self._pong(nonce))

    def set(self, key: str, value: bytes | str) -> int:
        return self._request(b"\x01" + _key(key) + _blob("value", value))

    def append(self, key: str, value: bytes | str) -> int:
        return self._request(b"\x09" + _key(key) + _blob("value", value))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> int:
        body = _key(key) + _blob("expected", expected) + _blob("desired", desired)
        return self._request(b"\x02" + body, self._blob())

    def get(self, key: str) -> int:
        """Read ``key``. For a missing key libuv's server answers b"" and the legacy server disconnects: CHECK first."""
        return self._request(b"\x03" + _key(key), self._blob())

    def add(self, key: str, amount: int) -> int:
        return self._request(b"\x04" + _key(key) + _I64.pack(to_amount(amount)), NUMBER)

    def check(self, keys: Sequence[str]) -> int:
        return self._request(b"\x05" + _keys(keys), self._flag())

    def wait(self, keys: Sequence[str]) -> int:
        """Wait for ``keys``. A connection carries one WAIT at a time, and beside a WAIT only its ``cancel_wait``."""
        return self._request(b"\x06" + _keys(keys), self._wait_status())

    def cancel_wait(self) -> int:
        """End the outstanding WAIT, whose reply becomes WAIT_CANCELED, or stays STOP_WAITING if already on its way."""
        assert self.outstanding, "nothing is waiting on this connection"
        self._cancelling = True
        return self._request(b"\x0c")

    def num_keys(self) -> int:
        return self._request(b"\x07", NUMBER)

    def delete(self, key: str) -> int:
        return self._request(b"\x08" + _key(key), self._deleted())

    def multi_get(self, keys: Sequence[str]) -> int:
        """Read ``keys``. An empty request has no reply."""
        return self._request(b"\x0a" + _keys(keys), self._blobs(len(keys)) if keys else None)

    def multi_set(self, items: Mapping[str, bytes | str]) -> int:
        body = b"".join(_key(key) + _blob(f"value of {key!r}", value) for key, value in items.items())
        if len(items) > MAX_KEYS or len(body) > MULTI_SET_BYTES:
            raise StoreError(f"{len(items)} keys in {len(body)} bytes are too much for one multi_set; send single sets")
        return self._request(b"\x0b" + _U64.pack(len(items)) + body)

    def list_keys(self) -> int:
        return self._request(b"\x11", self._key_list())

    def barrier(self, key: str, world_size: int) -> int:
        """Wait for ``world_size`` clients. Like WAIT, a BARRIER needs the connection to itself. A key serves once."""
        return self._request(b"\x12" + _key(key) + _I64.pack(world_size), self._status())

    def _request(self, data: bytes, reply: Parser | None = None) -> int:
        self._out.append(data)
        self.unsent += len(data)
        if reply is None:
            return 0
        self._expected.append(reply)
        return 1

    def data_to_send(self) -> bytes:
        """All requests since the last call, in one piece."""
        data = b"".join(self._out)
        self._out.clear()
        self.unsent = 0
        return data

    # -- replies ------------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """The number of replies still to come."""
        return len(self._expected) + (self._current is not None)

    def receive_data(self, data: bytes) -> list[Any]:
        """Take received bytes, in pieces of any size; returns the replies that the bytes complete.

        Raises: StoreProtocolError, on this and all later calls.
        """
        if self._failed:
            raise StoreProtocolError("the connection failed before")
        self._in += data
        replies: list[Any] = []
        try:
            while self._current is not None or self._expected:
                parser = self._current or self._expected.popleft()
                self._current = parser
                if parser is NUMBER:  # a generator for each of thousands of counters would be a third of their cost
                    if len(self._in) - self._at < 8:
                        break
                    replies.append(_I64.unpack_from(self._in, self._at)[0])
                    self._at += 8
                    self._current = None
                    continue
                try:
                    next(parser)
                except StopIteration as stop:
                    self._current = None
                    replies.append(stop.value)
                else:
                    break  # incomplete
            if self._current is None and self._at < len(self._in):
                raise StoreProtocolError(f"{len(self._in) - self._at} bytes arrived that answer no request")
        except StoreProtocolError:
            self._failed = True
            raise
        del self._in[: self._at]
        self._at = 0
        return replies

    def _take(self, n: int) -> Generator[None, None, bytes]:
        while len(self._in) - self._at < n:
            yield
        end = self._at + n
        data = bytes(self._in[self._at : end])
        self._at = end
        return data

    def _number(self) -> Generator[None, None, int]:
        (value,) = _I64.unpack((yield from self._take(8)))
        return int(value)

    def _blob(self) -> Generator[None, None, bytes]:
        (length,) = _U64.unpack((yield from self._take(8)))
        if length > MAX_REPLY:
            raise StoreProtocolError(f"a value of {length} bytes was announced; the limit is {MAX_REPLY}")
        return (yield from self._take(length))

    def _blobs(self, count: int) -> Generator[None, None, list[bytes]]:
        values: list[bytes] = []
        for _ in range(count):
            values.append((yield from self._blob()))
        return values

    def _byte(self) -> Generator[None, None, int]:
        value = (yield from self._take(1))[0]
        if value > 1:
            raise StoreProtocolError(f"a status byte must be 0 or 1, got {value}")
        return value

    def _flag(self) -> Generator[None, None, bool]:
        return (yield from self._byte()) == 0

    def _status(self) -> Generator[None, None, Status]:
        return Status((yield from self._byte()))

    def _wait_status(self) -> Generator[None, None, Status]:
        status = yield from self._status()
        if self._cancelling:
            self._cancelling = False
            # the server always answers a CANCEL_WAIT: alone, or after the answer to the WAIT
            if status is Status.STOP_WAITING and (yield from self._byte()) != Status.WAIT_CANCELED:
                raise StoreProtocolError("a CANCEL_WAIT was answered by another STOP_WAITING")
        elif status is not Status.STOP_WAITING:
            raise StoreProtocolError("a WAIT that nobody cancelled was answered as cancelled")
        return status

    def _deleted(self) -> Generator[None, None, bool]:
        count = yield from self._number()
        if count not in (0, 1):
            raise StoreProtocolError(f"a delete must answer 0 or 1, got {count}")
        return count == 1

    def _pong(self, nonce: int) -> Generator[None, None, int]:
        (value,) = _U32.unpack((yield from self._take(4)))
        if value != nonce:
            raise StoreProtocolError(f"the server answered a ping of {nonce:#x} with {value:#x}: no TCPStore?")
        return int(value)

    def _key_list(self) -> Generator[None, None, list[str]]:
        count = yield from self._number()
        if not 0 <= count <= MAX_REPLY // 8:
            raise StoreProtocolError(f"a list of {count} keys was announced")
        keys = yield from self._blobs(count)
        # keys without the "/" belong to torch itself
        return [key[1:].decode(errors="surrogateescape") for key in keys if key.startswith(b"/")]


def _key(key: str) -> bytes:
    data = to_key(key).encode(errors="surrogateescape")
    if len(data) > MAX_KEY:
        raise StoreError(f"key of {len(data)} bytes is over the limit of {MAX_KEY}: {key[:40]!r}...")
    return _U64.pack(len(data) + 1) + b"/" + data


def _keys(keys: Sequence[str]) -> bytes:
    names = to_keys(keys)
    if len(names) > MAX_KEYS:
        raise StoreError(f"{len(names)} keys in one request are over the limit of {MAX_KEYS}")
    return _U64.pack(len(names)) + b"".join([_key(key) for key in names])


def _blob(name: str, value: bytes | str) -> bytes:
    data = to_bytes(name, value)
    if len(data) > MAX_VALUE:
        raise StoreError(f"{name} of {len(data)} bytes is over the limit of {MAX_VALUE}")
    return _U64.pack(len(data)) + data
