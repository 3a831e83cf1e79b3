"""One connection, which carries the messages of one rank to another, and the replies.

The rank that sends messages opens the connection and shows a token, which it has from the store. The receiving rank
answers nothing. Then frames follow: a header of fixed length, and the data that the header announces.

A link never blocks: it reads the data that has arrived and writes as much as the socket takes. Data of many bytes goes
between the socket and the memory of tensors without a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, final

from torch import Tensor

from asynccomm.backends.gloo.messages import HEADER_BYTES, Header

CHUNK: Final = 1 << 20  # bytes of one ``read`` or ``write``: other threads wait meanwhile, shorter parts take longer
PART: Final = 256 << 10  # bytes of data behind a header: both ranks copy when the first part is there
ROOM: Final = 68 << 10  # bytes of the buffer for headers and short data
BULK: Final = 1 << 20  # bytes left of one buffer: more take so long that they would hold up an event loop
VECTORS: Final = 64  # buffers of one system call
JOINED: Final = 4 << 10  # bytes of data that is copied behind its header: two parts cost the system call as much

Buffer: TypeAlias = "memoryview[int]"


def copied(tensor: Tensor, nbytes: int) -> bytes:
    """A copy of a plain tensor, without the time that torch takes for one."""
    return ctypes.string_at(tensor.data_ptr(), nbytes)


def fill(tensor: Tensor, data: bytes | bytearray | Buffer) -> None:
    """Copy ``data``, in memory that may be written to if it is no bytes, into a plain tensor of as many bytes."""
    source = data if isinstance(data, bytes) else (ctypes.c_char * len(data)).from_buffer(data)
    ctypes.memmove(tensor.data_ptr(), source, len(data))


def view(tensor: Tensor) -> Buffer:
    """The bytes of a plain tensor, which the caller keeps alive."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@final
class MessageLink:
    """One end of a connection. Used by one thread at a time.

    Args:
        sock: does not block.
        peer: the rank at the other end; -1: not known yet.
        outbound: whether this rank sends messages here.
        arrived: called with each header; it may call ``receive`` for the data behind the header.
    """

    def __init__(
        self, sock: socket.socket, peer: int, *, outbound: bool, arrived: Callable[[MessageLink, Header], object]
    ) -> None:
        self.sock = sock
        self.fd: int = sock.fileno()  #: -1 after ``close``: another link may have the number by then
        self.peer = peer
        self.outbound = outbound
        self.watched = 0  #: the events for which the link is registered
        self._arrived = arrived
        self._room = memoryview(bytearray(ROOM))
        self._start = self._end = 0  # of the unread part of ``_room``
        self._parts: deque[Buffer] = deque()  # memory that is being received into
        self._then: Callable[[], object] | None = None
        self._out: deque[Buffer | Callable[[], object]] = deque()
        self._hello: tuple[int, Callable[[MessageLink, bytes], object]] | None = None

    def close(self) -> None:
        """Close the connection, with all that is queued."""
        self.sock.close()
        self.fd = -1

    def expect_hello(self, length: int, check: Callable[[MessageLink, bytes], object]) -> None:
        """Call ``check`` with the first ``length`` bytes, which come before all frames."""
        self._hello = length, check

    @property
    def pending(self) -> bool:
        """Whether there is data to write."""
        return bool(self._out)

    @property
    def bulk(self) -> bool:
        """Whether much data of one tensor is under way."""
        parts, out = self._parts, self._out
        if parts and len(parts[0]) > BULK:
            return True
        return bool(out) and isinstance(out[0], memoryview) and len(out[0]) > BULK

    @property
    def receiving(self) -> bool:
        """Whether a frame has arrived in part."""
        return self._then is not None or self._start != self._end

    @property
    def halfway(self) -> bool:
        """Whether a header has arrived, and the data behind it only in part."""
        return self._then is not None

    def put(self, *parts: bytes | bytearray | Buffer, done: Callable[[], object] | None = None) -> None:
        """Queue data; ``done`` is called when the socket has taken all of it, until which the caller keeps it alive."""
        self._out.extend([memoryview(part) for part in parts if len(part)])
        if done is not None:
            self._out.append(done)

    def send(self, *parts: bytes | bytearray | Buffer) -> None:
        """Write ``parts``, or queue a copy of the rest, which the socket does not take now. Raises: OSError."""
        count = 0
        if not self._out:
            try:
                count = self.sock.send(parts[0]) if len(parts) == 1 else self.sock.sendmsg(parts)
            except BlockingIOError:
                count = 0
        for part in parts:
            if count < len(part):
                self._out.append(memoryview(bytes(memoryview(part)[count:])))
            count = max(0, count - len(part))

    def write(self) -> None:
        """Write as much as the socket takes, at most ``CHUNK`` bytes and a buffer more. Raises: OSError."""
        out, written = self._out, 0
        while out:
            if not isinstance(out[0], memoryview):
                out.popleft()()  # type: ignore[operator]
                continue
            if written >= CHUNK:
                return
            try:
                count = self._write_some()
            except BlockingIOError:
                return
            written += count

    def _write_some(self) -> int:
        out = self._out
        first: Any = out[0]
        if len(out) == 1 or len(first) >= CHUNK or not isinstance(out[1], memoryview):
            count = self.sock.send(first[:CHUNK])
        else:
            vector: list[Buffer] = []
            size = 0
            for part in out:
                if not isinstance(part, memoryview) or size >= PART or len(vector) == VECTORS:
                    break
                vector.append(part[:PART])
                size += len(vector[-1])
            count = self.sock.sendmsg(vector)
        left = count
        while left:
            first = out[0]
            if left < len(first):
                out[0] = first[left:]
                break
            left -= len(first)
            out.popleft()
        return count

    def take(self, nbytes: int) -> bytes | None:
        """The next ``nbytes``, if they have arrived in the same system call as the header."""
        start, end = self._start, self._start + nbytes
        if end > self._end:
            return None
        self._start = end
        return bytes(self._room[start:end])

    def receive(self, parts: Sequence[Buffer], then: Callable[[], object]) -> None:
        """Receive the next data into ``parts``, then call ``then``, which may call this method again."""
        self._parts = deque([part for part in parts if len(part)])
        self._then = then

    def read(self) -> bool:
        """Read, at most ``CHUNK`` bytes; returns whether something has come. Raises: EOFError, OSError."""
        parts = self._parts
        if not parts or len(parts[0]) < ROOM:  # one system call brings several parts, or frames
            try:
                count = self.sock.recv_into(self._room[self._end :])
            except BlockingIOError:
                return False
            if not count:
                raise EOFError
            self._end += count
            self._parse()
            return True
        total = 0
        with contextlib.suppress(BlockingIOError):
            while total < CHUNK and parts and len(parts[0]) >= ROOM:  # more comes while a part is copied
                count = self.sock.recv_into(parts[0][: CHUNK - total])
                if not count:
                    raise EOFError
                total += count
                self._advance(count)
        self._parse()
        return total > 0

    def feed(self, data: bytes) -> None:
        """Use data of the connection that was read elsewhere, behind all that was read here."""
        left = memoryview(data)
        while left:
            count = min(len(left), ROOM - self._end)
            self._room[self._end : self._end + count] = left[:count]
            self._end += count
            left = left[count:]
            self._parse()

    def _advance(self, count: int) -> None:
        left = self._parts[0][count:]
        if len(left):
            self._parts[0] = left
        else:
            self._parts.popleft()

    def _parse(self) -> None:
        """Use the data in ``_room``."""
        room = self._room
        while True:
            there = self._end - self._start
            if self._then is not None:
                if self._parts:
                    if not there:
                        break
                    count = min(there, len(self._parts[0]))
                    self._parts[0][:count] = room[self._start : self._start + count]
                    self._start += count
                    self._advance(count)
                else:
                    then, self._then = self._then, None
                    then()
            elif self._hello is not None:
                length, check = self._hello
                if there < length:
                    break
                self._hello = None
                self._start += length
                check(self, bytes(room[self._start - length : self._start]))
            elif there < HEADER_BYTES:
                break
            else:
                header = Header.unpack_from(room, self._start)
                self._start += HEADER_BYTES
                self._arrived(self, header)
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(room[self._start : self._end])
            room[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
