"""The sockets of one rank for messages, and the thread that serves them.

Each rank listens on one port. Its first message to another rank, or its first receive from it, opens a connection to
that rank (``links.py``), so the end of a rank shows as the end of a connection. The token that a connecting rank must
show comes from the store. Connections for another channel than messages are handed over (``streams.py``).

Any thread may use the sockets, under a lock: a call writes as much as a socket takes, and a task that is about to wait
reads for some time (``serve``). At all other times the event loop reads the sockets. A thread would need the GIL in
the middle of the loop's work, and would have to wake the loop afterwards.

The thread of the endpoint makes messages move while the loop is blocked. After a pause from an arrival on, it looks
whether the loop, or another reader, has used the sockets since. If not, it serves them itself, from then on at once,
until the loop comes back. It also serves them while a long message is under way, which would hold up the loop's tasks;
the first part of such a message ends the pause.

``_inner`` has all sockets. The thread waits for ``_outer``, and the loop for ``_front``, which both contain ``_inner``;
``_front`` does not while others than the loop serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Self, final

import torch

from asynccomm.backends.gloo.links import Buffer, MessageLink
from asynccomm.backends.gloo.messages import Header
from asynccomm.control.transport.sockets import tcp_socket
from asynccomm.core.mailbox import Mailbox
from asynccomm.errors import BackendError

HELLO_SECONDS: Final = 5.0  # for a new connection to show the token
UNAUTHENTICATED: Final = 64  # connections without a token at once, beside one for each rank
PAUSE_SECONDS: Final = 0.1  # until a rank without descriptors accepts connections again
TOKEN_BYTES: Final = 16
SHORTEST_PAUSE: Final = 5e-4  # seconds for the loop to use the sockets before the thread does: some turns of a loop
LONGEST_PAUSE: Final = 4e-3  # the same after the loop was never late; as long as Python may take to pass on the GIL

_HELLO: Final = struct.Struct(f"<{TOKEN_BYTES}sII")  # the token, the rank that connects, the channel
MESSAGES: Final = 0  # the channel of messages
_PLACE: Final = struct.Struct("<H?")  # of a contact: the port, and whether there are streams
_log = logging.getLogger("asynccomm")


@final
class Contact:
    """The place where a rank listens for messages, and its token, as they are in the store.

    Attributes:
        streams: whether the rank can move long data in C (``streams.py``).
    """

    def __init__(self, address: str, port: int, token: bytes, streams: bool = False) -> None:
        self.address = address
        self.port = port
        self.token = token
        self.streams = streams

    def pack(self) -> bytes:
        return self.token + _PLACE.pack(self.port, self.streams) + self.address.encode()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raises: BackendError."""
        if len(data) <= TOKEN_BYTES + _PLACE.size:
            raise BackendError("the store has a corrupt address of a rank for messages")
        port, streams = _PLACE.unpack_from(data, TOKEN_BYTES)
        return cls(data[TOKEN_BYTES + _PLACE.size :].decode(errors="replace"), port, data[:TOKEN_BYTES], streams)


@final
class Endpoint:
    """The connections of one rank for messages.

    Args:
        address: of the interface to listen on.
        name: of the thread.
        streams: of the contact.
    """

    def __init__(self, rank: int, size: int, address: str, name: str, *, streams: bool = False) -> None:
        self._rank = rank
        self._size = size
        self._name = name
        self._sock = tcp_socket(address)
        self._sock.setblocking(False)
        self.contact: Contact = Contact(address, self._sock.getsockname()[1], secrets.token_bytes(TOKEN_BYTES), streams)
        self._contacts: Sequence[Contact] = ()
        self.lock: threading.Lock = threading.Lock()  #: held while the sockets or the queues of messages are used
        self._arrived: Callable[[MessageLink, Header], object] = _unused
        self._gone: Callable[[int, str], object] = _unused
        self._settle: Callable[[], object] = _unused
        #: called ahead of each read of a link, under the lock: it may ``feed`` data that it has read itself
        self.before_read: Callable[[], object] = _unused
        #: called with a rank and the socket of its connection for another channel, which blocks; on any thread
        self.channels: dict[int, Callable[[int, socket.socket], object]] = {}
        self._links: dict[int, MessageLink] = {}  # by descriptor
        self._strangers: dict[MessageLink, float] = {}  # links without a token yet, with their deadlines
        self._outbound: dict[int, MessageLink] = {}  # by rank
        self._inbound: dict[int, MessageLink] = {}
        self._pending: set[MessageLink] = set()  # links with data that waits for room in the socket
        self._left: set[MessageLink] = set()  # links on which the end is announced
        self._ended = False
        self._mailbox: Mailbox | None = None  # None: no loop reads
        self._turns = 0  # how often the loop, or a thread in ``serve``, has used the sockets
        self._late = False  # the loop has left an arrival to the thread, and has not used the sockets since
        self._bulk: set[MessageLink] = set()  # links with much data under way
        self._readers = 0  # threads in ``serve`` other than the loop's
        self._refused = False  # a refusal has been logged
        self._accept_at = 0.0  # when the rank listens again; 0: it listens
        self._thread: threading.Thread | None = None
        self._listens = False  # whether ``_front`` contains ``_inner``
        with contextlib.ExitStack() as unless_made:  # the process may have no more descriptors
            unless_made.callback(self._sock.close)
            self._inner = select.epoll()
            self._outer = select.epoll()
            self._front = select.epoll()
            self._pause = select.epoll()
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            unless_made.callback(os.close, self._wake)
            self._inner.register(self._sock.fileno(), select.EPOLLIN)
            self._outer.register(self._inner.fileno(), select.EPOLLIN)
            self._outer.register(self._wake, select.EPOLLIN)
            self._pause.register(self._wake, select.EPOLLIN)
            unless_made.pop_all()

    def start(
        self,
        contacts: Sequence[Contact],
        arrived: Callable[[MessageLink, Header], object],
        gone: Callable[[int, str], object],
        settle: Callable[[], object],
        mailbox: Mailbox | None = None,
    ) -> None:
        """Serve the sockets from now on.

        Args:
            contacts: of all ranks.
            arrived: called with each header, under the lock; and raises nothing.
            gone: called with a rank at the end of each connection with it, and the reason, under the lock.
            settle: called after the sockets were used, without the lock.
            mailbox: of the running loop, which is to read arrivals; None: the thread does everything.
        """
        self._contacts = contacts
        self._arrived, self._gone, self._settle = arrived, gone, settle
        if mailbox is not None:
            self._mailbox = mailbox
            self._front.register(self._inner.fileno(), 0)
            self._listen()
            mailbox.loop.add_reader(self._front.fileno(), self._on_readable)
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._thread.start()

    # -- under the lock ------------------------------------------------------------------------------------------------

    def link_to(self, peer: int) -> MessageLink | None:
        """The link for messages to ``peer``, opened if there is none; None: the rank has gone. Under the lock."""
        link = self._outbound.get(peer)
        return link if link is not None or self._ended else self._connect(peer)

    def send(self, link: MessageLink, *parts: bytes | bytearray | Buffer) -> None:
        """Send ``parts`` on ``link``; they may change afterwards. Under the lock."""
        if link.fd not in self._links:
            return
        try:
            link.send(*parts)
        except OSError as exc:
            self._end(link, exc)
        else:
            if link.pending:
                self._watch(link)
                self._note_bulk(link)

    def inbound(self, peer: int) -> MessageLink | None:
        """The link on which the next frame of ``peer`` begins; None: a part of it was read. Under the lock."""
        link = self._inbound.get(peer)
        return link if link is not None and link.fd in self._links and not link.receiving else None

    def source(self, peer: int) -> int | None:
        """The descriptor of ``inbound``. Under the lock."""
        link = self.inbound(peer)
        return None if link is None else link.fd

    def sink(self, peer: int) -> int | None:
        """The descriptor for the next frame to ``peer``; None: there is none, or data waits for it. Under the lock."""
        link = self._outbound.get(peer)
        return link.fd if link is not None and link.fd in self._links and not link.pending else None

    @property
    def writing(self) -> bool:
        """Whether data waits for room in a socket. Under the lock."""
        return bool(self._pending)

    def cut(self, peer: int) -> bool:
        """Whether the connection of ``peer`` has ended in the middle of a message. Under the lock."""
        link = self._inbound.get(peer)
        return link is not None and link.fd not in self._links and link.halfway

    def note_use(self) -> None:
        """Note that another reader than the thread uses the sockets. Under the lock."""
        self._turns += 1
        self._late = False

    def feed(self, peer: int, data: bytes) -> None:
        """Use data from the descriptor of ``source`` that was read elsewhere. Under the lock; then ``settle``."""
        link = self._inbound[peer]
        if link.fd in self._links:
            link.feed(data)
            self._note_bulk(link)

    def flush(self, link: MessageLink) -> None:
        """Write the queued data of ``link``. Under the lock."""
        if link.fd not in self._links:
            return
        try:
            link.write()
        except OSError as exc:
            if link.outbound:  # else a reader finds the end, behind the messages that have come
                self._end(link, exc)
        else:
            self._watch(link)
            self._note_bulk(link)

    def _connect(self, peer: int) -> MessageLink | None:
        contact = self._contacts[peer]
        family = socket.AF_INET6 if ":" in contact.address else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as exc:
            self._gone(peer, f"no socket for messages to it: {exc.strerror}")
            return None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = MessageLink(sock, peer, outbound=True, arrived=self._arrived)
        self._outbound[peer] = self._links[link.fd] = link
        error = sock.connect_ex((contact.address, contact.port))
        if error not in (0, errno.EINPROGRESS):
            self._end(link, OSError(error, os.strerror(error)))
            return None
        link.put(_HELLO.pack(contact.token, self._rank, MESSAGES))
        self.flush(link)  # a connection within the host is there already, or was refused
        return link if self._links.get(link.fd) is link else None

    def _watch(self, link: MessageLink) -> None:
        """Register ``link`` for the events that it waits for."""
        events = select.EPOLLIN
        if link.pending:
            events |= select.EPOLLOUT
            self._pending.add(link)
        else:
            self._pending.discard(link)
        if events != link.watched:
            if link.watched:
                self._inner.modify(link.fd, events)
            else:
                self._inner.register(link.fd, events)
            link.watched = events

    def _note_bulk(self, link: MessageLink) -> None:
        """Have the thread serve the sockets while there is much data under way."""
        if link.bulk:
            if not self._bulk and not self._ended:
                os.eventfd_write(self._wake, 1)
            self._bulk.add(link)
        elif link in self._bulk:
            self._bulk.remove(link)
        else:
            return
        self._listen()

    def _listen(self) -> None:
        """Have the loop be told of arrivals, unless another reader serves the sockets."""
        listens = not (self._bulk or self._readers or self._ended)
        if self._mailbox is not None and listens != self._listens:
            self._listens = listens
            self._front.modify(self._inner.fileno(), select.EPOLLIN if listens else 0)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptors, probably
                self._inner.modify(self._sock.fileno(), 0)
                self._accept_at = time.monotonic() + PAUSE_SECONDS
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while len(self._strangers) >= UNAUTHENTICATED + self._size:
                self._refuse(next(iter(self._strangers)), "too many at once")
            link = MessageLink(sock, -1, outbound=False, arrived=self._arrived)
            link.expect_hello(_HELLO.size, self._admit)
            self._links[link.fd] = link
            self._strangers[link] = time.monotonic() + HELLO_SECONDS
            self._watch(link)
            self._read(link)

    def _admit(self, link: MessageLink, hello: bytes) -> None:
        token, peer, channel = _HELLO.unpack(hello)
        if not hmac.compare_digest(token, self.contact.token):
            self._refuse(link, "with a wrong token")
        elif channel:
            self._hand_over(link, peer, channel)
        elif peer >= self._size or peer in self._inbound:
            self._refuse(link, "of a rank that cannot be")
        else:
            del self._strangers[link]
            link.peer = peer
            self._inbound[peer] = link

    def _hand_over(self, link: MessageLink, peer: int, channel: int) -> None:
        """Pass the connection on to its channel. The peer sends nothing before it has the answer."""
        adopt = self.channels.get(channel)
        if adopt is None or peer >= self._size or peer == self._rank or link.receiving:
            self._refuse(link, "of a rank or for a channel that cannot be")
            return
        del self._strangers[link], self._links[link.fd]
        self._inner.unregister(link.fd)
        link.sock.setblocking(True)
        with contextlib.suppress(OSError):  # the peer has gone, which the channel finds
            link.sock.send(b"\1")
        adopt(peer, link.sock)

    def _refuse(self, link: MessageLink, reason: str) -> None:
        if not self._refused:
            _log.warning("%s refused a connection: %s; others are refused silently", self._name, reason)
        self._refused = True
        self._drop(link)

    def _drop(self, link: MessageLink) -> None:
        self._strangers.pop(link, None)
        self._pending.discard(link)
        if link in self._bulk:
            self._bulk.remove(link)
            self._listen()
        if self._links.pop(link.fd, None) is not None:
            link.close()  # which removes it from the epoll

    def _end(self, link: MessageLink, exc: Exception) -> None:
        """Handle the end of a connection."""
        self._drop(link)
        peer = link.peer
        if peer < 0 or self._ended:
            return
        if link.outbound and peer not in self._inbound:
            self._accept()  # the messages of a rank that has closed may be waiting there
        inbound = self._inbound.get(peer)
        if link.outbound and inbound is not None and inbound.fd in self._links:
            while inbound.fd in self._links and self._read(inbound):
                pass
        reason = getattr(exc, "strerror", None) or "closed"
        self._gone(peer, f"its connection for messages ended: {reason}")

    def _read(self, link: MessageLink) -> bool:
        """Read once. Returns whether something has come."""
        self.before_read()
        try:
            came = link.read()
        except (EOFError, OSError) as exc:
            self._end(link, exc)
            return False
        self._note_bulk(link)
        return came

    def _serve(self) -> bool:
        """Use the sockets that are ready, once each; returns whether any was. Under the lock."""
        ready = self._inner.poll(0)
        for fd, events in ready:
            if fd == self._sock.fileno():
                self._accept()
                continue
            link = self._links.get(fd)
            if link is not None and events & ~select.EPOLLOUT:
                self._read(link)
            if link is not None and events & select.EPOLLOUT:
                self.flush(link)
        return bool(ready)

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        """Use the sockets once."""
        if torch.is_inference_mode_enabled():  # of the task that suspended: memory made in it could not be written to
            with torch.inference_mode(False):
                return self._on_readable()
        with self.lock:
            if self._ended:
                return
            self.note_use()
            self._serve()
        self._settle()

    def _on_return(self) -> None:
        """Have the thread wait again: the loop is not blocked any more."""
        with self.lock:
            self._late = False

    def detach(self) -> None:
        """Leave the sockets to the thread. On the loop, more than once."""
        with self.lock:
            mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.loop.remove_reader(self._front.fileno())
            self._front.close()

    # -- from any thread -----------------------------------------------------------------------------------------------

    def connect_channel(self, peer: int, channel: int, adopt: Callable[[socket.socket], object]) -> None:
        """Connect a channel to ``peer``. Blocks, until the socket is shut down: ``adopt`` gets it at once.

        The socket brings a byte when ``peer`` has accepted it. Raises: OSError.
        """
        contact = self._contacts[peer]
        sock = socket.socket(socket.AF_INET6 if ":" in contact.address else socket.AF_INET, socket.SOCK_STREAM)
        adopt(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect((contact.address, contact.port))
        sock.sendall(_HELLO.pack(contact.token, self._rank, channel))

    def serve(self, until: float, done: Callable[[], bool]) -> None:
        """Serve the sockets on this thread until ``done``, or until the time ``until`` of ``time.perf_counter``."""
        if torch.is_inference_mode_enabled():  # memory made in the caller's mode could not be written to later
            with torch.inference_mode(False):
                return self.serve(until, done)
        mailbox = self._mailbox
        apart = mailbox is not None and asyncio._get_running_loop() is not mailbox.loop
        if apart:
            self._count_reader(1)
        try:
            while not done() and time.perf_counter() < until:
                with self.lock:
                    if self._ended:
                        return
                    self.note_use()
                    self._serve()
                self._settle()
                if done():
                    return
                os.sched_yield()  # the other rank may need this core
        finally:
            if apart:
                self._count_reader(-1)

    def _count_reader(self, number: int) -> None:
        with self.lock:
            self._readers += number
            self._listen()

    def settle(self) -> None:
        """Report the operations that ``feed`` has completed. Without the lock."""
        self._settle()

    def drain(self, seconds: float) -> None:
        """Receive the data that has arrived already, in at most ``seconds`` of CPU time: the machine may be busy."""
        end = time.thread_time() + seconds
        self.serve(math.inf, lambda: not self._ready() or time.thread_time() > end)

    def _ready(self) -> bool:
        with self.lock:
            return not self._ended and bool(self._inner.poll(0))

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        pause = SHORTEST_PAUSE
        while True:
            arrived = bool(self._outer.poll(self._timeout()))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            turns, late = self._turns, False
            waits = arrived and not (self._ended or self._late or self._bulk or self._mailbox is None)
            if waits:
                self._pause.poll(pause)
                if self._turns != turns:  # the loop runs
                    pause = min(2 * pause, LONGEST_PAUSE)
                    if not (self._strangers or self._accept_at or self._ended):
                        continue
            with self.lock:
                if self._ended:
                    return
                if not waits:
                    self._serve()
                elif self._turns == turns and self._serve():
                    self._late = late = True
                    pause = SHORTEST_PAUSE
                self._check_time()
                mailbox = self._mailbox if late else None
            self._settle()
            if mailbox is not None:
                mailbox.post(self._on_return)

    def _timeout(self) -> float | None:
        with self.lock:
            times = [*list(self._strangers.values())[:1], *([self._accept_at] if self._accept_at else [])]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _check_time(self) -> None:
        now = time.monotonic()
        if self._accept_at and now >= self._accept_at:
            self._accept_at = 0.0
            self._inner.modify(self._sock.fileno(), select.EPOLLIN)
        for link, due in list(self._strangers.items()):
            if now < due:
                break
            self._refuse(link, "without a token in time")

    # -- ending --------------------------------------------------------------------------------------------------------

    def leave(self, seconds: float) -> None:
        """Let the other ranks receive everything that was sent, in at most ``seconds``; then ``close``. Blocks."""
        end = time.monotonic() + seconds
        # a peer closes a connection when it has read everything; until then, closing could destroy data on the way
        while self._leaving() and time.monotonic() < end:
            time.sleep(0.0005)

    def _leaving(self) -> bool:
        """Announce the end on links without unwritten data; returns whether any link is still open."""
        with self.lock:
            links = [link for link in self._outbound.values() if link.fd in self._links]
            for link in links:
                if not link.pending and link not in self._left:
                    self._left.add(link)
                    with contextlib.suppress(OSError):  # the peer has closed it, which the thread will find
                        link.sock.shutdown(socket.SHUT_WR)
            return bool(links)

    def close(self) -> None:
        """Close all connections, and end the thread. From any thread, more than once."""
        with self.lock:
            if self._ended:
                return
            self._ended = True
            for link in list(self._links.values()):
                self._drop(link)
            self._sock.close()
            self._listen()
            os.eventfd_write(self._wake, 1)
            mailbox = self._mailbox
        if mailbox is not None:
            mailbox.post(self.detach)

    def join(self, seconds: float) -> None:
        """After ``close``: wait for the thread, and free the descriptors."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)
        with self.lock:
            if self._wake >= 0 and (self._thread is None or not self._thread.is_alive()):
                self._inner.close()
                self._outer.close()
                self._pause.close()
                if self._mailbox is None or self._mailbox.loop.is_closed():
                    self._front.close()  # else the loop is told of it: ``detach`` closes it
                os.close(self._wake)
                self._wake = -1


def _unused(*_: object) -> None:
    """Stands for the functions that ``start`` sets."""
