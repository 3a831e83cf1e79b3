"""The message protocol between two ranks, over the pair of rings between them, independent of the content.

A short message is eager: one SHORT frame, and the send is done when the frame is in the ring. The receiver copies the
frame into the pending receive, or else into an unexpected message. Flow control bounds the unexpected bytes per sender
by the size of a ring: the receiver counts the bytes of all short messages that arrive, publishes the bytes that were
matched beside the ring's tail, and rejects a frame beyond the limit. The receiver also rejects more than
``MOST_OFFERS`` unmatched offers.

A long message, or a short message beyond the limit, uses the rendezvous protocol: the sender announces it by an OFFER
(RTS), the receiver answers CLEAR (CTS) when the message is matched, and the sender streams DATA frames as the ring has
room, round-robin with its other messages to the same rank. Where C is in use, ``_rings.c`` writes and reads the DATA
frames of memory in one piece (``MessagePart``), without the GIL. While no other message of the comm is pending,
``_messages.c`` runs the whole protocol in the calls, and hands a message over that is not done after a spin. Its OFFER
also has the address of the message, in the payload of the frame; a receiver in C may read the message there (single
copy), and then says so in its CLEAR, which ends the message.

A short message of more than 32 KiB may be lent, between ranks in C: a LOAN has its address and a word, the claim. A
receiver that waits for the message sets the claim, reads the message by single copy, and sends CLEAR. Otherwise the
sender withdraws the loan within some 50 us, by the same word, and sends SHORT behind it: a send never waits for its
receive. The receiver measures which of the two is faster, since that depends on the caches that the ranks share, and
says so in a word beside the ring's tail. Python neither lends nor claims: it leaves a loan until that is withdrawn.

First frames of messages leave in the order of the calls, which gives the order per pair of ranks and tag. Tags share
the ring, and nothing else.

An OFFER from Python has the address, too, of a tensor in one piece. A rank that sends long messages while it receives
one reads that by single copy, up to ``READ`` bytes at a time, as both ranks then copy at once. A rank that only
receives takes the way that was faster so far (``Ways``).
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, final

from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.shm.arrivals import Arrival, TensorArrival
from asynccomm.backends.shm.board import RankPosition
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import LINE, WORD, Layout
from asynccomm.backends.shm.rings import HEADER, LinkState, Mapped, Reader, Writer, framed, largest_payload
from asynccomm.backends.shm.vectors import SMALL, Pieces
from asynccomm.errors import BackendError

if TYPE_CHECKING:
    from asynccomm.backends.shm import _core

# bytes of an eager payload: 256 KiB take 21 us one way, and 250 us with an OFFER and a CLEAR first
SHORT_BYTES: Final = 256 << 10
# bytes of a DATA frame with its header: 4 MiB travel at 33 GB/s; at 28 with half the size, at 17 to 22 with a quarter
FRAME: Final = 256 << 10

MOST_OFFERS: Final = 1 << 20  # unmatched offers of one rank: some 300 bytes each

SHORT, OFFER, CLEAR, DATA = 2, 3, 4, 5  # kinds of frames; those of padding and of loans are in ``rings``
READ: Final = 8 << 20  # bytes that a rank reads from the memory of another one in a step
TRIAL: Final = 64  # messages after which a receiver tries the slower way again
HAS_READ: Final = 1  # ``extra`` of a CLEAR: the receiver has read the message itself
_IDENTS = 1 << 32  # the ids of offers wrap around at this number


@final
class Ways:
    """Two ways to receive messages, reading them where they are and copying them out of the ring, and their times.

    Which is faster depends on the caches that the ranks share. ``_messages.c`` has the same for messages in C.
    """

    __slots__ = ("_count", "_seconds")

    def __init__(self) -> None:
        self._count = 0
        self._seconds = {True: 0.0, False: 0.0}  # for a byte, of reading and of copying; 0: not known

    def is_reading_faster(self) -> bool:
        """Whether to read the next message; of ``TRIAL`` messages, one goes the slower way."""
        self._count += 1
        read, copied = self._seconds[True], self._seconds[False]
        if not (read and copied):
            return copied > 0
        return (read < copied) == (self._count % TRIAL != 0)

    def note(self, read: bool, seconds: float, nbytes: int) -> None:
        """Count a time in a running mean; a rank that loses its core does not count as slow as that."""
        known, each = self._seconds[read], seconds / nbytes
        self._seconds[read] = known + (min(each, 4 * known) - known) / 4 if known else each


class Kept(NamedTuple):
    """An unexpected message: a short message that arrived before its receive was posted."""

    extra: int  # as in an Outgoing
    length: int
    data: bytes


class Offer(NamedTuple):
    """The announcement (RTS) of a long message."""

    extra: int
    length: int
    ident: int
    address: int = 0  #: of the message in the memory of its sender's process; 0: unknown


@final
class Outgoing:
    """A message to another rank."""

    __slots__ = ("extra", "ident", "left", "length", "nbytes", "parts", "pieces", "submission", "tag")

    submission: Submission
    tag: int
    extra: int  #: dtype code of a tensor, or bytes of a parcel's head
    length: int  #: elements of a tensor, or bytes of a parcel's payload
    parts: tuple[Tensor | bytes, ...]  #: the content, ``nbytes`` in all
    nbytes: int
    # set on a long message only: ``ident`` when it is offered, the others when it is cleared
    ident: int
    pieces: Pieces
    left: int

    @property
    def address(self) -> int:
        """The address of a tensor that is sent as it is, or else 0."""
        part, *others = self.parts
        return part.data_ptr() if isinstance(part, Tensor) and not others and arithmetic.is_plain(part) else 0

    def __init__(
        self,
        submission: Submission,
        tag: int,
        extra: int,
        length: int,
        parts: tuple[Tensor | bytes, ...],
        nbytes: int,
    ) -> None:
        self.submission, self.tag, self.extra, self.length = submission, tag, extra, length
        self.parts, self.nbytes = parts, nbytes


class MessagePart(NamedTuple):
    """A part of a long message that is in one piece of memory at this rank."""

    message: Outgoing | Arrival
    ident: int
    address: int
    nbytes: int


@final
class Tally:
    """The count of pending operations, and the callback for finished operations; shared by all links of a rank.

    Args:
        state: holds the count.
    """

    __slots__ = ("done", "state")

    def __init__(self, done: Callable[[Submission], None], state: RankPosition) -> None:
        self.done = done
        self.state: RankPosition = state

    @property
    def pending(self) -> int:
        """The number of pending operations."""
        return self.state.messages

    @pending.setter
    def pending(self, pending: int) -> None:
        self.state.messages = pending

    def over(self, submission: Submission) -> None:
        """Count an operation as done, and report it."""
        self.pending -= 1
        self.done(submission)


def largest_short(layout: Layout) -> int:
    """Bytes of the largest message that is sent eagerly."""
    return min(SHORT_BYTES, layout.ring // 4)


@final
class Link:
    """The endpoint of this rank for messages to and from one peer."""

    __slots__ = (
        "_clears",
        "_least",
        "_matched_at",
        "_offered",
        "_offers",
        "_ring",
        "_segment",
        "_short",
        "_streams",
        "_taken_at",
        "_tally",
        "_unmatched",
        "_waiting",
        "_words",
        "_writer",
        "frame",
        "incoming",
        "lines",
        "peer",
        "reader",
        "reading",
        "state",
        "ways",
    )

    def __init__(
        self,
        mapped: Mapped,
        rank: int,
        peer: int,
        fence: Fence,
        ring: Callable[[int], None],
        tally: Tally,
        state: LinkState,
        segment: _core.Segment | None,
    ) -> None:
        layout = mapped.layout
        self.peer: int = peer
        self.state: LinkState = state
        self.reader: Reader = Reader(mapped, peer, rank, fence, state)
        self.incoming: dict[int, Arrival] = {}  #: cleared long messages, by the sender's ident
        #: by tag: queue of matched receives and messages; the head of the first is incomplete (in ``incoming``)
        self.lines: dict[int, deque[tuple[Submission, Kept | Offer]]] = {}
        self._words = mapped.words
        self._writer = Writer(mapped, rank, peer, fence, state)
        self._ring = ring
        self._tally = tally
        self._short = largest_short(layout)
        self.frame: Final = min(FRAME - HEADER, largest_payload(layout.ring))  #: bytes of a DATA frame, at most
        self._segment = segment  # in which DATA frames of parts of ``_least`` bytes or more move in C; None without C
        self._least = min(SMALL, self.frame)
        self._unmatched = layout.ring  # limit of bytes of short frames in flight or unexpected
        self._waiting: deque[Outgoing] = deque()  # messages without their first frame in the ring
        state.waiting = self._waiting
        self._offered: dict[int, Outgoing] = {}  # messages that wait for CLEAR, by ident
        self._streams: deque[Outgoing] = deque()  # cleared messages, round-robin
        self._clears: deque[tuple[int, int]] = deque()  # CLEARs that are not in the ring yet: ident, and its ``extra``
        self.ways: Ways = Ways()  #: of messages from the peer
        self.reading: dict[int, tuple[TensorArrival, int]] = {}  #: messages that are read where they lie
        self._taken_at = (layout.ring_start(rank, peer) + LINE) // WORD + 1  # word: bytes that the peer matched
        self._offers = 0  # received offers that are not matched
        self._matched_at = (layout.ring_start(peer, rank) + LINE) // WORD + 1  # word that publishes ``state.matched``

    @property
    def backlog(self) -> int:
        """The number of messages to be written and offers to be answered."""
        return 0 if self.state.gone else len(self._waiting) + len(self._streams) + len(self._clears)

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, message: Outgoing) -> bool:
        """Write the first frame of a message, in the order of the calls.

        Returns: False if the message was queued for ``pump``, which writes it when the ring has room.
        """
        if self._waiting or self.state.gone or not self._begin(message):
            self._waiting.append(message)
            return self.state.gone
        self._ring(self.peer)
        return True

    def go_on(self, message: Outgoing, ident: int, cleared: bool, moved: int) -> None:
        """Send the rest of a long message that C has begun."""
        message.ident = ident
        self._offered[ident] = message
        if cleared:
            self.clear_came(ident)
            message.pieces.span()  # which ``skip`` asks for
            message.pieces.skip(moved)
            message.left -= moved

    def clear_came(self, ident: int, has_read: bool = False) -> None:
        """Handle the peer's CLEAR for an offered message.

        Args:
            has_read: whether the peer has read the message already (``_messages.c``).
        """
        message = self._offered.pop(ident, None)
        if message is None:
            raise BackendError(f"rank {self.peer} is clear for message {ident}, which was not offered to it")
        if message.nbytes and not has_read:
            message.pieces = Pieces(message.parts)
            message.left = message.nbytes
            self._streams.append(message)
        else:
            self._tally.over(message.submission)

    def pump(self) -> bool:
        """Write to the ring as long as it has room. Returns whether anything was written."""
        moved = False
        while self._clears and self._writer.put(CLEAR, ident=self._clears[0][0], extra=self._clears[0][1]):
            self._clears.popleft()
            moved = True
        while not self._clears and (self._waiting or self._streams):
            if self._waiting:  # first frames alternate with DATA frames: neither kind starves the other
                if not self._begin(self._waiting[0]):
                    break
                self._waiting.popleft()
                moved = True
            if self._streams:
                if self._in_core() or not self._stream():
                    break
                moved = True
        if moved:
            self._ring(self.peer)
        return moved

    def outgoing_parts(self) -> list[MessagePart]:
        """The parts of messages that C may write now."""
        if self.state.gone or self._waiting or self._clears:  # ``pump`` writes these first
            return []
        spans = [(message, *message.pieces.span()) for message in self._streams]
        return [MessagePart(message, message.ident, at, n) for message, at, n in spans if n >= self._least]

    def wrote(self, message: Outgoing, nbytes: int) -> None:
        """Count bytes of ``outgoing_parts`` as written."""
        message.pieces.skip(nbytes)
        message.left -= nbytes
        self._streams.remove(message)
        if message.left:
            self._streams.append(message)
        else:
            self._tally.over(message.submission)

    def _begin(self, message: Outgoing) -> bool:
        """Write the first frame of a message; False if the ring has no room."""
        nbytes = message.nbytes
        if nbytes <= self._short:
            size = framed(nbytes)
            if self.state.sent + size - self._words[self._taken_at] <= self._unmatched:
                target = self._writer.reserve(nbytes)
                if not target:
                    return False
                parts = message.parts
                if len(parts) == 1 and isinstance(parts[0], Tensor):  # the fast path of every small tensor
                    values = arithmetic.plain(parts[0])
                    ctypes.memmove(target, values.data_ptr(), nbytes)  # without the GIL
                else:
                    Pieces(parts).copy_to(target, nbytes)
                self._writer.publish(SHORT, message.tag, message.extra, 0, message.length)
                self.state.sent += size
                self._tally.over(message.submission)
                return True
        ident = self.state.next_ident % _IDENTS
        address = message.address if self._segment is not None and self._segment.reads_all() else 0
        target = self._writer.reserve(WORD if address else 0)
        if not target:
            return False
        if address:
            ctypes.c_uint64.from_address(target).value = address
        self._writer.publish(OFFER, message.tag, message.extra, ident, message.length)
        message.ident = ident
        self._offered[ident] = message
        self.state.next_ident += 1
        return True

    def _in_core(self) -> bool:
        """Whether C writes the next frame of a long message."""
        return self._segment is not None and not self._waiting and self._streams[0].pieces.span()[1] >= self._least

    def _stream(self) -> bool:
        message = self._streams[0]
        nbytes = min(message.left, self.frame, self._writer.run)
        target = self._writer.reserve(nbytes)
        if not target:
            return False
        message.pieces.copy_to(target, nbytes)
        self._writer.publish(DATA, ident=message.ident)
        self._ring(self.peer)  # the peer copies this frame out while the next frame is copied in
        message.left -= nbytes
        self._streams.rotate(-1)
        if not message.left:
            self._streams.pop()
            self._tally.over(message.submission)
        return True

    # -- receiving ----------------------------------------------------------------------------------------------------

    def clear(self, ident: int, extra: int = 0) -> None:
        """Send CLEAR for an offered message; ``extra`` HAS_READ ends the message."""
        if ident in self.incoming:
            raise BackendError(f"rank {self.peer} has offered message {ident} twice")
        if not self._clears and self._writer.put(CLEAR, ident=ident, extra=extra):
            self._ring(self.peer)
        else:
            self._clears.append((ident, extra))

    def read_at(self, ident: int, arrival: TensorArrival, address: int) -> None:
        """Receive an offered message by single copy, in calls of ``read_on``."""
        if ident in self.reading:
            raise BackendError(f"rank {self.peer} has offered message {ident} twice")
        self.reading[ident] = arrival, address

    def read_on(self) -> TensorArrival | bool:
        """Read more of one of these messages; returns whether anything was read, or a message that is complete."""
        assert self._segment is not None
        ident, (arrival, address) = next(iter(self.reading.items()))
        to, left = arrival.span()
        nbytes = min(left, READ)
        found = self._segment.read(self.peer, to, address, nbytes)
        if found is False:
            return False  # the engine will find the reason
        del self.reading[ident]
        if found is None:
            anew = TensorArrival(arrival.receive)
            self.clear(ident)
            self.incoming[ident] = anew
            return True
        arrival.skip(nbytes)
        if arrival.left:
            self.reading[ident] = arrival, address + nbytes
            return True
        self.clear(ident, HAS_READ)
        return arrival

    @property
    def sends_long(self) -> bool:
        """Whether long messages to the peer are in flight."""
        return bool(self._offered or self._streams)

    def incoming_parts(self) -> list[MessagePart]:
        """The parts of messages that C may read as their frames arrive."""
        if self.state.gone:
            return []
        spans = [(ident, arrival, arrival.span()) for ident, arrival in self.incoming.items()]
        return [MessagePart(arrival, ident, *span) for ident, arrival, span in spans if span and span[1] >= self._least]

    def due(self, ident: int, nbytes: int) -> Arrival:
        """The message that a DATA frame of ``nbytes`` belongs to. Raises BackendError if they are not due."""
        arrival = self.incoming.get(ident)
        if arrival is None or not 0 < nbytes <= arrival.left:
            raise BackendError(f"rank {self.peer} sends {nbytes} bytes of message {ident}, which are not due")
        return arrival

    def short_came(self, nbytes: int) -> None:
        """Count a short message that arrived. Raises BackendError if it exceeds the limit of unmatched bytes."""
        self.state.came += framed(nbytes)
        if self.state.came - self.state.matched > self._unmatched:
            raise BackendError(f"rank {self.peer} sends more than {self._unmatched} bytes before they are asked for")

    def keep_offer(self) -> None:
        """Count an unmatched offer. Raises BackendError if there are too many."""
        self._offers += 1
        if self._offers > MOST_OFFERS:
            raise BackendError(f"rank {self.peer} has sent {self._offers} messages that nobody has asked for")

    def forget_offer(self) -> None:
        """Count an unmatched offer as matched."""
        self._offers -= 1

    def count(self, nbytes: int) -> None:
        """Count a short message as matched, and publish that to the sender, which may then send as much more."""
        self.state.matched += framed(nbytes)
        self._words[self._matched_at] = self.state.matched

    def abandon(self) -> list[Submission]:
        """Remove and return the operations in flight, which can never complete."""
        lost = [message.submission for message in (*self._waiting, *self._offered.values())]
        lost += [arrival.receive for arrival in self.incoming.values()]
        lost += [arrival.receive for arrival, _ in self.reading.values()]
        for line in self.lines.values():
            lost += [receive for receive, _ in list(line)[1:]]
        lost += [message.submission for message in self._streams]
        for queue in (
            self._waiting,
            self._offered,
            self.incoming,
            self.reading,
            self.lines,
            self._streams,
            self._clears,
        ):
            queue.clear()
        return lost
