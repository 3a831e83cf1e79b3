"""The exchange of frames: each rank sends its frame to all ranks, in the order of its collectives.

Frames use the sockets of messages, where a waiting task reads by itself; gloo would need two more threads. An
exchange is over when the frames of all ranks have arrived, and the sockets have taken this rank's own: a process may
end right behind a collective. Exchanges end in order, one at a time.

A task that waits reads the frames in C (``_frames.c``), if that was built and nothing else is under way on their
sockets. Other data that it reads there is given to the links of the sockets, as if it came then.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, final

import torch

from asynccomm.backends.base import ConnectionEndedError
from asynccomm.backends.gloo.carried import CarriedCall, CarriedMemory
from asynccomm.backends.gloo.endpoint import Endpoint
from asynccomm.backends.gloo.frames import LONGEST, Frame, beginning_of
from asynccomm.backends.gloo.links import JOINED, MessageLink
from asynccomm.backends.gloo.messages import Header, Kind
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.errors import BackendError

_ALL: Final = 1  # a result in C: the frames of all ranks have come, and the sockets have taken this rank's
_CARRIED: Final = 3  # and the collective is done

_core: Final[Any] = load("asynccomm.backends.gloo._frames")

Done: TypeAlias = Callable[[Exception | None], object]


@final
class FrameExchange:
    """The frames of one rank and those that have arrived from the others."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._others = [(rank + i) % size for i in range(1, size)]
        self._endpoint: Endpoint | None = None
        self._lock = threading.Lock()  # the endpoint's, once there is one; guards the fields below
        self._waiting: deque[tuple[Frame, Done]] = deque()  # exchanges in progress, the oldest first
        self._arrived: dict[int, deque[bytes | bytearray]] = {peer: deque() for peer in self._others}
        self._gone: dict[int, str] = {}
        self._unsent: Counter[int] = Counter()  # by rank, the frames that its socket has not taken yet
        self._over: deque[Callable[[], object]] = deque()
        self._running = threading.Lock()  # held by the thread that reports the exchanges that are over
        self._reporter = 0  # that thread
        self._reader: Any = None  # in C, of the frames of ``_others``
        self._guess = 0  # bytes of this rank's last frame: the others are probably as long

    def open(self, endpoint: Endpoint) -> None:
        """Use the sockets of ``endpoint``."""
        self._endpoint, self._lock = endpoint, endpoint.lock
        if not isinstance(_core, CoreUnavailable):
            self._reader = _core.FrameReader(len(self._others), LONGEST)
            endpoint.before_read = self._give_back

    @property
    def in_c(self) -> bool:
        """Whether ``carry`` may do anything."""
        return self._reader is not None

    def begin(self, frame: Frame, done: Done) -> None:
        """Send ``frame``. ``done`` is called in ``settle`` when the frames of all ranks are in ``frame``, or failed."""
        endpoint = self._endpoint
        with self._lock:
            self._waiting.append((frame, done))
            if endpoint is not None:
                for peer in self._others:
                    link = endpoint.link_to(peer)
                    if link is not None:
                        data = frame.packed(peer)
                        self._guess = len(data)
                        header = Header(Kind.FRAME, first=len(data)).pack()
                        endpoint.send(link, *((header + data,) if len(data) <= JOINED else (header, data)))
                        self._note_unsent(link)
            self._advance()

    def _note_unsent(self, link: MessageLink) -> None:
        """Have exchanges wait until the socket has taken a frame that was sent on ``link``. Under the lock."""
        if link.pending and link.peer not in self._gone:
            self._unsent[link.peer] += 1
            link.put(done=partial(self._sent, link))

    def carry(self, kind: CarriedCall, equal: bytes, memory: CarriedMemory, seconds: float) -> bool | None:
        """Send the frames of a collective, receive those of the others, and fill in the outputs, in C.

        Waits for ``seconds`` from the last byte on, and at most ten times as long. Not while another thread may call
        ``begin``. The caller then calls ``settle_all``, and keeps the memory alive.

        Args:
            equal: as of ``frames.equal_part``.

        Returns: whether the collective is done: if not, the caller next calls ``go_on``; None: nothing was done.
        """
        reader, endpoint = self._reader, self._endpoint
        if reader is None or endpoint is None:
            return None
        with self._lock:
            if self._waiting or self._unsent:
                return None
            others, arrived = self._others, self._arrived
            sinks = [endpoint.sink(peer) for peer in others]
            sources = [-1 if arrived[peer] else endpoint.source(peer) for peer in others]
            if None in sinks or None in sources:
                return None
            endpoint.note_use()
            gives, takes = [memory.gives[peer] for peer in others], [memory.takes[peer] for peer in others]
            own = memory.source, memory.target, kind.nbytes, self._rank, *kind.kernel
            result = reader.carry(sinks, sources, equal, gives, takes, *own, seconds)
            if result == _CARRIED and not reader.holds:
                return True
            if result == _ALL:
                self._take_frames()
            elif result != _CARRIED and any(unsent := reader.unsent()):
                self._send_rest(equal, gives, kind.nbytes, unsent)
            if result and reader.holds:
                self._give_back()
            return bool(result == _CARRIED)

    def go_on(self, frame: Frame, done: Done) -> None:
        """Go on with an exchange that ``carry`` has begun; ``frame`` is the frame that it has sent. As ``begin``."""
        with self._lock:
            self._waiting.append((frame, done))
            self._advance()

    def _send_rest(self, equal: bytes, gives: Sequence[int], nbytes: int, unsent: Sequence[int]) -> None:
        """Send the bytes at the end of frames that the sockets have not taken in C. Under the lock."""
        assert self._endpoint is not None
        for peer, address, count in zip(self._others, gives, unsent, strict=True):
            link = self._endpoint.link_to(peer) if count else None
            if link is not None:
                data = beginning_of(equal, nbytes * bool(address))
                data += ctypes.string_at(address, nbytes) if address else b""
                whole = Header(Kind.FRAME, first=len(data)).pack() + data
                self._endpoint.send(link, whole[-count:])
                self._note_unsent(link)

    def _take_frames(self) -> None:
        """Take the frames that were read in C. Under the lock."""
        for peer, frame in zip(self._others, self._reader.frames(), strict=True):
            if frame is not None:
                self._arrived[peer].append(frame)

    def receive(self, until: float, done: Callable[[], bool]) -> None:
        """Receive frames in C on this thread, until ``done``, or until the time ``until`` of ``time.perf_counter``.

        It may return at once: the thread then has to use the sockets as ``Endpoint.serve`` does.
        """
        if self._reader is None:
            return
        if torch.is_inference_mode_enabled():  # memory made in the caller's mode could not be written to later
            with torch.inference_mode(False):
                return self.receive(until, done)
        while not done():
            with self._lock:
                goes_on = self._read_frames(until)
            self.settle_all()
            if not goes_on:
                return

    def _read_frames(self, until: float) -> bool:
        """Receive the frames of the oldest exchange; returns whether they have come. Under the lock."""
        reader, endpoint, arrived = self._reader, self._endpoint, self._arrived
        seconds = until - time.perf_counter()
        if not self._waiting or self._unsent or seconds <= 0 or endpoint is None:
            return False
        sources = [-1 if arrived[peer] else endpoint.source(peer) for peer in self._others]
        if None in sources:
            return False
        endpoint.note_use()
        result: int = reader.receive(sources, self._guess, seconds)
        if result == _ALL:
            self._take_frames()
            self._advance()
        if result and reader.holds:
            self._give_back()
        return result == _ALL

    def _give_back(self) -> None:
        """Give data that was read in C, and is no frame of all ranks, to the links. Under the lock."""
        if self._reader.holds:
            assert self._endpoint is not None
            for peer, data in zip(self._others, self._reader.returned(), strict=True):
                if data:
                    self._endpoint.feed(peer, data)

    def settle_all(self) -> None:
        """Report the exchanges that are over, and messages that ``carry`` or ``receive`` has come across."""
        assert self._endpoint is not None
        self._endpoint.settle()

    def settle(self) -> None:
        """Report the exchanges that are over. From any thread, without locks."""
        while self._over and self._running.acquire(blocking=False):
            self._reporter = threading.get_ident()
            try:
                while self._over:
                    self._over.popleft()()
            finally:
                self._reporter = 0
                self._running.release()  # a thread that found it held relies on the check that follows

    def finish_reports(self, seconds: float) -> None:
        """Wait until no other thread reports an exchange, at most ``seconds``. From any thread, without locks."""
        if self._reporter != threading.get_ident() and self._running.acquire(timeout=seconds):
            self._running.release()
            self.settle()

    def arrived(self, peer: int, data: bytes | bytearray) -> None:
        """Handle a frame from ``peer``. Under the lock."""
        self._arrived[peer].append(data)
        self._advance()

    def _sent(self, link: MessageLink) -> None:
        """Handle that a socket has taken a frame; messages may wait behind it. Under the lock."""
        if self._unsent[link.peer] > 1:
            self._unsent[link.peer] -= 1
            return
        del self._unsent[link.peer]
        self._advance()

    def gone(self, peer: int, reason: str) -> None:
        """Handle the end of the connection with ``peer``. Under the lock."""
        del self._unsent[peer]
        self._gone[peer] = reason
        self._advance()

    def _advance(self) -> None:
        arrived = self._arrived
        while self._waiting:
            missing = [peer for peer in self._others if not arrived[peer]]
            if missing:
                lost = next((peer for peer in missing if peer in self._gone), None)
                if lost is None:
                    return
            elif self._unsent:
                return
            frame, done = self._waiting.popleft()
            error: Exception | None = None
            if missing:
                assert lost is not None
                error = ConnectionEndedError(lost, self._gone[lost])
            else:
                try:
                    for peer in self._others:
                        frame.put(peer, arrived[peer].popleft())
                except BackendError as exc:
                    error = exc
            self._over.append(partial(done, error))
