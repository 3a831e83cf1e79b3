"""Two ranks and the pair of rings between them: how messages travel, whatever they carry.

A short message is one frame, and is over for its sender when it is in the ring. The receiver takes it out into the
receive that waits for it, or else into memory of its own, of which a sender may fill no more than the size of a ring:
the receiver publishes how many bytes of short messages it has matched, in the line of the tail. It counts what comes,
and takes no more than that. Nor does it keep more than ``MOST_OFFERS`` offers.

A long message, or a short one beyond that limit, is announced by an OFFER. When it is matched the receiver answers
CLEAR, and the sender streams DATA as the ring has room, in turn with the other messages to that rank.

Frames that begin a message leave in the order of the calls, which makes the order per pair and tag; the tags share the
ring, and nothing else.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, final

from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import LINE, WORD
from asynccomm.backends.shm.rings import HEADER, Mapped, Reader, Writer, framed, largest_payload
from asynccomm.backends.shm.vectors import Pieces
from asynccomm.errors import BackendError

# bytes of payload: 64 KiB take 6 us one way, 12 us with asking first
SHORT_BYTES: Final = 64 << 10
# bytes of a DATA frame with its header: 4 MiB at 33 GB/s; frames of half the size 28, of a quarter 17 to 22
FRAME: Final = 256 << 10

MOST_OFFERS: Final = 1 << 20  # of one rank that may have come and wait for their receives: some 300 bytes each

SHORT, OFFER, CLEAR, DATA = 2, 3, 4, 5  # kinds of frames; 1 is padding
_IDENTS = 1 << 32  # a message's number is used again after so many offers


class Kept(NamedTuple):
    """A short message that came before its receive."""

    extra: int  # as of an Outgoing
    length: int
    data: bytes


class Offer(NamedTuple):
    """A long message that has no receive yet."""

    extra: int
    length: int
    ident: int


@final
class Outgoing:
    """A message that leaves."""

    __slots__ = ("extra", "ident", "left", "length", "nbytes", "parts", "pieces", "submission", "tag")

    submission: Submission
    tag: int
    extra: int  #: code of a tensor's dtype, or bytes of a parcel's head
    length: int  #: elements of a tensor, or bytes of a parcel's payload
    parts: tuple[Tensor | bytes, ...]  #: its bytes, ``nbytes`` of them
    nbytes: int
    # a long one has these, from when it is offered or cleared
    ident: int
    pieces: Pieces
    left: int

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


class Arrival(Protocol):
    """A long message that comes in."""

    @property
    def receive(self) -> Submission:
        """What gets it."""

    @property
    def left(self) -> int:
        """Bytes that are still due."""

    def take(self, address: int, nbytes: int) -> bool:
        """The next bytes. Returns whether it now became known where all others go, and was not before."""

    def finish(self, source: int) -> None:
        """Nothing is due any more: bring it to where it belongs."""


@final
class TensorArrival:
    """A tensor that comes."""

    __slots__ = ("_address", "_land", "_values", "left", "receive")

    def __init__(self, receive: Submission) -> None:
        self.receive: Final = receive
        self._values, self._land = arithmetic.landing(receive.outputs[0])
        self._address = self._values.data_ptr()
        self.left = self._values.nbytes  #: bytes that are still due

    def take(self, address: int, nbytes: int) -> bool:
        """The next bytes."""
        ctypes.memmove(self._address, address, nbytes)  # without the GIL
        self._address += nbytes
        self.left -= nbytes
        return False

    def finish(self, source: int) -> None:
        """Nothing is due any more."""
        if self._land is not None:
            self._land()
        self.receive.work.source = source


@final
class ParcelArrival:
    """A parcel that comes from rank ``source``, of so many bytes of head and payload."""

    __slots__ = ("_chunks", "_delivery", "_head_left", "_payload", "_pieces", "_source", "left", "receive")

    def __init__(self, receive: Submission, source: int, head: int, payload: int) -> None:
        self.receive: Final = receive
        self.left = head + payload  #: bytes that are still due
        self._source = source
        self._head_left = head
        self._payload = payload
        # of the head; None once it was handed on. Not a list of what came: that could be a byte at a time
        self._chunks: bytearray | None = bytearray()
        self._pieces: Pieces | None = None  # where the payload goes; None: away
        self._delivery = Delivery(receive)

    def take(self, address: int, nbytes: int) -> bool:
        """The next bytes; to be called with none, too. Returns whether its receive was asked for a place now."""
        self.left -= nbytes
        chunks = self._chunks
        if chunks is not None:
            size = min(nbytes, self._head_left)
            if size:
                chunks += ctypes.string_at(address, size)
                self._head_left -= size
                address += size
                nbytes -= size
            if self._head_left:
                return False
            self._chunks = None
            tensors = self._delivery.accept(self._source, bytes(chunks), {self._source: self._payload})
            if tensors is not None:
                self._pieces = Pieces(tensors)
        if nbytes and self._pieces is not None:
            self._pieces.copy_from(address, nbytes)
        return chunks is not None

    def finish(self, source: int) -> None:
        """Nothing is due any more."""
        self._delivery.finish()
        self.receive.error = self._delivery.error
        self.receive.work.source = source


@final
class Tally:
    """The operations that are not done, and whom to tell when they are. One for all links of a rank."""

    __slots__ = ("done", "pending")

    def __init__(self, done: Callable[[Submission], None]) -> None:
        self.done = done
        self.pending = 0

    def over(self, submission: Submission) -> None:
        """It is done."""
        self.pending -= 1
        self.done(submission)


@final
class Link:
    """Everything between this rank and one other."""

    __slots__ = (
        "_came",
        "_clears",
        "_frame",
        "_matched",
        "_matched_at",
        "_next_ident",
        "_offered",
        "_offers",
        "_ring",
        "_sent",
        "_short",
        "_streams",
        "_taken_at",
        "_tally",
        "_unmatched",
        "_waiting",
        "_words",
        "_writer",
        "gone",
        "incoming",
        "lines",
        "peer",
        "reader",
    )

    def __init__(
        self, mapped: Mapped, rank: int, peer: int, fence: Fence, ring: Callable[[int], None], tally: Tally
    ) -> None:
        layout = mapped.layout
        self.peer = peer
        self.gone = False  #: the peer writes nothing more
        self.reader = Reader(mapped, peer, rank, fence)
        self.incoming: dict[int, Arrival] = {}  #: long messages that were cleared, by the sender's ident
        #: by tag, in order: receives with their messages, of which the first is in ``incoming`` and not placed yet
        self.lines: dict[int, deque[tuple[Submission, Kept | Offer]]] = {}
        self._words = mapped.words
        self._writer = Writer(mapped, rank, peer, fence)
        self._ring = ring
        self._tally = tally
        self._short = min(SHORT_BYTES, largest_payload(layout.ring))
        self._frame = min(FRAME - HEADER, largest_payload(layout.ring))
        self._unmatched = layout.ring  # bytes of short frames that may be on their way or kept
        self._waiting: deque[Outgoing] = deque()  # those of which the ring has nothing yet
        self._offered: dict[int, Outgoing] = {}  # those that wait for CLEAR, by ident
        self._streams: deque[Outgoing] = deque()  # those under way, in turn
        self._clears: deque[int] = deque()  # idents of messages to be cleared
        self._next_ident = 0
        self._sent = 0  # bytes of short frames written, ever
        self._taken_at = (layout.ring_start(rank, peer) + LINE) // WORD + 1  # word with how many of them were matched
        self._came = 0  # bytes of short frames that came, ever
        self._matched = 0  # those of them that were matched
        self._offers = 0  # that came and are not matched
        self._matched_at = (layout.ring_start(peer, rank) + LINE) // WORD + 1  # word that says so

    @property
    def idle(self) -> bool:
        """Whether there is nothing to write."""
        return self.gone or not (self._waiting or self._streams or self._clears)

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, message: Outgoing) -> bool:
        """Begin a message now, or when those before it have begun: then it is False, and ``pump`` will."""
        if self._waiting or self.gone or not self._begin(message):
            self._waiting.append(message)
            return self.gone
        self._ring(self.peer)
        return True

    def clear_came(self, ident: int) -> None:
        """The receiver has a place for a message that was offered."""
        message = self._offered.pop(ident, None)
        if message is None:
            raise BackendError(f"rank {self.peer} is clear for message {ident}, which was not offered to it")
        if message.nbytes:
            message.pieces = Pieces(message.parts)
            message.left = message.nbytes
            self._streams.append(message)
        else:
            self._tally.over(message.submission)

    def pump(self) -> bool:
        """Write to the ring as long as it has room. Returns whether it took anything."""
        moved = False
        while self._clears and self._writer.put(CLEAR, ident=self._clears[0]):
            self._clears.popleft()
            moved = True
        while not self._clears and (self._waiting or self._streams):
            if self._waiting:  # one that begins, one that goes on: neither kind starves the other
                if not self._begin(self._waiting[0]):
                    break
                self._waiting.popleft()
                moved = True
            if self._streams:
                if not self._stream():
                    break
                moved = True
        if moved:
            self._ring(self.peer)
        return moved

    def _begin(self, message: Outgoing) -> bool:
        """Write the frame that begins a message; False if there is no room."""
        nbytes = message.nbytes
        if nbytes <= self._short:
            size = framed(nbytes)
            if self._sent + size - self._words[self._taken_at] <= self._unmatched:
                target = self._writer.reserve(nbytes)
                if not target:
                    return False
                parts = message.parts
                if len(parts) == 1 and isinstance(parts[0], Tensor):  # on the way of every small tensor
                    values = arithmetic.plain(parts[0])
                    ctypes.memmove(target, values.data_ptr(), nbytes)  # without the GIL
                else:
                    Pieces(parts).copy_to(target, nbytes)
                self._writer.publish(SHORT, message.tag, message.extra, 0, message.length)
                self._sent += size
                self._tally.over(message.submission)
                return True
        ident = self._next_ident
        if not self._writer.put(OFFER, message.tag, message.extra, ident, message.length):
            return False
        message.ident = ident
        self._offered[ident] = message
        self._next_ident = (ident + 1) % _IDENTS
        return True

    def _stream(self) -> bool:
        message = self._streams[0]
        nbytes = min(message.left, self._frame, self._writer.run)
        target = self._writer.reserve(nbytes)
        if not target:
            return False
        message.pieces.copy_to(target, nbytes)
        self._writer.publish(DATA, ident=message.ident)
        self._ring(self.peer)  # it copies this one out while the next one is copied in
        message.left -= nbytes
        self._streams.rotate(-1)
        if not message.left:
            self._streams.pop()
            self._tally.over(message.submission)
        return True

    # -- receiving ----------------------------------------------------------------------------------------------------

    def clear(self, ident: int) -> None:
        """Have the sender of a message that it has offered go ahead."""
        if ident in self.incoming:
            raise BackendError(f"rank {self.peer} has offered message {ident} twice")
        if self._writer.put(CLEAR, ident=ident):
            self._ring(self.peer)
        else:
            self._clears.append(ident)

    def due(self, ident: int, nbytes: int) -> Arrival:
        """The message that so many bytes came for."""
        arrival = self.incoming.get(ident)
        if arrival is None or not 0 < nbytes <= arrival.left:
            raise BackendError(f"rank {self.peer} sends {nbytes} bytes of message {ident}, which are not due")
        return arrival

    def short_came(self, nbytes: int) -> None:
        """There is a short message. Raises BackendError if it may not be sent yet."""
        self._came += framed(nbytes)
        if self._came - self._matched > self._unmatched:
            raise BackendError(f"rank {self.peer} sends more than {self._unmatched} bytes before they are asked for")

    def keep_offer(self) -> None:
        """An offer has no receive yet. Raises BackendError if there are too many."""
        self._offers += 1
        if self._offers > MOST_OFFERS:
            raise BackendError(f"rank {self.peer} has sent {self._offers} messages that nobody has asked for")

    def forget_offer(self) -> None:
        """One that was kept has its receive."""
        self._offers -= 1

    def count(self, nbytes: int) -> None:
        """A short message was matched: tell the sender that it may send so much more ahead of its receive."""
        self._matched += framed(nbytes)
        self._words[self._matched_at] = self._matched

    def abandon(self) -> list[Submission]:
        """Nothing comes any more: forget the operations that are under way, and return them."""
        lost = [message.submission for message in (*self._waiting, *self._offered.values())]
        lost += [arrival.receive for arrival in self.incoming.values()]
        for line in self.lines.values():
            lost += [receive for receive, _ in list(line)[1:]]
        lost += [message.submission for message in self._streams]
        for queue in (self._waiting, self._offered, self.incoming, self.lines, self._streams, self._clears):
            queue.clear()
        return lost
