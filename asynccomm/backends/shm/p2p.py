"""Send and receive through the rings: matching and protocol, without a thread, an event loop, a lock or a wait.

``endpoint.py`` defines how messages travel. This module matches each message to a receive, by source and tag: an
unexpected message or offer when the receive is posted, any other message when it arrives. A tensor's dtype and length
are checked when it is matched. The destination of a parcel is determined when its head is complete, in the order in
which parcels of one source and tag were sent: a matched parcel waits in a queue, unexpected or not cleared yet, while
the head of an earlier parcel is in flight.

Every frame can be processed on arrival: offers and short messages are stored, a CLEAR starts its send, and DATA has a
destination. Rings therefore always drain, and a frame that finds its ring full is written when there is room.

Messages of a rank to itself never enter a ring.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, final

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.matching import MatchQueues
from asynccomm.backends.shm.arrivals import Arrival, ParcelArrival, TensorArrival
from asynccomm.backends.shm.board import RankPosition
from asynccomm.backends.shm.endpoint import (
    CLEAR,
    DATA,
    HAS_READ,
    OFFER,
    SHORT,
    Kept,
    Link,
    Offer,
    Outgoing,
    Tally,
)
from asynccomm.backends.shm.executor import NO_WAIT, Pace
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import WORD
from asynccomm.backends.shm.message_fields import check_first, describe, outgoing, tag_of
from asynccomm.backends.shm.rings import LOAN, LinkState, Mapped
from asynccomm.backends.shm.vectors import address_of, spans
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import MessageSpace, PeerOp, Recv, RecvParcel, Send
from asynccomm.ops.dtypes import BY_CODE, CODES
from asynccomm.ops.validation import MAX_TAG

if TYPE_CHECKING:
    from asynccomm.backends.shm import _core


@final
class Messages:
    """The point-to-point operations of one rank: a passive object, called by one thread at a time.

    Args:
        rank: this rank.
        mapped: the mapped segment.
        fence: a fence guarded by the same lock as the calls to this object.
        ring: ``ring(peer)`` is called after a publication for which ``peer`` may be asleep.
        done: called with each finished operation, its ``work.source`` and ``error`` set; must not call back.
        failed: called with an error that makes the comm unusable: CollectiveMismatchError, BackendError, or a
            BrokenError that the receive of a parcel returned; must not call back.
        grown: called with a receive and the size of its message, when the message is larger than the receive's
            ``nbytes``; must not call back.
        state: counts the pending operations and the unexpected messages.
        segment: the segment as C knows it, where C is in use.
        inline_bytes: larger messages may be read by single copy, on the progress thread.
    """

    def __init__(
        self,
        rank: int,
        mapped: Mapped,
        fence: Fence,
        ring: Callable[[int], None],
        done: Callable[[Submission], None],
        failed: Callable[[BrokenError], None],
        grown: Callable[[Submission, int], None],
        state: RankPosition | None = None,
        segment: _core.Segment | None = None,
        inline_bytes: int = 1 << 62,
    ) -> None:
        self._rank = rank
        self._inline_bytes = inline_bytes
        self._exchanges = False  # whether the last large message was sent while others were pending
        self._words, self._raw = mapped.words, mapped.raw
        self._address = mapped.address
        self._fence = fence
        self._ring, self._failed, self._grown = ring, failed, grown
        self._state = RankPosition() if state is None else state
        self._tally = tally = Tally(done, self._state)
        self._matching: MatchQueues[Submission, Kept | Offer | Outgoing] = MatchQueues(
            mapped.layout.size, partial(_take, tally)
        )
        self._withdrawn: deque[Submission] = deque()
        link_state: Callable[[int], Any] = segment.link if segment is not None else lambda _: LinkState()
        self._links = {
            peer: Link(mapped, rank, peer, fence, ring, tally, link_state(peer), segment)
            for peer in range(mapped.layout.size)
            if peer != rank
        }
        # for progress(): all rings that are read, and the links with frames to write
        self._reading = [(link.reader.head_at, link.reader, link) for link in self._links.values()]
        self._writing: set[Link] = set()
        self._segment = segment
        self.transferring: bool = False  #: whether long messages were moved or waited for in C by the last ``progress``

    @property
    def pending(self) -> int:
        """The number of pending operations."""
        return self._tally.pending

    def submit(self, submission: Submission) -> None:
        """Start a send or receive, as far as the ring has room; ``progress`` continues it."""
        self._tally.pending += 1
        op = submission.op
        assert isinstance(op, PeerOp)
        if submission.run is not None:
            self._adopt(submission, op, *submission.run)
            return
        if not op.is_send:
            if submission.claim is not None and submission.claim.winner is not None:
                self._tally.over(submission)
                return
            tag = tag_of(op)
            found = self._matching.post(submission, op.peer, tag)
            if found is not None:
                self._take_kept(submission, tag, *found)
            return
        assert op.peer is not None
        message = outgoing(submission)
        if message.nbytes > self._inline_bytes:
            self._exchanges = self._tally.pending > 1
        if op.peer == self._rank:
            self._send_to_self(message)
            return
        link = self._links[op.peer]
        if not link.send(message):
            self._writing.add(link)

    def _adopt(self, submission: Submission, op: PeerOp, ident: int, cleared: bool, moved: int) -> None:
        """Go on with a long message that C has begun (``_messages.c``).

        Args:
            cleared: whether the receiver is clear for it.
            moved: bytes that have been written or read.
        """
        assert op.peer is not None
        link = self._links[op.peer]
        if op.is_send:
            link.go_on(outgoing(submission), ident, cleared, moved)
            self._writing.add(link)
        else:
            arrival = TensorArrival(submission)
            arrival.skip(moved)
            link.incoming[ident] = arrival

    def withdraw(self, receive: Submission) -> None:
        """Have the next ``progress`` finish a receive: another backend has taken its claim. From any thread."""
        self._withdrawn.append(receive)

    def progress(self, pace: Pace = NO_WAIT) -> bool:
        """Read all frames that have arrived, and write as many as fit. Returns whether anything was read or written.

        Args:
            pace: of transfers in C; nothing else waits.
        """
        self.transferring = False
        if self._state.adopting:  # frames may be those of the message
            return False
        moved = False
        if self._segment is not None:
            moved = self._read_on()
            moved = self._transfer(self._segment, NO_WAIT if moved else pace) or moved
        while self._withdrawn:
            receive = self._withdrawn.popleft()
            assert isinstance(receive.op, PeerOp)
            if self._matching.withdraw_one(receive, tag_of(receive.op)):
                self._tally.over(receive)
                moved = True
        words = self._words
        for head_at, reader, link in self._reading:
            if words[head_at] != reader.state.tail:
                moved = self._drain(link) or moved
        if self._writing:
            for link in tuple(self._writing):
                if link.pump():
                    moved = True
                if not link.backlog:
                    self._writing.discard(link)
        return moved

    def _transfer(self, segment: _core.Segment, pace: Pace) -> bool:
        """Write and read frames of long messages in C; returns whether anything was written or read."""
        if not self._tally.pending:
            return False
        parts = [
            (link, sending, part)
            for link in self._links.values()
            for sending, found in ((True, link.outgoing_parts()), (False, link.incoming_parts()))
            for part in found
        ]
        if not parts:
            return False
        self.transferring = True
        frame = parts[0][0].frame
        flows = tuple((link.peer, sending, *part[1:]) for link, sending, part in parts)
        if sum(link.backlog for link in self._writing) > sum(sending for _, sending, _ in parts):
            pace = pace._replace(events=-1)  # C would not wake up for the room that other frames need
        moved = segment.transfer(flows, frame, *pace)
        by_progress = sorted(zip(parts, moved, strict=True), key=itemgetter(1))  # the least advanced are next
        for (link, _, part), nbytes in by_progress:
            message = part.message
            if isinstance(message, Outgoing):
                if nbytes:
                    link.wrote(message, nbytes)
            elif nbytes:
                message.skip(nbytes)
                if not message.left:
                    del link.incoming[part.ident]
                    self._arrived(message, link.peer)
        return any(moved)

    def gone(self, peer: int) -> list[Submission]:
        """Read the last frames of ``peer``, which has left; remove and return the operations that can never complete.

        A rank that has left writes nothing more. The next call returns later submissions that need ``peer``. Receives
        from any source are returned once all other ranks have left.
        """
        if self._state.adopting:
            return []
        link = self._links[peer]
        if not link.state.gone:
            self._fence.order()  # the peer published its last frames before its state LEFT
            if link.state.tail != self._words[link.reader.head_at]:
                self._drain(link)
            link.state.gone = True
            self._stop_reading(link)
        self._writing.discard(link)
        lost = [*self._matching.withdraw(peer), *link.abandon()]
        if all(other.state.gone for other in self._links.values()):
            for receive in self._matching.withdraw(None):
                if receive.claim is None or receive.claim.give_up():
                    lost.append(receive)
                else:
                    self._tally.over(receive)
        self._tally.pending -= len(lost)
        return lost

    def unreceived(self) -> list[str]:
        """The short messages of other ranks that no receive has taken, in words; a long one is known to its sender."""
        return [
            describe(source, tag, message)
            for source, tag, message in self._matching.kept()
            if isinstance(message, Kept) and MessageSpace.of_key(tag)[0] is not MessageSpace.INTERNAL
        ]

    def drop(self) -> None:
        """Drop all operations and never access the segment again. Submitting afterwards is not allowed."""
        self._reading = []
        self._writing.clear()
        self._links.clear()
        self._matching.clear()
        self._tally.pending = self._state.kept = 0

    # -- arriving frames ----------------------------------------------------------------------------------------------

    def _drain(self, link: Link) -> bool:
        """Process the frames that have arrived; returns whether there were any."""
        reader, before = link.reader, link.state.tail
        try:
            reader.open()
            while (frame := reader.take()) is not None:
                nbytes, kind, tag, extra, ident, length = frame
                if kind == SHORT:
                    self._short_came(link, tag, extra, length, nbytes)
                    reader.free()
                    continue
                if kind == DATA:
                    self._data_came(link, ident, nbytes)
                elif kind in (OFFER, LOAN):  # a loan that C has claimed is an offer
                    address = int.from_bytes(self._raw[reader.payload : reader.payload + WORD], sys.byteorder)
                    self._offer_came(link, tag, Offer(extra, length, ident, address if nbytes == WORD else 0))
                elif kind == CLEAR:
                    link.clear_came(ident, extra == HAS_READ)
                else:
                    raise BackendError(f"the message ring from rank {link.peer} is corrupt: a frame of kind {kind}")
                reader.free()
                if link.backlog:
                    self._writing.add(link)
                if kind == DATA and reader.publish():
                    self._ring(link.peer)
        except BackendError as exc:
            self._stop_reading(link)
            self._failed(exc)
            return True
        if reader.publish():
            self._ring(link.peer)
        return link.state.tail != before

    def _short_came(self, link: Link, tag: int, extra: int, length: int, nbytes: int) -> None:
        check_first(link.peer, tag, extra, length, nbytes)
        link.short_came(nbytes)
        receive = self._matching.claim(link.peer, tag)
        at = link.reader.payload
        if receive is None or tag in link.lines:
            kept = Kept(extra, length, bytes(self._raw[at : at + nbytes]))
            if receive is None:
                self._keep(kept, link.peer, tag)
            else:
                link.lines[tag].append((receive, kept))
            return
        link.count(nbytes)
        if tag <= MAX_TAG:
            self._deliver(receive, link.peer, extra, length, self._address + at, nbytes)
        else:
            arrival = ParcelArrival(receive, link.peer, extra, length)
            arrival.take(self._address + at, nbytes)
            self._arrived(arrival, link.peer)

    def _offer_came(self, link: Link, tag: int, offer: Offer) -> None:
        check_first(link.peer, tag, offer.extra, offer.length)
        receive = self._matching.claim(link.peer, tag)
        if receive is None:
            link.keep_offer()
            self._keep(offer, link.peer, tag)
        else:
            self._accept(link, tag, receive, offer)

    def _data_came(self, link: Link, ident: int, nbytes: int) -> None:
        arrival = link.due(ident, nbytes)
        placed = arrival.take(self._address + link.reader.payload, nbytes)
        if not arrival.left:
            del link.incoming[ident]
            self._arrived(arrival, link.peer)
        if placed:
            self._move_up(link, arrival)

    def _keep(self, message: Kept | Offer | Outgoing, source: int, tag: int) -> None:
        self._matching.keep(message, source, tag)
        self._state.kept += 1

    def _take_kept(self, receive: Submission, tag: int, source: int, message: Kept | Offer | Outgoing) -> None:
        self._state.kept -= 1
        if isinstance(message, Outgoing):
            self._meet(message, receive)
            return
        link = self._links[source]
        if isinstance(message, Offer):
            link.forget_offer()
        self._accept(link, tag, receive, message)
        if link.backlog:
            self._writing.add(link)

    # -- matched messages ---------------------------------------------------------------------------------------------

    def _accept(self, link: Link, tag: int, receive: Submission, message: Kept | Offer) -> None:
        """Receive a matched message, or queue it behind an earlier parcel of its tag."""
        if tag > MAX_TAG:
            line = link.lines.get(tag)
            if line is not None:
                line.append((receive, message))
            elif not self._open(link, receive, message):
                link.lines[tag] = deque(((receive, message),))
        elif isinstance(message, Kept):
            link.count(len(message.data))
            self._deliver(receive, link.peer, message.extra, message.length, message.data, len(message.data))
        elif self._fits(receive, link.peer, message.extra, message.length):
            arrival = TensorArrival(receive)
            if message.address and self._is_read(link, arrival):
                link.read_at(message.ident, arrival, message.address)
                return
            link.clear(message.ident)
            self._expect(link, message.ident, arrival)

    def _is_read(self, source: Link, arrival: TensorArrival) -> bool:
        """Whether this rank reads a large message where it is: while it sends long ones, too, or if that is faster."""
        if arrival.receive.nbytes <= self._inline_bytes or self._segment is None or not self._segment.reads_all():
            return False
        if self._exchanges or any(link.sends_long for link in self._links.values()):
            return True
        arrival.began = time.perf_counter()
        return source.ways.is_reading_faster()

    def _read_on(self) -> bool:
        """Read more of the messages that are read where they are; returns whether anything was read."""
        moved = False
        for link in self._links.values():
            if link.reading:
                read = link.read_on()
                moved = moved or read is not False
                if not isinstance(read, bool):
                    self._arrived(read, link.peer, read=True)
                if link.backlog:
                    self._writing.add(link)
        return moved

    def _expect(self, link: Link, ident: int, arrival: Arrival) -> None:
        """Register a cleared message, whose remaining bytes arrive as DATA."""
        if arrival.left:
            link.incoming[ident] = arrival
        else:
            self._arrived(arrival, link.peer)

    def _open(self, link: Link, receive: Submission, message: Kept | Offer) -> bool:
        """Begin to receive a parcel. Returns whether its head is complete, so that the next parcel may begin."""
        arrival = ParcelArrival(receive, link.peer, message.extra, message.length)
        if isinstance(message, Kept):
            link.count(len(message.data))
            arrival.take(address_of(message.data), len(message.data))
            self._arrived(arrival, link.peer)
            return True
        if arrival.left > receive.nbytes:
            self._grown(receive, arrival.left)
        link.clear(message.ident)
        placed = arrival.take(0, 0)  # without a head
        self._expect(link, message.ident, arrival)
        return placed

    def _move_up(self, link: Link, first: Arrival) -> None:
        """Begin to receive the queued parcels behind ``first``, whose head is complete."""
        op = first.receive.op
        assert isinstance(op, RecvParcel)
        tag = tag_of(op)
        line = link.lines[tag]
        line.popleft()
        while line and self._open(link, *line[0]):
            line.popleft()
        if not line:
            del link.lines[tag]

    def _deliver(
        self, receive: Submission, source: int, code: int, numel: int, address: int | bytes, nbytes: int
    ) -> bool:
        """Copy a whole tensor to its receive; False if their dtypes or lengths differ."""
        if not self._fits(receive, source, code, numel):
            return False
        values, land = arithmetic.landing(receive.outputs[0])
        if nbytes:
            ctypes.memmove(values.data_ptr(), address, nbytes)
        if land is not None:
            land()
        receive.work.source = source
        self._tally.over(receive)
        return True

    def _arrived(self, arrival: Arrival, source: int, *, read: bool = False) -> None:
        """Complete a receive after its last byte; ``read``: the message has been read where it was."""
        if isinstance(arrival, TensorArrival) and arrival.began:
            seconds = time.perf_counter() - arrival.began
            self._links[source].ways.note(read, seconds, arrival.receive.nbytes)
        arrival.finish(source)
        error = arrival.receive.error
        if isinstance(error, BrokenError):
            self._tally.pending -= 1
            self._failed(error)
        else:
            self._tally.over(arrival.receive)

    def _fits(self, receive: Submission, source: int, code: int, numel: int) -> bool:
        op = receive.op
        assert isinstance(op, Recv)
        if CODES[op.dtype] == code and op.numel == numel:  # Recv.takes, without making a Send
            return True
        self._tally.pending -= 1
        if code in BY_CODE:
            sent = str(Send(BY_CODE[code], numel, self._rank, op.tag))
            self._failed(CollectiveMismatchError(receive.work.seq, source, sent, self._rank, str(op)))
        else:
            self._failed(BackendError(f"rank {source} sent elements of a dtype unknown here (code {code:#x}) for {op}"))
        return False

    # -- messages to itself -------------------------------------------------------------------------------------------

    def _send_to_self(self, message: Outgoing) -> None:
        receive = self._matching.claim(self._rank, message.tag)
        if receive is None:
            self._keep(message, self._rank, message.tag)
        else:
            self._meet(message, receive)

    def _meet(self, message: Outgoing, receive: Submission) -> None:
        send = message.submission
        if message.tag <= MAX_TAG:
            values = arithmetic.plain(send.inputs[0])
            delivered = self._deliver(
                receive, self._rank, message.extra, message.length, values.data_ptr(), message.nbytes
            )
            if delivered:
                self._tally.over(send)
            return
        arrival = ParcelArrival(receive, self._rank, message.extra, message.length)
        arrival.take(0, 0)
        for address, nbytes in spans(message.parts):
            arrival.take(address, nbytes)
        self._arrived(arrival, self._rank)
        self._tally.over(send)

    def _stop_reading(self, link: Link) -> None:
        self._reading = [entry for entry in self._reading if entry[2] is not link]


def _take(tally: Tally, receive: Submission) -> bool:
    """Take the claim to a receive; False: another backend has it, and the receive is over here."""
    if receive.claim is None or receive.claim.take(receive):
        return True
    tally.over(receive)
    return False
