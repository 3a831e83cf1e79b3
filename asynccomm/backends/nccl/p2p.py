"""Messages and parcels of a GPU comm: heads over the side channel, payloads from device to device.

What a rank gives is told in a head (``envelopes``); what of it is on the device is offered to the takers
(``transfers``). A collective of parcels is one of the side channel's, so all heads of it come before any payload is
placed; a message is one of the side channel's messages, which so match by tag and source.

Copies of what comes go to two streams, which follow the callers' streams: one for collectives and one for messages,
because a caller's stream may wait for a later operation of a peer that first needs a message. Parcels on the host alone
use no stream. A collective that has waited for its memory starts long after its call, when the caller's stream may have
got work that waits for later operations; so it follows that stream as it was at the call, and makes all its copies on
the stream for collectives.
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

_MESSAGE: Final = struct.Struct("<IQQ")  # of a send: code of the dtype, elements, sequence number

Step = Callable[[], object]
Envelopes = Sequence[
    tuple[bytes, Sequence[tuple[Tensor, bool]]]
]  # heads, and bytes with whether they are on the device


@final
class PointToPoint:
    """Of one rank.

    Args:
        new_stream: makes one for new memory, and for what is copied when all has come.
        on_error: hears of what breaks the comm.
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
        self._turns = Sequencer()

    def submit(self, submission: Submission, stream: DeviceStream, flight: StreamPosition) -> Work[None]:
        """Start a message; returns what drives it on the side channel.

        Args:
            stream: the caller's, to be followed.
            flight: to follow the payload of a Send or Recv by.
        """
        parcels = submission.parcels
        match submission.op:
            case Send(peer=peer, tag=tag, dtype=dtype, numel=numel):
                head = _MESSAGE.pack(CODES[dtype], numel, submission.work.seq)
                envelopes = [(head, [(bytes_of(tensor), True) for tensor in submission.inputs if numel])]
                op = SendParcel("send", peer, tag, MessageSpace.TENSORS)
                return self._send(self._task(submission, stream, envelopes, 2), op, flight)
            case SendParcel() as op:
                task = self._task(submission, stream, [self._segments(parcel) for parcel in parcels], 2)
                return self._send(task, op, StreamPosition(self._device))
            case Recv(peer=source, tag=tag) as wanted:
                step = partial(self._take_message, self._task(submission, stream, (), 1), wanted, flight)
                return self._receive(RecvParcel("recv", source, tag, MessageSpace.TENSORS), step)
            case RecvParcel() as op:
                return self._receive(op, partial(self._take_parcels, self._task(submission, stream, (), 1)))
            case other:
                raise AssertionError(f"no such message: {other}")

    def _task(self, submission: Submission, stream: DeviceStream, envelopes: Envelopes, parts: int) -> _PayloadTask:
        """Of a message."""
        return _PayloadTask(self._device, submission, stream, self._for_messages, stream.record(), envelopes, parts)

    # -- giving -------------------------------------------------------------------------------------------------------

    def _segments(self, parcel: Parcel) -> tuple[bytes, list[tuple[Tensor, bool]]]:
        tensors = [tensor for tensor in parcel.tensors if tensor.numel()]
        return parcel.head, [(bytes_of(tensor), self._device.owns(tensor)) for tensor in tensors]

    def _send(self, task: _PayloadTask, op: SendParcel, flight: StreamPosition) -> Work[None]:
        parcel = self._packed(task, 0, {op.peer: flight})
        return self._side.submit(Call(op, (), (), None, parcels=(parcel,)), task.part_done)

    def _packed(self, task: _PayloadTask, which: int, takers: Mapping[int, StreamPosition]) -> Parcel:
        """A parcel for the side channel. What is on the device is offered to each taker: a part of ``task`` each."""
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
        """Start a collective of parcels; returns what drives it on the side channel.

        Args:
            stream: the caller's, to be followed.
            over: to be called once the memory of ``submission`` is free.
            called: of a collective that has waited: ``stream`` as it was at the call.
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
        with self._device.here(), self._device.allocating(at):
            delivery = Delivery(submission)
            envelopes = [self._segments(parcel) for parcel in submission.parcels]
            if not givers:
                delivery.finish()
        parts = 1 + len(takers) + bool(givers) + (called is not None)
        task = _PayloadTask(self._device, submission, stream, own, at.record(), envelopes, parts, delivery, over)
        if called is not None:
            self._await_copies(task)
        taking = partial(self._take_parcels, task) if givers else None
        return self._told(task, op, self._parcels_for(task, op, takers), taking)

    def _await_copies(self, task: _PayloadTask) -> None:
        """``task`` is to be done after its copies so far, which the caller's stream does not follow."""
        for tensor in task.delivery.made:
            if self._device.owns(tensor):
                self._device.lend(tensor, task.stream)
        self._poller.watch(task.own.handle, task.ready, task.part_done)

    def _parcels_for(self, task: _PayloadTask, op: Parcels, takers: Sequence[int]) -> list[Parcel]:
        """For the side channel."""
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
        """Exchange heads; then have ``taking`` see to what comes, if anything does."""
        inbox = HeaderReceiver()
        turn = self._turns.announce("parcels")

        def take() -> None:
            if taking is not None:  # not in the lane where NCCL may wait for ranks that first want to see us take this
                self._lanes.put("parcels", partial(self._guarded, taking, inbox))

        def come(error: AsyncCommError | None) -> None:
            if self._has_come(error):
                self._turns.ready(turn, take)
                task.part_done(None)

        return self._side.submit(Call(op, (), (), None, parcels=tuple(parcels), place=inbox), come)

    # -- taking -------------------------------------------------------------------------------------------------------

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
        if error is not None and not isinstance(error, BrokenError):  # those the side channel reports itself
            broken = BackendError(f"nccl could not take a message: {error}")
            broken.__cause__ = error
            self._on_error(broken)
        return error is None

    def _guarded(self, step: Callable[[Any], None], given: HeaderReceiver | AsyncCommError | None) -> None:
        """On a lane, or the poller: what goes wrong breaks the comm, not the thread."""
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
        with self._device.here(), self._device.allocating(task.own):
            memory, copy = arithmetic.landing(output)
        landing = RecvBuffer(bytes_of(memory), [] if copy is None else [copy])
        self._transfers.accept(source, envelope.number + self._rank, [landing], task.ready, flight, task.part_done)

    def _take_parcels(self, task: _PayloadTask, inbox: HeaderReceiver) -> None:
        envelopes = dict(sorted(inbox.envelopes.items()))
        if isinstance(task.work.op, RecvParcel):
            (task.work.source,) = envelopes
        lengths = {source: envelope.nbytes for source, envelope in envelopes.items()}
        delivery = task.delivery
        transfers: list[Callable[[Callable[..., object]], None]] = []
        steps: list[Step] = []
        if task.gives_device_memory:  # of which a place keeps this rank's share
            task.own.wait(task.ready)
        on_device = task.gives_device_memory
        for source, envelope in envelopes.items():
            on_device |= envelope.on_device
            with self._device.here(), self._device.allocating(task.own):
                places = delivery.accept(source, envelope.head, lengths)
                if isinstance(delivery.error, BrokenError):
                    raise delivery.error
                landings = [] if places is None else self._landings(task.own, envelope, places, steps)
            for place in places or ():
                if self._device.owns(place):
                    on_device = True
                    self._device.lend(place, task.stream)
            if not envelope.on_device:
                continue
            number = envelope.number + self._rank
            if places is None:
                self._transfers.refuse(source, number)
            else:
                accept = partial(
                    self._transfers.accept, source, number, landings, task.ready, StreamPosition(self._device)
                )
                transfers.append(accept)
        task.on_device = on_device
        finish = partial(self._finish, task, [*steps, delivery.finish])

        def finish_later(error: BrokenError | None) -> None:
            # copies between host and device wait, which is not for the poller's thread
            self._lanes.put("finish", partial(self._guarded, finish, error))

        all_here = Latch(len(transfers), finish_later)
        for transfer in transfers:
            transfer(all_here)
        if not transfers:
            if on_device:
                task.own.wait(task.ready)  # as a transfer would have
            all_here.end(None)

    def _landings(
        self, stream: DeviceStream, envelope: Envelope, places: Sequence[Tensor], steps: list[Step]
    ) -> list[RecvBuffer]:
        """Where each segment on the giver's device comes to; ``steps`` then bring home what cannot come there."""
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
                source = self._device.empty(nbytes, stream)
                landings.append(RecvBuffer(source))
            parts = source.split_with_sizes([len(piece) for piece in pieces])
            steps += [partial(arithmetic.write, piece, part) for piece, part in zip(pieces, parts, strict=True)]
        return landings

    def _finish(self, task: _PayloadTask, steps: Sequence[Step], error: BrokenError | None) -> None:
        """All payloads are on this rank: bring them to where they belong."""
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
        kept = [steps]  # and their memory, which torch would give to others as soon as the host lets go of it

        def passed(error: BrokenError | None) -> None:
            kept.clear()
            self._device.release(event)
            task.taken(error)

        self._poller.watch(task.own.handle, event, passed)


@final
class _PayloadTask:
    """One submission, done when all of its ``parts`` are."""

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
        self.envelopes = envelopes  #: what is given
        self.stream = stream  #: the caller's
        self.own = own  #: for new memory and copies
        #: behind all that the caller had queued, and the making of ``envelopes``; the task's from now on
        self.ready = ready
        self.on_device = False  #: whether anything that comes has to do with the device
        self.work = submission.work
        self.outputs = submission.outputs
        self.delivery = delivery if delivery is not None else Delivery(submission)
        self.error: AsyncCommError | None = None  #: what the Work is to fail with, while the comm goes on

    @property
    def gives_device_memory(self) -> bool:
        """Whether any of ``envelopes`` is on the device."""
        return any(on_device for _, segments in self.envelopes for _, on_device in segments)

    def taken(self, error: AsyncCommError | None = None) -> None:
        """All that comes is where it belongs: a part."""
        self.error = self.delivery.error
        self.part_done(error)

    def part_done(self, error: AsyncCommError | None) -> None:
        self._countdown(error)

    def _end(self, error: AsyncCommError | None) -> None:
        self._device.release(self.ready)
        if self._over is not None:  # first: an operation that is called once this one is settled need not wait
            self._over()
        self.work.settle(error or self.error)
