"""Messages and parcels of a GPU comm: headers over the side channel, payloads from device to device.

A header describes a payload (``envelopes``); the payload's segments on the device are offered to the receivers
(``transfers``). A parcel collective is one collective of the side channel, so all its headers arrive before any payload
gets its memory; a message is one message of the side channel, which matches it by tag and source.

Received data is copied on two streams that follow the callers' streams: one stream for collectives and one for
messages, because a caller's stream may wait for a later operation of a peer that first needs a message. Parcels that
are on the host only use no stream. A collective that has waited for its memory starts long after its call, and the
caller's stream may by then hold work that waits for later operations; so the collective follows that stream as of the
call, and makes all its copies on the stream for collectives.

Payloads arrive on the streams of ``transfers``, which wait for the caller's stream. So new memory for payloads is taken
from torch's cache for a stream that runs no copies: in the cache for one of the streams above, memory counts as free as
soon as the host has dropped it, though copies queued on that stream may still use it. For the same reason each task
keeps its memory until the host has seen the last copy pass. The transfers wait for the stream of the memory, too: torch
may fill new memory there (``torch.use_deterministic_algorithms``), or allocate in its order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.latch import Latch
from asynccomm.backends.nccl.device import Device, DeviceStream, Event
from asynccomm.backends.nccl.envelopes import ByteCursor, Envelope, HeaderReceiver, packed
from asynccomm.backends.nccl.poller import Poller
from asynccomm.backends.nccl.sequencer import Sequencer, Ticket
from asynccomm.backends.nccl.side_channel import SideChannel
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.backends.nccl.transfers import RecvBuffer, Transfers
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.backends.regions import bytes_of
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import Call, MessageSpace, Parcel, Parcels, Recv, RecvParcel, Send, SendParcel
from asynccomm.ops.dtypes import BY_CODE, CODES

_MESSAGE: Final = struct.Struct("<IQQ")  # header of a send: code of the dtype, elements, sequence number

Step = Callable[[], object]
Envelopes = Sequence[
    tuple[bytes, Sequence[tuple[Tensor, bool]]]
]  # per payload: header, and segments with whether they are on the device


@final
class PointToPoint:
    """The messages and parcel collectives of one rank.

    Args:
        new_stream: makes a stream, for copies of received data or for new memory.
        on_error: called with each error that breaks the comm.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: Device,
        new_stream: Callable[[], DeviceStream],
        side: SideChannel,
        transfers: Transfers,
        poller: Poller[Event],
        lanes: OrderedExecutor,
        on_error: Callable[[BrokenError], object],
    ) -> None:
        self._rank, self._size, self._device, self._side, self._transfers = rank, size, device, side, transfers
        self._poller, self._lanes, self._on_error = poller, lanes, on_error
        self._for_messages, self._for_collectives = new_stream(), new_stream()
        self._for_memory = new_stream()
        self._turns = Sequencer()

    def submit(self, submission: Submission, stream: DeviceStream, flight: StreamPosition) -> Work[None]:
        """Start a message; returns the side channel's Work that drives it.

        Args:
            stream: the caller's stream, which the message follows.
            flight: tracks the payload of a Send or Recv.
        """
        parcels = submission.parcels
        match submission.op:
            case Send(peer=peer, tag=tag, dtype=dtype, numel=numel):
                head = _MESSAGE.pack(CODES[dtype], numel, submission.work.seq)
                envelopes = [(head, [(self._bytes(tensor, stream), True) for tensor in submission.inputs if numel])]
                op = SendParcel("send", peer, tag, MessageSpace.HEADERS)
                return self._send(self._task(submission, stream, envelopes, 2), op, flight)
            case SendParcel() as op:
                envelopes = [self._segments(parcel, stream) for parcel in parcels]
                task = self._task(submission, stream, envelopes, 2)
                return self._send(task, op, StreamPosition(self._device))
            case Recv(peer=source, tag=tag) as wanted:
                step = partial(self._take_message, self._task(submission, stream, (), 1), wanted, flight)
                return self._receive(RecvParcel("recv", source, tag, MessageSpace.HEADERS), step)
            case RecvParcel() as op:
                return self._receive(op, partial(self._take_parcels, self._task(submission, stream, (), 1)))
            case other:
                raise AssertionError(f"no such message: {other}")

    def _task(self, submission: Submission, stream: DeviceStream, envelopes: Envelopes, parts: int) -> _PayloadTask:
        """The task of a message."""
        return _PayloadTask(self._device, submission, stream, self._for_messages, stream.record(), envelopes, parts)

    # -- sending ------------------------------------------------------------------------------------------------------

    def _segments(self, parcel: Parcel, stream: DeviceStream) -> tuple[bytes, list[tuple[Tensor, bool]]]:
        tensors = [tensor for tensor in parcel.tensors if tensor.numel()]
        return parcel.head, [(self._bytes(tensor, stream), self._device.owns(tensor)) for tensor in tensors]

    def _bytes(self, tensor: Tensor, stream: DeviceStream) -> Tensor:
        """The bytes of ``tensor``, copied on ``stream`` if it is not plain: a scope may end on another stream."""
        if arithmetic.is_plain(tensor):
            return bytes_of(tensor)
        with self._device.here(), self._device.allocating(stream):
            return bytes_of(tensor)

    def _send(self, task: _PayloadTask, op: SendParcel, flight: StreamPosition) -> Work[None]:
        parcel = self._packed(task, 0, {op.peer: flight})
        return self._side.submit(Call(op, (), (), None, parcels=(parcel,)), task.part_done)

    def _packed(self, task: _PayloadTask, which: int, takers: Mapping[int, StreamPosition]) -> Parcel:
        """A parcel for the side channel; offers its device segments to ``takers``, one part of ``task`` each."""
        head, segments = task.envelopes[which]
        offered = [data for data, on_device in segments if on_device]
        number = self._transfers.number()
        for rank, flight in takers.items():
            if offered:
                self._transfers.offer(rank, number + rank, offered, task.ready, flight, task.part_done)
            else:
                flight.pass_()
                task.part_done(None)
        return packed(number, head, segments)

    def collective(
        self,
        submission: Submission,
        op: Parcels,
        stream: DeviceStream,
        over: Callable[[], object],
        called: Event | None,
    ) -> Work[None]:
        """Start a parcel collective; returns the side channel's Work that drives it.

        Args:
            stream: the caller's stream, which the collective follows.
            over: called once the memory of ``submission`` is free.
            called: for a collective that has waited: an event on ``stream``, recorded at the call.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        takers = [rank for rank in others if op.gives(self._rank) and op.takes(rank)]
        givers = [rank for rank in others if op.takes(self._rank) and op.gives(rank)]
        own = self._for_collectives
        at = stream
        if called is not None:
            at = own
            own.wait(called)
            self._device.release(called)
        given = [submission.copies, submission.parcels]  # the delivery replaces tensors that it copies
        with self._device.here(), self._device.allocating(at):
            delivery = Delivery(submission)
            envelopes = [self._segments(parcel, at) for parcel in submission.parcels]
            if not givers:
                delivery.finish()
        parts = 1 + len(takers) + bool(givers) + (called is not None)
        task = _PayloadTask(self._device, submission, stream, own, at.record(), envelopes, parts, delivery, over)
        if called is not None:
            self._await_copies(task, given)
        taking = partial(self._take_parcels, task) if givers else None
        return self._told(task, op, self._parcels_for(task, op, takers), taking)

    def _await_copies(self, task: _PayloadTask, kept: list[Any]) -> None:
        """Make ``task`` wait for its copies so far, which the caller's stream does not follow.

        Args:
            kept: the tensors that they read.
        """
        for tensor in task.delivery.made:
            if self._device.owns(tensor):
                self._device.lend(tensor, task.stream)

        def passed(error: BrokenError | None) -> None:
            kept.clear()
            task.part_done(error)

        self._poller.watch(task.own.handle, task.ready, passed)

    def _parcels_for(self, task: _PayloadTask, op: Parcels, takers: Sequence[int]) -> list[Parcel]:
        """The parcels of ``task`` for the side channel."""
        if not takers:
            return []
        if op.shared:
            return [self._packed(task, 0, {rank: StreamPosition(self._device) for rank in takers})]
        return [
            self._packed(task, rank, {rank: StreamPosition(self._device)}) if rank in takers else Parcel(b"", ())
            for rank in range(self._size)
        ]

    def _told(
        self,
        task: _PayloadTask,
        op: Parcels,
        parcels: Sequence[Parcel],
        taking: Callable[[HeaderReceiver], None] | None,
    ) -> Work[None]:
        """Exchange headers; then run ``taking``, if this rank receives payloads."""
        inbox = HeaderReceiver()
        turn = self._turns.announce("parcels")

        def take() -> None:
            if taking is not None:  # not in the lane where NCCL may wait for ranks that first need this rank to accept
                self._lanes.put("parcels", partial(self._guarded, taking, inbox))

        def come(error: AsyncCommError | None) -> None:
            if self._has_come(error):
                self._turns.ready(turn, take)
                task.part_done(None)

        return self._side.submit(Call(op, (), (), None, parcels=tuple(parcels), place=inbox), come)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self, op: RecvParcel, step: Callable[[HeaderReceiver], None]) -> Work[None]:
        inbox = HeaderReceiver()
        turns: list[Ticket] = []

        def place(source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
            turns.append(self._turns.announce((source, op.channel.key(op.tag))))
            return inbox(source, head, lengths)

        def take() -> None:
            (source,) = inbox.envelopes
            self._lanes.put(("come", source), partial(self._guarded, step, inbox))

        def come(error: AsyncCommError | None) -> None:
            if self._has_come(error):
                self._turns.ready(turns[0], take)

        return self._side.submit(Call(op, (), (), None, place=place), come)

    def _has_come(self, error: AsyncCommError | None) -> bool:
        if error is not None and not isinstance(error, BrokenError):  # the side channel reports a BrokenError itself
            broken = BackendError(f"nccl could not take a message: {error}")
            broken.__cause__ = error
            self._on_error(broken)
        return error is None

    def _guarded(self, step: Callable[[Any], None], given: HeaderReceiver | AsyncCommError | None) -> None:
        """Run ``step`` on a lane or on the poller's thread: an exception breaks the comm, not the thread."""
        try:
            step(given)
        except BrokenError as exc:
            self._on_error(exc)
        except Exception as exc:
            error = BackendError(f"nccl could not take a message: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            self._on_error(error)

    def _take_message(self, task: _PayloadTask, op: Recv, flight: StreamPosition, inbox: HeaderReceiver) -> None:
        ((source, envelope),) = inbox.envelopes.items()
        task.work.source = source
        code, numel, seq = _MESSAGE.unpack(envelope.head)
        sent = Send(BY_CODE[code], numel, self._rank, op.tag)
        if not op.takes(sent):
            raise CollectiveMismatchError(seq, source, str(sent), self._rank, str(op))
        if envelope.nbytes != sent.nbytes or (numel and envelope.segments != [(sent.nbytes, True)]):
            raise BackendError(
                f"rank {source} offers {envelope.nbytes} bytes in {len(envelope.segments)} segments as {sent}"
            )
        if not numel:
            flight.pass_()
            task.part_done(None)
            return
        (output,) = task.outputs
        with self._device.here(), self._device.allocating(self._for_memory):
            memory, copy = arithmetic.landing(output)
        landing = RecvBuffer(bytes_of(memory), [] if copy is None else [copy])
        ready = self._ready(task, new=copy is not None)
        self._transfers.accept(source, envelope.number + self._rank, [landing], ready, flight, task.part_done)

    def _ready(self, task: _PayloadTask, *, new: bool) -> list[Event]:
        """The events after which the memory of ``task`` may be written, if some of it may be ``new``."""
        if new:
            task.allocated.append(self._for_memory.record())
        return [task.ready, *task.allocated]

    def _take_parcels(self, task: _PayloadTask, inbox: HeaderReceiver) -> None:
        envelopes = dict(sorted(inbox.envelopes.items()))
        if isinstance(task.work.op, RecvParcel):
            (task.work.source,) = envelopes
        lengths = {source: envelope.nbytes for source, envelope in envelopes.items()}
        delivery = task.delivery
        transfers: list[Callable[[Sequence[Event], StreamPosition, Callable[..., object]], None]] = []
        steps: list[Step] = []
        on_device = task.gives_device_memory
        for source, envelope in envelopes.items():
            on_device |= envelope.on_device
            with self._device.here(), self._device.allocating(self._for_memory):
                places = delivery.accept(source, envelope.head, lengths)
                if isinstance(delivery.error, BrokenError):
                    raise delivery.error
                landings = [] if places is None else self._landings(envelope, places, steps)
            on_device |= any(self._device.owns(place) for place in places or ())
            if not envelope.on_device:
                continue
            number = envelope.number + self._rank
            if places is None:
                self._transfers.refuse(source, number)
            else:
                transfers.append(partial(self._transfers.accept, source, number, landings))
        for place in delivery.places:  # the caller may use them, and drop them, on its own stream
            if self._device.owns(place):
                self._device.lend(place, task.stream)
        task.on_device = on_device
        finish = partial(self._finish, task, [*steps, delivery.finish])

        def finish_later(error: BrokenError | None) -> None:
            # copies between host and device block, which the poller's thread must not
            self._lanes.put("finish", partial(self._guarded, finish, error))

        ready = self._ready(task, new=on_device)
        if not transfers:
            for event in ready if on_device else ():
                task.own.wait(event)  # a transfer would have done so
            finish_later(None)
            return
        all_here = Latch(len(transfers), finish_later)
        for accept in transfers:
            accept(ready, StreamPosition(self._device), all_here)

    def _landings(self, envelope: Envelope, places: Sequence[Tensor], steps: list[Step]) -> list[RecvBuffer]:
        """The receive buffer of each segment on the sender's device.

        Adds the copies from segments that cannot arrive in their final memory to ``steps``.
        """
        cursor = ByteCursor(places)
        landings: list[RecvBuffer] = []
        along = envelope.along
        for nbytes, on_device in envelope.segments:
            pieces = cursor.next(nbytes)
            if not on_device:
                source, along = along[:nbytes], along[nbytes:]
            elif len(pieces) == 1 and self._device.owns(pieces[0]):
                landings.append(RecvBuffer(pieces[0]))
                continue
            else:
                source = self._device.empty(nbytes, self._for_memory)
                landings.append(RecvBuffer(source))
            parts = source.split_with_sizes([len(piece) for piece in pieces])
            steps += [partial(arithmetic.write, piece, part) for piece, part in zip(pieces, parts, strict=True)]
        return landings

    def _finish(self, task: _PayloadTask, steps: Sequence[Step], error: BrokenError | None) -> None:
        """Copy the payloads, all of which are on this rank, to their final memory."""
        if error is not None:
            self._on_error(error)
            return
        if not task.on_device:
            for step in steps:
                step()
            task.taken()
            return
        for step in steps:
            task.own.run(step)
        event = task.own.record()
        kept = [steps]  # keeps their memory: torch reuses it as soon as the host drops the last reference

        def passed(error: BrokenError | None) -> None:
            kept.clear()
            self._device.release(event)
            task.taken(error)

        self._poller.watch(task.own.handle, event, passed)


@final
class _PayloadTask:
    """One submission with payloads, settled when all of its ``parts`` are done."""

    def __init__(
        self,
        device: Device,
        submission: Submission,
        stream: DeviceStream,
        own: DeviceStream,
        ready: Event,
        envelopes: Envelopes,
        parts: int,
        delivery: Delivery | None = None,
        over: Callable[[], object] | None = None,
    ) -> None:
        self._device = device
        self._over = over
        self._countdown = Latch(parts, self._end)
        self.envelopes = envelopes  #: the payloads to send
        self.stream = stream  #: the caller's stream
        self.own = own  #: the stream for copies
        #: event behind the caller's queued work and the making of ``envelopes``; the task owns it
        self.ready = ready
        self.allocated: list[Event] = []  #: events behind the allocation of new memory; the task owns them
        self.on_device = False  #: whether any received payload, or its destination, is on the device
        self.work = submission.work
        self.outputs = submission.outputs
        self.delivery = delivery if delivery is not None else Delivery(submission)
        self.error: AsyncCommError | None = None  #: error of this Work alone: the comm stays usable

    @property
    def gives_device_memory(self) -> bool:
        """Whether any of ``envelopes`` is on the device."""
        return any(on_device for _, segments in self.envelopes for _, on_device in segments)

    def taken(self, error: AsyncCommError | None = None) -> None:
        """Count one part as done: all received payloads are in their final memory."""
        self.error = self.delivery.error
        self.part_done(error)

    def part_done(self, error: AsyncCommError | None) -> None:
        self._countdown(error)

    def _end(self, error: AsyncCommError | None) -> None:
        for event in (self.ready, *self.allocated):
            self._device.release(event)
        if self._over is not None:  # before settling: an operation called after that must find the memory free
            self._over()
        self.work.settle(error or self.error)
