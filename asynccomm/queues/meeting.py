"""The ends of a queue meet: one end listens, the others attach by its handle."""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Callable, Collection, Coroutine
from itertools import chain, count
from typing import Any, Final, final

from asynccomm.backends.shm.segment import Segment, create
from asynccomm.core.hosts import host_name
from asynccomm.core.tasks import detach
from asynccomm.errors import AsyncCommError, BackendError, ClosedError, PeerLostError
from asynccomm.queues.bridge import Streams, bell_pair, receive_frames, send_frames
from asynccomm.queues.doorbell import Doorbell
from asynccomm.queues.errors import ParticipantLostError
from asynccomm.queues.layout import DATA, SLOTS, map_ring, ring_bytes
from asynccomm.queues.listening import Admitted, QueueListener, connect_local, connect_tcp
from asynccomm.queues.options import QueueHandle, QueueHello, QueueOptions, QueueWelcome
from asynccomm.queues.queue import MessageQueue
from asynccomm.queues.reading import ReadingEnd, Source
from asynccomm.queues.writing import Target, WritingEnd

_DETAIL: Final = "its connection to the queue ended"

Bridge = Coroutine[Any, Any, None]


def _lost(label: str, rank: int, comm: str) -> AsyncCommError:
    return PeerLostError(rank, _DETAIL, comm) if rank >= 0 else ParticipantLostError(label, _DETAIL)


def _label(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else f"process {os.getpid()} on {host_name()}"


def _new_ring(ring: int) -> tuple[Segment, int]:
    fd = create(DATA + ring)
    try:
        return map_ring(fd, ring), fd
    except BaseException:
        os.close(fd)
        raise


@final
class QueueHost:
    """The end that listens: the only writer, or the only reader.

    Args:
        writes: whether this end writes.
        ranks: ranks of the comm that attach, once each.
    """

    def __init__(self, writes: bool, options: QueueOptions, rank: int, comm: str, ranks: Collection[int]) -> None:
        self._options, self._rank, self._comm, self._due = options, rank, comm, set(ranks)
        self._ring, self._drops = ring_bytes(options.capacity), options.overflow == "drop_oldest"
        self._tasks: set[asyncio.Task[None]] = set()
        self._participants: weakref.WeakSet[Doorbell] = weakref.WeakSet()  # of ends that are no ranks
        self._fd = -1
        self._close_ring: Callable[[], object] = _nothing
        self.end: ReadingEnd | WritingEnd
        if writes:
            self._segment, self._fd = _new_ring(self._ring)
            closing = weakref.finalize(self, os.close, self._fd)  # at the latest: the loop may end before
            closing.atexit = False  # threads with loops go on at exit, and admit ends
            self._close_ring = closing
            self.end = WritingEnd(self._segment, self._ring, self._drops, options)
        else:
            self.end = ReadingEnd(options, len(self._due))
        self.listener: QueueListener = QueueListener(self._admit, len(self._due))

    async def open(self) -> QueueHandle:
        """Listen on TCP if the options say so. Raises: OSError."""
        address = self._options.address
        port = await self.listener.listen_tcp(address) if address else 0
        attaches = "reader" if isinstance(self.end, WritingEnd) else "writer"
        return self.listener.handle(attaches, _label(self._rank), self._rank, address, port)

    def queue(self, handle: QueueHandle) -> MessageQueue:
        return MessageQueue(self.end, handle.text(), self.close, self.dismiss, self._tasks)

    def close(self) -> None:
        self.listener.close()
        self._close_ring()
        self._fd = -1

    def dismiss(self) -> None:
        """Accept no more ends, and leave those that are no ranks: no comm tells them of its error."""
        self.close()
        for bell in list(self._participants):
            bell.leave()

    # -- ends that attach ---------------------------------------------------------------------------------------------

    def _admit(self, hello: QueueHello, remote: bool) -> Admitted:
        welcome = QueueWelcome(self.listener.tokens.answer, ring=self._ring, drops=self._drops)
        if hello.rank >= 0 and hello.rank not in self._due:
            return Admitted(_refused(welcome, f"rank {hello.rank} has attached already, or has no part in it"))
        if isinstance(self.end, WritingEnd):
            return self._admit_reader(self.end, hello, welcome, remote)
        return self._admit_writer(self.end, hello, welcome, remote)

    def _label_of(self, hello: QueueHello) -> str:
        """The label of an end that attaches: with a number, where another end of its process has attached."""
        attached = self.end.behind()
        numbered = (f"{hello.label} ({number})" for number in count(2))
        return next(label for label in chain([hello.label], numbered) if label not in attached)

    def _came(self, rank: int, bell: Doorbell) -> None:
        if rank < 0:
            self._participants.add(bell)
        self._due.discard(rank)

    def _admit_reader(self, end: WritingEnd, hello: QueueHello, welcome: QueueWelcome, remote: bool) -> Admitted:
        label = self._label_of(hello)
        target = Target(label, None)
        slot, number = end.attach(target)
        if slot < 0:
            return Admitted(_refused(welcome, f"the queue has {SLOTS} readers already"))

        def ended(orderly: bool) -> None:
            end.detach(slot)
            if not orderly and self._options.on_lost == "raise":
                end.fail(_lost(label, hello.rank, self._comm))

        def attach(transport: socket.socket | Streams) -> None:
            if isinstance(transport, socket.socket):
                bell = Doorbell(transport, end.pump, ended)
            else:
                mine, bridges = bell_pair()
                target.bridged = True
                bell = Doorbell(mine, end.pump, ended)
                self._spawn(send_frames(self._segment, self._ring, slot, self._drops, bridges, transport))
            end.connect(slot, bell)
            self._came(hello.rank, bell)

        slot_there = 0 if remote else slot  # in the ring that it reads
        reply = QueueWelcome(welcome.token, "", self._ring, slot_there, self._drops, number)
        return Admitted(reply, -1 if remote else os.dup(self._fd), attach)

    def _admit_writer(self, end: ReadingEnd, hello: QueueHello, welcome: QueueWelcome, remote: bool) -> Admitted:
        try:
            segment, fd = _new_ring(self._ring)
        except BackendError as exc:
            return Admitted(_refused(welcome, str(exc)))
        label = self._label_of(hello)
        lost = _lost(label, hello.rank, self._comm)

        def attach(transport: socket.socket | Streams) -> None:
            bell, bridge = _attach_source(end, segment, welcome, label, lost, transport)
            if bridge is not None:
                self._spawn(bridge)
            self._came(hello.rank, bell)

        if remote:
            os.close(fd)
            fd = -1
        return Admitted(welcome, fd, attach)

    def _spawn(self, bridge: Bridge) -> None:
        task = detach(asyncio.ensure_future(bridge))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _refused(welcome: QueueWelcome, reason: str) -> QueueWelcome:
    return QueueWelcome(welcome.token, refused=reason)


def _attach_source(
    end: ReadingEnd,
    segment: Segment,
    welcome: QueueWelcome,
    label: str,
    lost: AsyncCommError,
    transport: socket.socket | Streams,
) -> tuple[Doorbell, Bridge | None]:
    """Read the ring of the writer at the other end of ``transport``; returns also the bridge of TCP, to be run."""
    source = Source(segment, welcome, label, lost)
    sock, bridge = transport, None
    if not isinstance(sock, socket.socket):
        sock, bridges = bell_pair()
        assert not isinstance(transport, socket.socket)
        bridge = receive_frames(segment, welcome.ring, bridges, transport)

    def ended(orderly: bool) -> None:
        source.left, source.gone = orderly, True
        end.waiters.wake()

    source.bell = bell = Doorbell(sock, end.waiters.wake, ended)
    end.add(source)
    return bell, bridge


async def attach(handle: QueueHandle, options: QueueOptions, rank: int = -1, comm: str = "") -> MessageQueue:
    """Attach to the queue of ``handle``. Cancelling is safe. Raises: BackendError."""
    hello = QueueHello(handle.ask, _label(rank)[:256], rank)
    try:
        transport, welcome, segment = await _connect(handle, hello)
    except OSError as exc:
        raise BackendError(f"cannot attach to the queue of {handle.label} on {handle.host}: {exc}") from exc
    lost, tasks = _lost(handle.label, handle.rank, comm), set[asyncio.Task[None]]()
    end: ReadingEnd | WritingEnd
    if handle.attaches == "reader":
        end = ReadingEnd(options, None)
        _, bridge = _attach_source(end, segment, welcome, handle.label, lost, transport)
    else:
        end = WritingEnd(segment, welcome.ring, welcome.drops, options)
        bridge = _attach_target(end, segment, welcome, handle.label, lost, transport)
    if bridge is not None:
        tasks.add(detach(asyncio.ensure_future(bridge)))
    return MessageQueue(end, handle.text(), _nothing, _nothing, tasks)


async def _connect(handle: QueueHandle, hello: QueueHello) -> tuple[socket.socket | Streams, QueueWelcome, Segment]:
    """Raises: OSError, BackendError."""
    if not handle.port or handle.host == host_name():
        try:
            sock, welcome, fd = await connect_local(handle, hello)
        except PermissionError:
            raise
        except OSError:  # another network namespace, such as a container's
            if not handle.port:
                raise
        else:
            try:
                return sock, welcome, map_ring(fd, welcome.ring)
            except BaseException:
                sock.close()
                raise
            finally:
                os.close(fd)
    streams, welcome = await connect_tcp(handle, hello)
    segment, fd = _new_ring(welcome.ring)
    os.close(fd)
    return streams, welcome, segment


def _attach_target(
    end: WritingEnd,
    segment: Segment,
    welcome: QueueWelcome,
    label: str,
    lost: AsyncCommError,
    transport: socket.socket | Streams,
) -> Bridge | None:
    """Write to the reader at the other end of ``transport``; returns the bridge of TCP, to be run."""

    def ended(orderly: bool) -> None:
        end.fail(ClosedError(f"{label} has closed the queue") if orderly else lost)

    if isinstance(transport, socket.socket):
        end.write_to(Target(label, Doorbell(transport, end.pump, ended)))
        return None
    mine, bridges = bell_pair()
    slot = end.write_to(Target(label, Doorbell(mine, end.pump, ended), bridged=True))
    return send_frames(segment, welcome.ring, slot, welcome.drops, bridges, transport)


def _nothing() -> None:
    pass
