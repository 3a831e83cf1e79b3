"""Send and receive over sockets of the backend's own (``endpoint.py``).

gloo's messages are not used: only a thread can wait for one, a receive cannot leave its source open, and a message
longer than its receive ends the process. The messages here are matched by source and tag on the receiving rank.

- A **short** message leaves in the call, header and data together, and its send is done. It waits for its receive in
  the receiving rank's memory. At most ``WINDOW`` bytes of one sender do so: the receiver reports the bytes that
  operations have taken, and a message beyond that is sent as a long one.
- A **long** message is offered by its header. The receiving rank clears it when a receive matches, and the data goes
  from the sender's memory to the receiver's.

A header describes its message, so a message that does not fit its receive raises an error with both descriptions,
before any data is taken. A header that no sender writes raises BackendError.

Messages from a rank to itself never reach a socket.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import ConnectionEndedError, Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.gloo.endpoint import Endpoint
from asynccomm.backends.gloo.frame_exchange import FrameExchange
from asynccomm.backends.gloo.frames import LONGEST
from asynccomm.backends.gloo.links import Buffer, MessageLink, fill, view
from asynccomm.backends.gloo.messages import (
    HEADER_BYTES,
    REPORT,
    SHORT,
    Header,
    Kind,
    check,
    describe,
    impossible,
)
from asynccomm.backends.gloo.outbox import Outbox
from asynccomm.backends.gloo.staging import room, unpack
from asynccomm.backends.matching import MatchQueues
from asynccomm.backends.regions import bytes_of
from asynccomm.backends.spinning import SHORT_WAIT_SECONDS, waited
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.core.work import Work
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import MessageSpace, PeerOp, PeerParcel, Recv, Send
from asynccomm.ops.base import TensorOp
from asynccomm.ops.dtypes import BY_CODE, CODES

SPIN_SECONDS: Final = 2e-4  # for a late peer before a task suspends: some wake-ups
SPIN_BYTES: Final = 1 << 20  # a larger message takes longer than a wake-up anyway
SCRATCH: Final = 1 << 20  # bytes received at a time where a payload is discarded

_core: Final[Any] = load("asynccomm.backends.gloo._frames")


@final
class _Incoming:
    """A message of another rank that has arrived: its header, and the data of a short one."""

    __slots__ = ("data", "header", "link", "receive")

    def __init__(self, link: MessageLink, header: Header) -> None:
        self.link = link
        self.header = header
        self.data: bytes | bytearray | None = None  # None: a long message, or data that is still arriving
        self.receive: Submission | None = None  # matched while the data is still arriving


@final
class PointToPoint:
    """Sends and receives of one rank.

    Args:
        endpoint: None for a comm of one rank.
        frames: takes the frames of collectives, which use the same connections.
        on_error: called with an error that breaks the comm.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        endpoint: Endpoint | None,
        frames: FrameExchange,
        on_error: Callable[[BrokenError], object],
    ) -> None:
        self._rank = rank
        self._size = size
        self._endpoint = endpoint
        self._lock = threading.Lock() if endpoint is None else endpoint.lock  # guards the fields below
        self._frames = frames
        self._on_error = on_error
        self._queues: MatchQueues[Submission, _Incoming | Submission] = MatchQueues(size, _take)
        self._finished: deque[Callable[[], object]] = deque()  # run without the lock
        self._broken = False
        self._gone: dict[int, str] = {}  # ranks without a connection any more, with the reason
        self._outbox: Outbox | None = None if endpoint is None else Outbox(endpoint, self._sent)
        self._cleared: dict[tuple[int, int], tuple[_Incoming, Submission]] = {}  # by source and number
        self._unreported: dict[MessageLink, int] = {}  # bytes taken by operations, of inbound links
        self._waited = 0.0  # seconds from the call to the end of the last message up to SPIN_BYTES

    # -- from the comm -------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> None:
        """Start a send or receive. Under the comm's lock."""
        if torch.is_inference_mode_enabled():  # other threads write the memory that is allocated here
            with torch.inference_mode(False):
                return self.submit(submission)
        with self._lock:
            if not self._broken:
                try:
                    self._start(submission)
                except Exception as exc:
                    self._fail(exc)
        self.settle()

    def withdraw(self, receive: Submission) -> None:
        """Drop a receive if it is still posted: another backend has taken its claim. From any thread."""
        assert isinstance(receive.op, PeerOp)
        with self._lock:
            self._queues.withdraw_one(receive, receive.op.key)

    def spin(self, work: Work[Any]) -> None:
        """Receive on this thread for some time, before it waits for ``work``, if the last wait was short."""
        endpoint = self._endpoint
        long = isinstance(work.op, TensorOp) and work.op.nbytes > SPIN_BYTES
        if endpoint is None or long or self._waited > SHORT_WAIT_SECONDS:
            return
        until = time.perf_counter() + SPIN_SECONDS
        if not work.op.p2p:
            self._frames.receive(until, work.done)
        elif not isinstance(_core, CoreUnavailable):
            self._receive_in_c(endpoint, work, until)
        endpoint.serve(until, work.done)

    def _receive_in_c(self, endpoint: Endpoint, work: Work[Any], until: float) -> None:
        """Receive a short tensor, if ``work`` waits for the next message of a rank, as ``spin`` does."""
        op = work.op
        if not isinstance(op, Recv) or op.peer is None or op.peer == self._rank or op.nbytes > SHORT:
            return
        if torch.is_inference_mode_enabled():  # memory made in the caller's mode could not be written to later
            with torch.inference_mode(False):
                return self._receive_in_c(endpoint, work, until)
        try:
            with self._lock:
                endpoint.before_read()
                receive = None if self._broken else self._queues.next_receive(op.peer, op.key)
                if receive is not None and receive.work is work:
                    self._receive_next(endpoint, op.peer, op, receive, until - time.perf_counter())
        finally:
            self.settle()

    def _receive_next(self, endpoint: Endpoint, peer: int, op: Recv, receive: Submission, seconds: float) -> None:
        link = endpoint.inbound(peer)
        if link is None or endpoint.writing or not arithmetic.is_plain(receive.outputs[0]):  # C does not write
            return
        endpoint.note_use()
        header = Header(Kind.TENSOR, op.tag, 0, op.numel, CODES[op.dtype]).pack()
        outcome: list[bytes | None] = []
        arguments = link.fd, header, receive.outputs[0].data_ptr(), op.nbytes, seconds, outcome
        try:
            _core.receive_message(*arguments)
        finally:  # also if a signal handler raises
            if not outcome:
                self._fail(BackendError("a message that was read in part is lost"))
            elif outcome[0] is not None:
                endpoint.feed(peer, outcome[0])
            else:
                self._queues.claim(peer, op.key)
                self._landed(link, op.nbytes, receive)

    def settle(self) -> None:
        """Run the steps that need no lock, also those of frames."""
        self._frames.settle()
        finished = self._finished
        while finished:
            try:
                step = finished.popleft()
            except IndexError:  # another thread was faster
                return
            step()

    def unreceived(self) -> list[str]:
        """The short messages that no receive has taken, in words; the sender of a long one waits itself."""
        with self._lock:
            return [
                describe(source, message.header)
                for source, key, message in self._queues.kept()
                if isinstance(message, _Incoming)
                and not message.header.offered
                and MessageSpace.of_key(key)[0] is not MessageSpace.INTERNAL
            ]

    def drop(self) -> None:
        """Drop all messages; nothing is started or settled any more. From any thread."""
        with self._lock:
            self._broken = True
            self._queues.clear()
            if self._outbox is not None:
                self._outbox.clear()
            self._cleared.clear()
            self._finished.clear()

    # -- starting; all of the following is called under the lock -------------------------------------------------------

    def _start(self, submission: Submission) -> None:
        op = submission.op
        assert isinstance(op, PeerOp)
        if op.is_send:
            if op.peer == self._rank:
                self._send_to_self(op, submission)
            else:
                self._send(op, submission)
            return
        if submission.claim is not None and submission.claim.winner is not None:
            return
        if self._endpoint is not None:  # so that the end of the sender shows
            for peer in range(self._size) if op.peer is None else (op.peer,):
                if peer != self._rank and peer not in self._gone:
                    self._endpoint.link_to(peer)
        found = self._queues.post(submission, op.peer, op.key)
        if found is not None:
            source, message = found
            if isinstance(message, Submission):
                self._meet(message, submission)
            else:
                self._take(source, message, submission)
        elif op.peer is None:
            self._check_any_source()
        elif op.peer in self._gone:
            self._lose(op.peer, submission)

    def _send(self, op: PeerOp, submission: Submission) -> None:
        endpoint, peer = self._endpoint, op.peer
        assert endpoint is not None
        assert peer is not None
        link = None if peer in self._gone else endpoint.link_to(peer)
        if link is None:
            self._lose(peer, submission)
            return
        assert self._outbox is not None
        if self._outbox.send(link, submission):
            self._finished.append(submission.work.settle)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def arrived(self, link: MessageLink, header: Header) -> None:
        """Handle a header from another rank."""
        if not self._broken:
            try:
                self._arrived(link, header)
            except Exception as exc:
                self._fail(exc)

    def _guarded(self, step: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            step()
        except Exception as exc:
            self._fail(exc)

    def _arrived(self, link: MessageLink, header: Header) -> None:
        if link.outbound:
            assert self._outbox is not None
            self._outbox.answered(link, header)
        elif header.kind == Kind.FRAME:
            if not 0 < header.first <= LONGEST:
                raise impossible(link.peer, header)
            self._receive_short(link, header.first, partial(self._frames.arrived, link.peer))
        elif header.kind == Kind.DATA:
            found = self._cleared.pop((link.peer, header.number), None)
            if found is None:
                raise impossible(link.peer, header)
            self._receive_data(*found)
        else:
            nbytes = check(link.peer, header)
            incoming = _Incoming(link, header)
            receive = self._queues.claim(link.peer, header.key)
            if receive is None:
                self._queues.keep(incoming, link.peer, header.key)
            if incoming.header.offered:
                if receive is not None:
                    self._take(link.peer, incoming, receive)
                return
            incoming.receive = receive
            if receive is not None and nbytes and _lands_as_it_is(header, receive):
                landed = partial(self._landed, link, nbytes, receive)
                link.receive([view(receive.outputs[0])], partial(self._guarded, landed))
            else:
                self._receive_short(link, nbytes, partial(self._stored, incoming))

    def _landed(self, link: MessageLink, nbytes: int, receive: Submission) -> None:
        """Complete a receive; its memory has the data of a short message already."""
        self._report_taken(link, HEADER_BYTES + nbytes)
        receive.work.source = link.peer
        self._finished.append(partial(self._settle, receive))

    def _receive_short(self, link: MessageLink, nbytes: int, then: Callable[[bytes | bytearray], object]) -> None:
        data = link.take(nbytes)
        if data is not None:
            then(data)
            return
        memory = bytearray(nbytes)
        link.receive([memoryview(memory)], lambda: self._guarded(lambda: then(memory)))

    def _stored(self, incoming: _Incoming, data: bytes | bytearray) -> None:
        incoming.data = data
        if incoming.receive is not None:
            self._take(incoming.link.peer, incoming, incoming.receive)

    def _take(self, source: int, incoming: _Incoming, receive: Submission) -> None:
        """Receive a message that matches."""
        header = incoming.header
        if not isinstance(receive.op, PeerParcel):
            assert isinstance(receive.op, Recv)
            sent = Send(BY_CODE[header.second], header.first, self._rank, receive.op.tag)
            if not receive.op.takes(sent):
                sides = source, str(sent), self._rank, str(receive.op)
                raise CollectiveMismatchError(receive.work.seq, *sides)
        if incoming.header.offered and source in self._gone:
            self._lose(source, receive)
        elif incoming.header.offered:
            link = incoming.link
            self._cleared[source, header.number] = incoming, receive
            link.put(Header(Kind.CLEAR, number=header.number).pack())
            self._flush(link)
        elif incoming.data is None:  # it is arriving
            incoming.receive = receive
        else:
            self._report_taken(incoming.link, HEADER_BYTES + len(incoming.data))
            self._deliver(source, header, incoming.data, receive)

    def _report_taken(self, link: MessageLink, nbytes: int) -> None:
        taken = self._unreported.get(link, 0) + nbytes
        if taken >= REPORT:
            link.put(Header(Kind.TAKEN, first=taken).pack())
            self._flush(link)
            taken = 0
        self._unreported[link] = taken

    def _deliver(self, source: int, header: Header, data: bytes | bytearray, receive: Submission) -> None:
        """Hand over the data of a short message."""
        receive.work.source = source
        if header.kind == Kind.TENSOR:
            output = receive.outputs[0]
            if arithmetic.is_plain(output):
                fill(output, data)
            else:
                unpack(_tensor(data), receive.outputs)
        else:
            delivery = Delivery(receive)
            start = header.first
            tensors = delivery.accept(source, bytes(data[:start]), {source: len(data) - start})
            if tensors is not None:
                unpack(_tensor(data[start:]), tensors)
            conclude(delivery, receive)
        self._finished.append(partial(self._settle, receive))

    def _receive_data(self, incoming: _Incoming, receive: Submission) -> None:
        """Receive the data of a long message, which follows."""
        link, header = incoming.link, incoming.header
        receive.work.source = link.peer
        if header.kind == Kind.PARCEL_OFFER:
            head = memoryview(bytearray(header.first))
            then = partial(self._receive_payload, incoming, receive, head)
            link.receive([head], partial(self._guarded, then))
            return
        plain, copy = arithmetic.landing(receive.outputs[0])
        memory = bytes_of(plain)

        def landed() -> None:
            if copy is not None:
                copy()
            self._finished.append(partial(self._settle, receive))

        link.receive([view(memory)], partial(self._guarded, landed))

    def _receive_payload(self, incoming: _Incoming, receive: Submission, head: Buffer) -> None:
        link, length = incoming.link, incoming.header.second
        delivery = Delivery(receive)
        tensors = delivery.accept(link.peer, bytes(head), {link.peer: length})
        memory = None if tensors is None else [bytes_of(tensor) for tensor in tensors if tensor.numel()]

        def landed() -> None:
            conclude(delivery, receive)
            if memory is not None:
                memory.clear()  # kept until here
            self._finished.append(partial(self._settle, receive))

        if memory is None:
            self._discard(link, length, landed)
        else:
            link.receive([view(part) for part in memory], partial(self._guarded, landed))

    def _discard(self, link: MessageLink, length: int, then: Callable[[], object]) -> None:
        if not length:
            self._guarded(then)
            return
        scratch = memoryview(bytearray(min(length, SCRATCH)))
        link.receive([scratch], lambda: self._discard(link, length - len(scratch), then))

    def _sent(self, submission: Submission) -> None:
        self._finished.append(partial(self._settle, submission))

    def _flush(self, link: MessageLink) -> None:
        assert self._endpoint is not None
        self._endpoint.flush(link)

    def _settle(self, submission: Submission) -> None:
        if submission.nbytes <= SPIN_BYTES:
            self._waited = waited(submission.work.started, submission.nbytes)
        submission.work.settle(submission.error)

    # -- failure -------------------------------------------------------------------------------------------------------

    def gone(self, peer: int, reason: str) -> None:
        """Handle the end of a connection with ``peer``; the other connection with it may end later."""
        if self._broken:
            return
        reason = self._gone.setdefault(peer, reason)
        self._frames.gone(peer, reason)
        unsent = [] if self._outbox is None else self._outbox.unsent(peer)
        cleared = [receive for (source, _), (_, receive) in self._cleared.items() if source == peer]
        waiting = [*unsent, *cleared, *self._queues.withdraw(peer)]
        if waiting:
            self._lose(peer, waiting[0])
        elif self._endpoint is not None and self._endpoint.cut(peer):
            self._fail(ConnectionEndedError(peer, reason))
        else:
            self._check_any_source()

    def _check_any_source(self) -> None:
        if not self._gone or len(self._gone) < self._size - 1:
            return
        receives = self._queues.withdraw(None)
        if any(receive.claim is None or receive.claim.give_up() for receive in receives):
            self._fail(BackendError(f"the connections of all other ranks have ended: {self._gone}"))

    def _lose(self, peer: int, submission: Submission) -> None:
        """Fail an operation with a rank that has gone."""
        reason = self._gone.get(peer, "no connection")
        self._fail(ConnectionEndedError(peer, reason, str(submission.op), message=True))

    def _fail(self, exc: Exception) -> None:
        """Break the comm: nothing more is received, because the order of messages may be lost."""
        self._broken = True
        error = exc if isinstance(exc, BrokenError) else BackendError(f"a message failed: {type(exc).__name__}: {exc}")
        error.__traceback__ = None
        self._finished.append(partial(self._on_error, error))

    # -- from this rank to itself --------------------------------------------------------------------------------------

    def _send_to_self(self, op: PeerOp, submission: Submission) -> None:
        receive = self._queues.claim(self._rank, op.key)
        if receive is None:
            self._queues.keep(submission, self._rank, op.key)
        else:
            self._meet(submission, receive)

    def _meet(self, send: Submission, recv: Submission) -> None:
        recv.work.source = self._rank
        if isinstance(recv.op, PeerParcel):
            parcel = send.parcels[0]
            delivery = Delivery(recv)
            tensors = delivery.accept(self._rank, parcel.head, {self._rank: parcel.nbytes})
            if tensors is not None:
                unpack(torch.cat([bytes_of(tensor) for tensor in parcel.tensors] or [room(0)]), tensors)
            conclude(delivery, recv)
        else:
            assert isinstance(send.op, Send)
            assert isinstance(recv.op, Recv)
            if not recv.op.takes(send.op):
                sides = self._rank, str(send.op), self._rank, str(recv.op)
                raise CollectiveMismatchError(send.work.seq, *sides)
            unpack(bytes_of(send.inputs[0]), recv.outputs)  # one side may be complex, the other real
        self._finished.extend([partial(self._settle, recv), send.work.settle])


def _take(receive: Submission) -> bool:
    """Take the claim to a receive from any source; False: another backend has it."""
    return receive.claim is None or receive.claim.take(receive)


def _lands_as_it_is(header: Header, receive: Submission) -> bool:
    """Whether the data of a message can be read to the memory of the tensor that it is for."""
    op = receive.op
    if header.kind != Kind.TENSOR or not isinstance(op, Recv):
        return False
    same = (header.first, header.second) == (op.numel, CODES[op.dtype])
    return same and arithmetic.is_plain(receive.outputs[0])


def _tensor(data: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else room(0)


def conclude(delivery: Delivery, submission: Submission) -> None:
    """Finish a complete delivery. Raises an error that breaks the comm; ``submission`` keeps any other error."""
    delivery.finish()
    if isinstance(delivery.error, BrokenError):
        raise delivery.error
    submission.error = delivery.error
