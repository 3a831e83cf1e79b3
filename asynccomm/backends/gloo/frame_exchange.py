"""The exchange of frames: each rank sends its frame to all ranks, in the order of its collectives.

Frames use the sockets of messages, where a waiting task reads by itself; gloo would need two more threads. An
exchange is over when the frames of all ranks have arrived, and the sockets have taken this rank's own: a process may
end right behind a collective. Exchanges end in order, one at a time.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias, final

from asynccomm.backends.gloo.endpoint import Endpoint
from asynccomm.backends.gloo.frames import Frame
from asynccomm.backends.gloo.links import MessageLink
from asynccomm.backends.gloo.messages import Header, Kind
from asynccomm.errors import BackendError

JOINED: Final = 4 << 10  # bytes of a frame that is copied behind its header: two parts cost the system call as much

Done: TypeAlias = Callable[[Exception | None], object]


@final
class FrameExchange:
    """The frames of one rank and those that have arrived from the others."""

    def __init__(self, rank: int, size: int) -> None:
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

    def open(self, endpoint: Endpoint) -> None:
        """Use the sockets of ``endpoint``."""
        self._endpoint, self._lock = endpoint, endpoint.lock

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
                        header = Header(Kind.FRAME, first=len(data)).pack()
                        endpoint.send(link, *((header + data,) if len(data) <= JOINED else (header, data)))
                        if link.pending and peer not in self._gone:
                            self._unsent[peer] += 1
                            link.put(done=partial(self._sent, link))
            self._advance()

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
                error = BackendError(f"rank {lost}: {self._gone[lost]}")
            else:
                try:
                    for peer in self._others:
                        frame.put(peer, arrived[peer].popleft())
                except BackendError as exc:
                    error = exc
            self._over.append(partial(done, error))
