"""Send and receive through the rings: matching and protocol, without a thread, a loop, a lock or a wait.

A short message is one frame, and its send is done when it is in the ring. The receiver takes it out into the receive
that waits for it, or else into memory of its own, of which a sender may fill no more than the size of a ring: the
receiver publishes how many bytes of short messages it has matched, in the line of the tail.

A long message, or a short one beyond that limit, is announced by an OFFER. When it is matched, and fits, the receiver
answers CLEAR, and the sender streams DATA as the ring has room, in turn with the other messages to that rank. The
receiver copies each frame to where it belongs.

Every frame can be dealt with when it comes: offers and short messages are kept, a CLEAR wakes its send, DATA has its
place. So rings always drain, and what finds one full goes when there is room. Frames that begin a message leave in the
order of the calls, which makes the order per pair and tag; the tags share the ring, and nothing else.

Messages to oneself never enter a ring.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.matching import Matching
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.rings import HEADER, Mapped, Reader, Writer, framed, largest_payload
from asynccomm.backends.shm.segment import LINE, WORD, Layout
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import Recv, Send

__all__ = ["Messages"]

# bytes of payload: 64 KiB take 6 us one way, 12 us with asking first
SHORT: Final = 64 << 10
# bytes of a DATA frame with its header: 4 MiB at 33 GB/s; frames of half the size 28, of a quarter 17 to 22
FRAME: Final = 256 << 10

_SHORT, _OFFER, _CLEAR, _DATA = 2, 3, 4, 5  # kinds of frames; 1 is padding
_IDENTS = 1 << 32  # a message's number is used again after so many offers

_DTYPES = {zlib.crc32(str(d).encode()): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class _Kept(NamedTuple):
    """A short message that came before its receive."""

    code: int
    numel: int
    data: bytes


class _Offer(NamedTuple):
    """A long message that has no receive yet."""

    code: int
    numel: int
    ident: int


@final
class _Stream:
    """A long message on its way, at either end: the bytes from ``address`` on are still to be copied."""

    __slots__ = ("address", "ident", "land", "left", "submission", "values")

    def __init__(
        self,
        submission: Submission,
        ident: int,
        values: Tensor,
        nbytes: int,
        land: Callable[[], object] | None = None,
    ) -> None:
        self.submission = submission
        self.ident = ident
        self.values = values  # keeps the memory at ``address``
        self.address = values.data_ptr()
        self.left = nbytes
        self.land = land  # what brings a message to its receive in the end


@final
class _Link:
    """Everything between this rank and one other."""

    __slots__ = (
        "clears",
        "gone",
        "incoming",
        "matched",
        "matched_at",
        "next_ident",
        "offered",
        "peer",
        "reader",
        "sent",
        "streams",
        "taken_at",
        "waiting",
        "writer",
    )

    def __init__(self, mapped: Mapped, rank: int, peer: int, fence: Fence) -> None:
        layout = mapped.layout
        self.peer = peer
        self.gone = False
        self.writer = Writer(mapped, rank, peer, fence)
        self.reader = Reader(mapped, peer, rank, fence)
        self.waiting: deque[Submission] = deque()  # sends of which the ring has nothing yet
        self.offered: dict[int, Submission] = {}  # sends that wait for CLEAR, by ident
        self.streams: deque[_Stream] = deque()  # sends under way, in turn
        self.clears: deque[int] = deque()  # idents of messages to be cleared
        self.next_ident = 0
        self.sent = 0  # bytes of short frames written, ever
        self.taken_at = (layout.ring_start(rank, peer) + LINE) // WORD + 1  # word with how many of them were matched
        self.incoming: dict[int, _Stream] = {}  # receives under way, by the sender's ident
        self.matched = 0  # bytes of short frames that came and were matched, ever
        self.matched_at = (layout.ring_start(peer, rank) + LINE) // WORD + 1  # word that says so

    @property
    def idle(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.waiting or self.streams or self.clears)


@final
class Messages:
    """Point-to-point operations of one rank: passive, and called by one thread at a time.

    Args:
        rank: this rank.
        layout: of the segment.
        words, raw, data: the segment as 64-bit words, as bytes, and as a uint8 tensor.
        fence: guarded by the same lock as the calls here.
        ring: ``ring(peer)`` is called after something was published which that rank may be asleep for.
        done: called with each operation that is over, its ``work.source`` set; must not call back.
        failed: called with what makes the comm unusable: CollectiveMismatchError, BackendError; must not call back.
    """

    def __init__(
        self,
        rank: int,
        layout: Layout,
        words: memoryview,
        raw: memoryview,
        data: Tensor,
        fence: Fence,
        ring: Callable[[int], None],
        done: Callable[[Submission], None],
        failed: Callable[[BrokenError], None],
    ) -> None:
        self.pending = 0  #: operations that are not done
        self._rank = rank
        self._words, self._raw, self._data = words, raw, data
        self._address = data.data_ptr()
        self._fence = fence
        self._ring, self._done, self._failed = ring, done, failed
        self._short = min(SHORT, largest_payload(layout.ring))
        self._frame = min(FRAME - HEADER, largest_payload(layout.ring))
        self._unmatched = layout.ring  # bytes of short frames that may be on their way or kept
        self._matching: Matching[Submission, _Kept | _Offer | Submission] = Matching(layout.size)
        mapped = Mapped(layout, words, raw, self._address)
        self._links = {peer: _Link(mapped, rank, peer, fence) for peer in range(layout.size) if peer != rank}
        # what progress() looks at: all rings that are read, and the links that have something to write
        self._reading = [(link.reader.head_at, link.reader, link) for link in self._links.values()]
        self._writing: set[_Link] = set()

    def submit(self, submission: Submission) -> None:
        """Start a send or receive: as much of it as the ring takes now. ``progress`` does the rest."""
        self.pending += 1
        op = submission.op
        if isinstance(op, Recv):
            found = self._matching.post(submission, op.peer, op.tag)
            if found is not None:
                self._take_kept(submission, op, *found)
            return
        assert isinstance(op, Send)
        if op.peer == self._rank:
            self._send_to_self(submission, op)
            return
        link = self._links[op.peer]
        if link.waiting or link.gone or not self._begin(link, submission):
            link.waiting.append(submission)
            if not link.gone:
                self._writing.add(link)
        else:
            self._ring(link.peer)

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
                if self._pump(link):
                    moved = True
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
        lost = [*self._matching.withdraw(peer), *link.waiting, *link.offered.values()]
        lost += [stream.submission for stream in (*link.incoming.values(), *link.streams)]
        for queue in (link.waiting, link.offered, link.incoming, link.streams, link.clears):
            queue.clear()
        if all(other.gone for other in self._links.values()):
            lost += self._matching.withdraw(None)
        self.pending -= len(lost)
        return lost

    def drop(self) -> None:
        """Forget everything, and never look at the segment again. Nothing may be submitted afterwards."""
        self._reading = []
        self._writing.clear()
        self._links.clear()
        self._matching.clear()
        self.pending = 0

    # -- sending ------------------------------------------------------------------------------------------------------

    def _begin(self, link: _Link, submission: Submission) -> bool:
        """Write the frame that begins a message; False if there is no room."""
        op = submission.op
        assert isinstance(op, Send)
        nbytes = op.nbytes
        if nbytes <= self._short:
            size = framed(nbytes)
            if link.sent + size - self._words[link.taken_at] <= self._unmatched:
                values = _packed(submission.inputs[0])
                if not link.writer.put(_SHORT, op.tag, _CODES[op.dtype], 0, op.numel, values.data_ptr(), nbytes):
                    return False
                link.sent += size
                self._finish(submission)
                return True
        ident = link.next_ident
        if not link.writer.put(_OFFER, op.tag, _CODES[op.dtype], ident, op.numel):
            return False
        link.offered[ident] = submission
        link.next_ident = (ident + 1) % _IDENTS
        return True

    def _pump(self, link: _Link) -> bool:
        """Write to a ring as long as it has room. Returns whether it took anything."""
        moved = False
        while link.clears and link.writer.put(_CLEAR, ident=link.clears[0]):
            link.clears.popleft()
            moved = True
        while not link.clears and (link.waiting or link.streams):
            if link.waiting:  # one that begins, one that goes on: neither kind starves the other
                if not self._begin(link, link.waiting[0]):
                    break
                link.waiting.popleft()
                moved = True
            if link.streams:
                if not self._stream(link):
                    break
                moved = True
        if moved:
            self._ring(link.peer)
            if link.idle:
                self._writing.discard(link)
        return moved

    def _stream(self, link: _Link) -> bool:
        stream = link.streams[0]
        nbytes = min(stream.left, self._frame, link.writer.run)
        if not link.writer.put(_DATA, ident=stream.ident, source=stream.address, nbytes=nbytes):
            return False
        self._ring(link.peer)  # it copies this one out while the next one is copied in
        stream.address += nbytes
        stream.left -= nbytes
        link.streams.rotate(-1)
        if not stream.left:
            link.streams.pop()
            self._finish(stream.submission)
        return True

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _drain(self, link: _Link) -> None:
        """Deal with the frames that are there now."""
        reader = link.reader
        try:
            reader.open()
            while (frame := reader.take()) is not None:
                nbytes, kind, tag, code, ident, numel = frame
                if kind == _SHORT:
                    self._short_came(link, tag, code, numel, nbytes)
                elif kind == _DATA:
                    self._data_came(link, ident, nbytes)
                    reader.free()
                    if reader.publish():
                        self._ring(link.peer)
                    continue
                elif kind == _OFFER:
                    self._offer_came(link, tag, _Offer(code, numel, ident))
                elif kind == _CLEAR:
                    self._clear_came(link, ident)
                else:
                    raise BackendError(f"the message ring from rank {link.peer} is corrupt: a frame of kind {kind}")
                reader.free()
        except BackendError as exc:
            self._stop_reading(link)
            self._failed(exc)
            return
        if reader.publish():
            self._ring(link.peer)

    def _short_came(self, link: _Link, tag: int, code: int, numel: int, nbytes: int) -> None:
        receive = self._matching.claim(link.peer, tag)
        at = link.reader.payload
        if receive is None:
            dtype = _DTYPES.get(code)
            if dtype is not None and numel * dtype.itemsize != nbytes:
                raise BackendError(f"rank {link.peer} sent {nbytes} bytes for {dtype}[{numel}]")
            data = bytes(self._raw[at : at + nbytes])
            self._matching.keep(_Kept(code, numel, data), link.peer, tag)
        else:
            self._count(link, nbytes)
            self._deliver(receive, link.peer, code, numel, self._address + at, nbytes)

    def _offer_came(self, link: _Link, tag: int, offer: _Offer) -> None:
        receive = self._matching.claim(link.peer, tag)
        if receive is None:
            self._matching.keep(offer, link.peer, tag)
        else:
            self._accept(link, receive, offer)

    def _clear_came(self, link: _Link, ident: int) -> None:
        submission = link.offered.pop(ident, None)
        if submission is None:
            raise BackendError(f"rank {link.peer} is clear for message {ident}, which was not offered to it")
        nbytes = submission.op.nbytes
        if nbytes:
            link.streams.append(_Stream(submission, ident, _packed(submission.inputs[0]), nbytes))
            self._writing.add(link)
        else:
            self._finish(submission)

    def _data_came(self, link: _Link, ident: int, nbytes: int) -> None:
        stream = link.incoming.get(ident)
        if stream is None or not 0 < nbytes <= stream.left:
            raise BackendError(f"rank {link.peer} sends {nbytes} bytes of message {ident}, which are not due")
        ctypes.memmove(stream.address, self._address + link.reader.payload, nbytes)
        stream.address += nbytes
        stream.left -= nbytes
        if not stream.left:
            del link.incoming[ident]
            self._arrived(stream.submission, stream.land, link.peer)

    def _take_kept(self, receive: Submission, op: Recv, source: int, message: _Kept | _Offer | Submission) -> None:
        if isinstance(message, Submission):
            self._meet(message, receive)
            return
        link = self._links[source]
        if isinstance(message, _Offer):
            self._accept(link, receive, message)
        else:
            self._count(link, len(message.data))
            self._deliver(receive, source, message.code, message.numel, message.data, len(message.data))

    def _accept(self, link: _Link, receive: Submission, offer: _Offer) -> None:
        """Have the sender of a long message go ahead."""
        if not self._fits(receive, link.peer, offer.code, offer.numel):
            return
        nbytes = receive.op.nbytes
        values, land = arithmetic.landing(receive.outputs[0])
        if not link.writer.put(_CLEAR, ident=offer.ident):
            link.clears.append(offer.ident)
            self._writing.add(link)
        else:
            self._ring(link.peer)
        if nbytes:
            link.incoming[offer.ident] = _Stream(receive, offer.ident, values, nbytes, land)
        else:
            self._arrived(receive, land, link.peer)

    def _count(self, link: _Link, nbytes: int) -> None:
        """Tell the sender that it may send so much more ahead of its receive."""
        link.matched += framed(nbytes)
        self._words[link.matched_at] = link.matched

    def _deliver(
        self, receive: Submission, source: int, code: int, numel: int, address: int | bytes, nbytes: int
    ) -> bool:
        """Copy a whole message to its receive; False if it does not fit."""
        if not self._fits(receive, source, code, numel):
            return False
        if nbytes != receive.op.nbytes:
            raise BackendError(f"rank {source} sent {nbytes} bytes for {receive.op}")
        values, land = arithmetic.landing(receive.outputs[0])
        if nbytes:
            ctypes.memmove(values.data_ptr(), address, nbytes)
        self._arrived(receive, land, source)
        return True

    def _arrived(self, receive: Submission, land: Callable[[], object] | None, source: int) -> None:
        if land is not None:
            land()
        receive.work.source = source
        self._finish(receive)

    def _fits(self, receive: Submission, source: int, code: int, numel: int) -> bool:
        op = receive.op
        assert isinstance(op, Recv)
        if _CODES[op.dtype] == code and op.numel == numel:  # Recv.takes, without making a Send
            return True
        self.pending -= 1
        if code in _DTYPES:
            sent = str(Send(_DTYPES[code], numel, self._rank, op.tag))
            self._failed(CollectiveMismatchError(receive.work.seq, source, sent, self._rank, str(op)))
        else:
            self._failed(BackendError(f"rank {source} sent elements of a dtype unknown here (code {code:#x}) for {op}"))
        return False

    # -- messages to oneself, and the end -----------------------------------------------------------------------------

    def _send_to_self(self, submission: Submission, op: Send) -> None:
        receive = self._matching.claim(self._rank, op.tag)
        if receive is None:
            self._matching.keep(submission, self._rank, op.tag)
        else:
            self._meet(submission, receive)

    def _meet(self, send: Submission, receive: Submission) -> None:
        op = send.op
        assert isinstance(op, Send)
        values = _packed(send.inputs[0])
        if self._deliver(receive, self._rank, _CODES[op.dtype], op.numel, values.data_ptr(), op.nbytes):
            self._finish(send)

    def _finish(self, submission: Submission) -> None:
        self.pending -= 1
        self._done(submission)

    def _stop_reading(self, link: _Link) -> None:
        self._reading = [entry for entry in self._reading if entry[2] is not link]


def _packed(tensor: Tensor) -> Tensor:
    """The elements in row-major order, in memory that is just those."""
    return tensor if arithmetic.is_plain(tensor) else arithmetic.resolved(tensor)
