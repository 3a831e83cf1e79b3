"""Transfers of payloads in device memory, from rank to rank.

The sender *offers* a payload: it keeps the payload under a number, and a message over the side channel carries the
number to the receiver. Once the receiver has memory for the payload, it *accepts*: it answers "clear to send" with the
number, and both ranks issue their half of the transfer. So neither half ever waits on the device for the other,
transfers between two ranks run in the order in which the receiver accepts, and refused payloads are never moved.

Each direction between two ranks has its own NCCL communicator, of two ranks, and its own stream, both made on first
use, so that no transfer blocks another pair, the other direction, or the collectives.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.nccl.api import Config, Nccl
from asynccomm.backends.nccl.communicator import Communicator
from asynccomm.backends.nccl.device import Device, DeviceStream, Event
from asynccomm.backends.nccl.plan import NcclCall
from asynccomm.backends.nccl.poller import Poller
from asynccomm.backends.nccl.side_channel import SideChannel
from asynccomm.backends.nccl.stream_order import StreamPosition
from asynccomm.backends.ordered_executor import OrderedExecutor
from asynccomm.errors import AsyncCommError, BackendError, BrokenError
from asynccomm.ops import Call, MessageSpace, Parcel, RecvParcel, SendParcel

_VERDICT: Final = struct.Struct("<Q?")  # number of the offer, whether accepted; a unique id may follow
_TAG: Final = 1  # in the internal message space; the CPU backends use 0
_BYTE: Final = torch.uint8

Done = Callable[[BrokenError | None], object]


@final
class RecvBuffer(NamedTuple):
    """Memory that receives one segment of a payload."""

    memory: Tensor  #: bytes on the device
    copies: Sequence[Callable[[], object]] = ()  #: copies to queue behind the transfer


@final
class _SendOffer(NamedTuple):
    peer: int
    segments: Sequence[Tensor]
    ready: Event
    flight: StreamPosition
    done: Done


@final
class Transfers:
    """The offers and transfers of one rank.

    Args:
        on_error: called with transport errors.
        new_stream: makes the stream of a lane.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        nccl: Nccl,
        config: Config,
        device: Device,
        side: SideChannel,
        poller: Poller[Event],
        lanes: OrderedExecutor,
        new_stream: Callable[[], DeviceStream],
        on_error: Callable[[BrokenError], object],
    ) -> None:
        self._rank, self._nccl, self._device = rank, nccl, device
        # non-blocking: a lane that connects to a lost peer must be stoppable, and has a thread of its own to wait on
        self._config = replace(config, blocking=False)
        self._side, self._poller, self._lanes = side, poller, lanes
        self._new_stream, self._on_error = new_stream, on_error
        self._numbers = itertools.count(0, size)
        self._offers: dict[int, _SendOffer] = {}
        self._out: dict[int, Communicator] = {}  # by receiver
        self._in: dict[int, Communicator] = {}  # by sender
        self._own: DeviceStream | None = None
        self._failed: set[tuple[str, int]] = set()  # lanes
        self._over = False
        self._lock = threading.RLock()  # held while a transfer is put in its lane, so that both ends use the same order

    def stop(self) -> list[Communicator]:
        """Start no more transfers; returns the communicators that the caller must end."""
        with self._lock:
            self._over = True
            return [*self._out.values(), *self._in.values()]

    # -- sending ------------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """A base number to send to the receivers: the offer to rank r has this number plus r."""
        return next(self._numbers)

    def offer(
        self, peer: int, number: int, segments: Sequence[Tensor], ready: Event, flight: StreamPosition, done: Done
    ) -> None:
        """Keep ``segments`` (bytes on the device) for ``peer`` under ``number`` until it accepts or refuses them.

        Args:
            ready: event after which the segments may be read; the caller owns it and keeps it until ``done``.
        """
        with self._lock:
            self._offers[number] = _SendOffer(peer, segments, ready, flight, done)
        if peer != self._rank:
            op = RecvParcel("clear to send", peer, _TAG, MessageSpace.INTERNAL)
            self._side.submit(Call(op, (), (), None, place=self._heard), _nothing)

    def _heard(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        """Queue an answer for processing. An allocator: called in the order of sending, unlike the ends of calls."""
        self._put(("verdicts", source), partial(self._judge, source, head))
        return ()

    def _judge(self, peer: int, head: bytes) -> None:
        try:
            number, accepted = _VERDICT.unpack_from(head)
            with self._lock:
                if self._offers[number].peer != peer:
                    raise KeyError(number)
                offer = self._offers.pop(number)
        except (struct.error, KeyError) as exc:
            raise BackendError(f"rank {peer} sent a wrong answer to an offer: {exc!r}") from exc
        if not accepted:
            offer.flight.pass_()
            offer.done(None)
            return
        with self._lock:
            lane = self._out.get(peer)
            if lane is None:
                lane = self._out[peer] = self._connect(("to", peer), 0, head[_VERDICT.size :])
        calls = [NcclCall("send", segment, None, segment.numel(), _BYTE, 1) for segment in offer.segments]
        self._put(("to", peer), partial(self._issue, lane, calls, [offer.ready], offer.flight, offer.done, ()))

    # -- receiving ----------------------------------------------------------------------------------------------------

    def refuse(self, giver: int, number: int) -> None:
        """Refuse an offer: its payload is not moved."""
        if giver == self._rank:
            with self._lock:
                offer = self._offers.pop(number)
            offer.flight.pass_()
            offer.done(None)
        else:
            self._answer(giver, _VERDICT.pack(number, False))

    def accept(
        self,
        giver: int,
        number: int,
        landings: Sequence[RecvBuffer],
        ready: Sequence[Event],
        flight: StreamPosition,
        done: Done,
    ) -> None:
        """Accept an offer: segment i is received into ``landings[i]``.

        Args:
            ready: events after which that memory may be written; the caller owns them and keeps them until ``done``.
        """
        copies = [copy for landing in landings for copy in landing.copies]
        if giver == self._rank:
            self._from_self(number, landings, ready, flight, done, copies)
            return
        with self._lock:
            unique_id = b""
            lane = self._in.get(giver)
            if lane is None:
                unique_id = self._nccl.unique_id()
                lane = self._in[giver] = self._connect(("from", giver), 1, unique_id)
            calls = [NcclCall("recv", None, to.memory, to.memory.numel(), _BYTE, 0) for to in landings]
            job = partial(self._issue, lane, calls, ready, flight, done, copies)
            self._put(("from", giver), job)
            self._answer(giver, _VERDICT.pack(number, True) + unique_id)

    def _answer(self, giver: int, head: bytes) -> None:
        op = SendParcel("clear to send", giver, _TAG, MessageSpace.INTERNAL)
        self._side.submit(Call(op, (), (), None, parcels=(Parcel(head, ()),)), _nothing)

    def _from_self(
        self,
        number: int,
        landings: Sequence[RecvBuffer],
        ready: Sequence[Event],
        flight: StreamPosition,
        done: Done,
        copies: Sequence[Callable[[], object]],
    ) -> None:
        with self._lock:
            offer = self._offers.pop(number)
            if self._own is None:
                self._own = self._new_stream()
            stream = self._own
            for event in (offer.ready, *ready):
                stream.wait(event)
            for landing, segment in zip(landings, offer.segments, strict=True):
                stream.run(partial(arithmetic.write, landing.memory, segment))

        def both(error: BrokenError | None) -> None:
            offer.flight.pass_()
            offer.done(error)
            done(error)

        offer.flight.issue(stream.record())
        self._finish(stream, flight, both, copies, landings)

    # -- lanes --------------------------------------------------------------------------------------------------------

    def _connect(self, lane: tuple[str, int], rank: int, unique_id: bytes) -> Communicator:
        """A new communicator, which the first job of its lane connects. With the lock held."""
        if self._over:
            raise BackendError("the comm has ended")
        communicator = Communicator(self._nccl, self._device, self._new_stream())
        self._put(lane, partial(communicator.open, 2, rank, unique_id, self._config))
        return communicator

    def _put(self, lane: tuple[str, int], job: Callable[[], None]) -> None:
        """Run ``job`` in the order of its lane. An exception breaks the comm, not the thread, and stops the lane."""
        self._lanes.put(lane, partial(self._guarded, lane, job))

    def _guarded(self, lane: tuple[str, int], job: Callable[[], None]) -> None:
        if lane in self._failed:
            return
        try:
            job()
        except Exception as exc:
            self._failed.add(lane)
            if isinstance(exc, BrokenError):
                self._on_error(exc)
                return
            error = BackendError(f"nccl could not move a payload: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            self._on_error(error)

    def _issue(
        self,
        lane: Communicator,
        calls: Sequence[NcclCall],
        ready: Sequence[Event],
        flight: StreamPosition,
        done: Done,
        copies: Sequence[Callable[[], object]],
    ) -> None:
        """Issue one half of a transfer, on a lane's thread, which may wait for the other end."""
        for event in ready:
            lane.stream.wait(event)
        lane.issue(calls, known=lane.knows(calls))
        self._finish(lane.stream, flight, done, copies, calls)

    def _finish(
        self,
        stream: DeviceStream,
        flight: StreamPosition,
        done: Done,
        copies: Sequence[Callable[[], object]],
        memory: Sequence[object],
    ) -> None:
        for copy in copies:
            stream.run(copy)
        event = stream.record()
        kept = [memory, copies]  # torch reuses this memory as soon as the host drops the last reference

        def passed(error: BrokenError | None) -> None:
            kept.clear()
            flight.pass_()
            done(error)

        flight.issue(event)
        self._poller.watch(stream.handle, event, passed)


def _nothing(error: AsyncCommError | None) -> None:
    """Ignore the end of a call: the side channel itself reports errors that break the comm."""
