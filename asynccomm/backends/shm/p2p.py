"""Send and receive through the rings: matching and protocol, without a thread, a loop, a lock or a wait.

How messages travel: ``endpoint.py``. Here each gets its receive, by source and tag: a kept short message and an offer
when the receive is posted, the others when they come. The tag says on which channel a message is, so a tensor never
meets the receive of a parcel. That a tensor fits is known when it is matched; where a parcel goes is asked once its
head is there, in the order in which those of one source and tag were sent: one that comes while the head of another
before it is on its way stands in line, kept or not cleared yet.

Every frame can be dealt with when it comes: offers and short messages are kept, a CLEAR wakes its send, DATA has its
place. So rings always drain, and what finds one full goes when there is room.

Messages to oneself never enter a ring.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import final

from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.matching import MatchQueues
from asynccomm.backends.shm.endpoint import (
    CLEAR,
    DATA,
    OFFER,
    SHORT,
    Arrival,
    Kept,
    Link,
    Offer,
    Outgoing,
    ParcelArrival,
    Tally,
    TensorArrival,
)
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.rings import Mapped
from asynccomm.backends.shm.vectors import address_of, spans
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import MessageSpace, Recv, RecvParcel, Send, SendParcel
from asynccomm.ops.dtypes import BY_CODE, CODES
from asynccomm.ops.parcels import MAX_HEAD
from asynccomm.ops.validation import MAX_TAG

assert MessageSpace.TENSORS.key(MAX_TAG) == MAX_TAG  # larger ones are those of parcels


@final
class Messages:
    """Point-to-point operations of one rank: passive, and called by one thread at a time.

    Args:
        rank: this rank.
        mapped: the segment.
        fence: guarded by the same lock as the calls here.
        ring: ``ring(peer)`` is called after something was published which that rank may be asleep for.
        done: called with each operation that is over, its ``work.source`` and ``error`` set; must not call back.
        failed: called with what makes the comm unusable: CollectiveMismatchError, BackendError, or what a receive of
            parcels says is a BrokenError; must not call back.
        grown: called with a receive, and how many bytes come for it, when these are more than it knew of; must not
            call back.
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
    ) -> None:
        self._rank = rank
        self._words, self._raw = mapped.words, mapped.raw
        self._address = mapped.address
        self._fence = fence
        self._ring, self._failed, self._grown = ring, failed, grown
        self._tally = tally = Tally(done)
        self._matching: MatchQueues[Submission, Kept | Offer | Outgoing] = MatchQueues(mapped.layout.size)
        peers = [peer for peer in range(mapped.layout.size) if peer != rank]
        self._links = {peer: Link(mapped, rank, peer, fence, ring, tally) for peer in peers}
        # what progress() looks at: all rings that are read, and the links that have something to write
        self._reading = [(link.reader.head_at, link.reader, link) for link in self._links.values()]
        self._writing: set[Link] = set()

    @property
    def pending(self) -> int:
        """Operations that are not done."""
        return self._tally.pending

    def submit(self, submission: Submission) -> None:
        """Start a send or receive: as much of it as the ring takes now. ``progress`` does the rest."""
        self._tally.pending += 1
        op = submission.op
        if isinstance(op, (Recv, RecvParcel)):
            tag = _tag(op)
            found = self._matching.post(submission, op.peer, tag)
            if found is not None:
                self._take_kept(submission, tag, *found)
            return
        assert isinstance(op, (Send, SendParcel))
        message = _outgoing(submission)
        if op.peer == self._rank:
            self._send_to_self(message)
            return
        link = self._links[op.peer]
        if not link.send(message):
            self._writing.add(link)

    def progress(self) -> bool:
        """Move whatever can be moved. Returns whether anything was."""
        moved = False
        words = self._words
        for head_at, reader, link in self._reading:
            if words[head_at] != reader.tail:
                self._drain(link)
                moved = True
        if self._writing:
            for link in tuple(self._writing):
                if link.pump():
                    moved = True
                if link.idle:
                    self._writing.discard(link)
        return moved

    def gone(self, peer: int) -> list[Submission]:
        """Take in what ``peer`` has sent, and return and forget the operations that can never complete now.

        It has closed in good order and will write nothing more. What is submitted later and needs it comes back from
        the next call. Receives from any source are among them once all other ranks are gone.
        """
        link = self._links[peer]
        if not link.gone:
            self._fence.order()  # its last frames were published before its word that it left
            if link.reader.tail != self._words[link.reader.head_at]:
                self._drain(link)
            link.gone = True
            self._stop_reading(link)
        self._writing.discard(link)
        lost = [*self._matching.withdraw(peer), *link.abandon()]
        if all(other.gone for other in self._links.values()):
            lost += self._matching.withdraw(None)
        self._tally.pending -= len(lost)
        return lost

    def drop(self) -> None:
        """Forget everything, and never look at the segment again. Nothing may be submitted afterwards."""
        self._reading = []
        self._writing.clear()
        self._links.clear()
        self._matching.clear()
        self._tally.pending = 0

    # -- what comes ---------------------------------------------------------------------------------------------------

    def _drain(self, link: Link) -> None:
        """Deal with the frames that are there now."""
        reader = link.reader
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
                elif kind == OFFER:
                    self._offer_came(link, tag, Offer(extra, length, ident))
                elif kind == CLEAR:
                    link.clear_came(ident)
                else:
                    raise BackendError(f"the message ring from rank {link.peer} is corrupt: a frame of kind {kind}")
                reader.free()
                if not link.idle:
                    self._writing.add(link)
                if kind == DATA and reader.publish():
                    self._ring(link.peer)
        except BackendError as exc:
            self._stop_reading(link)
            self._failed(exc)
            return
        if reader.publish():
            self._ring(link.peer)

    def _short_came(self, link: Link, tag: int, extra: int, length: int, nbytes: int) -> None:
        _check(link, tag, extra, length, nbytes)
        link.short_came(nbytes)
        receive = self._matching.claim(link.peer, tag)
        at = link.reader.payload
        if receive is None or tag in link.lines:
            kept = Kept(extra, length, bytes(self._raw[at : at + nbytes]))
            if receive is None:
                self._matching.keep(kept, link.peer, tag)
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
        _check(link, tag, offer.extra, offer.length)
        receive = self._matching.claim(link.peer, tag)
        if receive is None:
            link.keep_offer()
            self._matching.keep(offer, link.peer, tag)
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

    def _take_kept(self, receive: Submission, tag: int, source: int, message: Kept | Offer | Outgoing) -> None:
        if isinstance(message, Outgoing):
            self._meet(message, receive)
            return
        link = self._links[source]
        if isinstance(message, Offer):
            link.forget_offer()
        self._accept(link, tag, receive, message)
        if not link.idle:
            self._writing.add(link)

    # -- to where it belongs ------------------------------------------------------------------------------------------

    def _accept(self, link: Link, tag: int, receive: Submission, message: Kept | Offer) -> None:
        """Match a message."""
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
            link.clear(message.ident)
            self._expect(link, message.ident, arrival)

    def _expect(self, link: Link, ident: int, arrival: Arrival) -> None:
        """The rest of a message comes as DATA."""
        if arrival.left:
            link.incoming[ident] = arrival
        else:
            self._arrived(arrival, link.peer)

    def _open(self, link: Link, receive: Submission, message: Kept | Offer) -> bool:
        """It is the turn of a parcel. Returns whether its head is there, so that it is the turn of the next."""
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
        """The parcel that was first in line knows where it goes."""
        op = first.receive.op
        assert isinstance(op, RecvParcel)
        tag = _tag(op)
        line = link.lines[tag]
        line.popleft()
        while line and self._open(link, *line[0]):
            line.popleft()
        if not line:
            del link.lines[tag]

    def _deliver(
        self, receive: Submission, source: int, code: int, numel: int, address: int | bytes, nbytes: int
    ) -> bool:
        """Copy a whole tensor to its receive; False if it does not fit."""
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

    def _arrived(self, arrival: Arrival, source: int) -> None:
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

    # -- messages to oneself, and the end -----------------------------------------------------------------------------

    def _send_to_self(self, message: Outgoing) -> None:
        receive = self._matching.claim(self._rank, message.tag)
        if receive is None:
            self._matching.keep(message, self._rank, message.tag)
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


def _tag(op: Send | Recv | SendParcel | RecvParcel) -> int:
    """What frames say: the tag and the channel."""
    if isinstance(op, (Send, Recv)):
        return op.tag
    assert op.channel is not MessageSpace.TENSORS, f"{op} would meet tensors"
    return op.channel.key(op.tag)


def _outgoing(submission: Submission) -> Outgoing:
    op = submission.op
    if isinstance(op, Send):
        return Outgoing(submission, op.tag, CODES[op.dtype], op.numel, submission.inputs, op.nbytes)
    assert isinstance(op, SendParcel)
    (parcel,) = submission.parcels
    head, payload = len(parcel.head), parcel.nbytes
    assert head <= MAX_HEAD, f"a head of {head} bytes, of which {MAX_HEAD} are taken"
    parts: tuple[Tensor | bytes, ...] = (parcel.head, *parcel.tensors)
    return Outgoing(submission, _tag(op), head, payload, parts, head + payload)


def _check(link: Link, tag: int, extra: int, length: int, nbytes: int | None = None) -> None:
    """Whether the frame that begins a message can be: the lengths that it says, and that of a whole one."""
    if tag > MAX_TAG:
        if extra > MAX_HEAD:
            raise BackendError(f"rank {link.peer} sends a head of {extra} bytes, of which {MAX_HEAD} are taken")
        if nbytes is not None and extra + length != nbytes:
            raise BackendError(f"rank {link.peer} sent {nbytes} bytes for a parcel of {extra} and {length}")
    elif nbytes is not None:
        dtype = BY_CODE.get(extra)
        if dtype is not None and length * dtype.itemsize != nbytes:
            raise BackendError(f"rank {link.peer} sent {nbytes} bytes for {dtype}[{length}]")
