"""The frames of a ring over TCP, to a ring on another host.

Each host has a ring of its own. One bridge reads the frames of the first ring as one of its readers, and sends them;
the other bridge writes them into the second ring. A full second ring stops the stream, and so holds back the first
writer as a local reader would. A header of kind ``_END`` has the state of the writer, once nothing follows.

The received frames are not trusted: their lengths are checked before any memory is used for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
from typing import Any, Final, final

from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.segment import Segment
from asynccomm.errors import BackendError
from asynccomm.queues.doorbell import BYE, Doorbell
from asynccomm.queues.layout import (
    BYTES,
    ENDED,
    FAILED,
    HEADER,
    OBJECT,
    OPEN,
    SLEEPING,
    STATE,
    WAITING,
    header,
    largest_payload,
    slot_word,
)
from asynccomm.queues.ring import FULL, WAKE, RingFrame, RingReader, RingWriter

_END: Final = 0
CHUNK: Final = 256 << 10  # bytes that are sent at once

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def bell_pair() -> tuple[socket.socket, socket.socket]:
    """The connection between a bridge and an end of a queue in its process."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@final
class _Wakes:
    """The bridge's side of that connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._event = asyncio.Event()
        #: done at the end of the bridge; False: one side was lost
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.left = False  #: the end of the queue in this process has left in order
        self.bell = Doorbell(sock, self._event.set, self._left)

    def _left(self, orderly: bool) -> None:
        self.left = orderly
        self.end(orderly)

    def end(self, orderly: bool) -> None:
        if not self.ended.done():
            self.ended.set_result(orderly)
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()

    async def close(self, stream: asyncio.StreamWriter) -> None:
        if self.ended.done() and self.ended.result():
            self.bell.leave()
        else:
            self.bell.close()
        stream.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await stream.wait_closed()


async def send_frames(
    segment: Segment, ring: int, slot: int, drops: bool, sock: socket.socket, streams: Streams
) -> None:
    """Send the frames of a ring until its writer has closed it, or one side is lost."""
    wakes = _Wakes(sock)
    peer = asyncio.ensure_future(_watch(streams[0], wakes))
    reader = RingReader(segment.raw, segment.data.data_ptr(), ring, slot, drops)
    try:
        await _send(segment, reader, ring, slot, wakes, streams[1])
    except (OSError, BackendError):
        wakes.end(False)
    finally:
        peer.cancel()
        await wakes.close(streams[1])


async def _watch(stream: asyncio.StreamReader, wakes: _Wakes) -> None:
    """The peer sends nothing but its leave."""
    data = b""
    with contextlib.suppress(OSError):
        data = await stream.read(1)
    wakes.end(data == BYE)


async def _send(
    segment: Segment, reader: Any, ring: int, slot: int, wakes: _Wakes, stream: asyncio.StreamWriter
) -> None:
    words, sleeping, fence, told = segment.words, slot_word(slot) + SLEEPING, Fence(), 0
    while wakes.left or not wakes.ended.done():
        state = FAILED if wakes.left else words[STATE]
        chunk, waits = _next_chunk(reader)
        if waits and reader.tail - told >= ring // 4:
            told = reader.tail
            words[WAITING] = 0
            wakes.bell.ring()
        if chunk:
            stream.write(chunk)
            await stream.drain()
        elif state != OPEN:
            stream.write(header.pack(0, _END, state, 0, 0, 0))
            await stream.drain()
            wakes.end(True)
            return
        else:
            words[sleeping] = 1
            fence.full()
            if words[STATE] == OPEN and reader.peek() is None:
                await wakes.wait()


def _next_chunk(reader: Any) -> tuple[bytearray, int]:
    """Frames that are there, and whether the writer waits for room."""
    chunk, waits = bytearray(), 0
    while len(chunk) < CHUNK and (found := reader.peek()) is not None:
        frame = RingFrame(*found)
        data = ctypes.string_at(frame.address, frame.nbytes)
        if reader.valid():
            chunk += header.pack(*frame[:6]) + data
            waits = reader.free()
    return chunk, waits


async def receive_frames(segment: Segment, ring: int, sock: socket.socket, streams: Streams) -> None:
    """Write received frames into a ring until the stream ends, or the reader leaves."""
    wakes = _Wakes(sock)
    receiving = asyncio.ensure_future(_receive(segment, ring, wakes, streams[0]))
    try:
        either: list[asyncio.Future[Any]] = [receiving, wakes.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if wakes.ended.done() and wakes.ended.result() and not receiving.done():
            streams[1].write(BYE)
    finally:
        receiving.cancel()
        await wakes.close(streams[1])


async def _receive(segment: Segment, ring: int, wakes: _Wakes, stream: asyncio.StreamReader) -> None:
    writer: Any = RingWriter(segment.raw, segment.data.data_ptr(), ring, False)
    writer.set_slots((0,))
    words, fence = segment.words, Fence()
    with contextlib.suppress(OSError, EOFError, ValueError, BackendError):
        while True:
            fields = header.unpack(await stream.readexactly(HEADER))
            nbytes, kind, first = fields[:3]
            if kind == _END:
                words[STATE] = FAILED if first == FAILED else ENDED
                wakes.end(True)
                return
            if nbytes > largest_payload(ring) or kind not in (BYTES, OBJECT):
                raise ValueError(f"a frame of kind {kind} with {nbytes} bytes")
            payload = await stream.readexactly(nbytes)
            while (result := writer.put(*fields[1:], payload, nbytes)) == FULL:
                words[WAITING] = 1
                fence.full()
                if (result := writer.put(*fields[1:], payload, nbytes)) != FULL:
                    break
                await wakes.wait()
            if result == WAKE:
                words[slot_word(0) + SLEEPING] = 0
                wakes.bell.ring()
    wakes.end(False)
