"""Collectives of parcels on a board: sends them as streams, and delivers the streams of other ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import final

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.delivery import Delivery
from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.programs import room_per_reader
from asynccomm.backends.shm.reference import Progress
from asynccomm.backends.shm.variable_length import PayloadSource, stream
from asynccomm.backends.shm.vectors import Scattered, address_of, scattered
from asynccomm.errors import BackendError, BrokenError
from asynccomm.ops import Parcel, Parcels
from asynccomm.ops.parcels import MAX_HEAD


def parcels(executor: Executor, submission: Submission) -> Progress:
    """Run the collective of a submission of ``ops.Parcels``."""
    board, op = executor.board, submission.op
    assert isinstance(op, Parcels)
    size, me = board.size, board.rank
    first = board.begin(submission.work.seq, op, 1)
    delivery = Delivery(submission)
    gives = _streams(op, submission.parcels, size, me)
    givers = [rank for rank in board.others if op.gives(rank) and op.taker != rank]
    room, part = (board.chunk, 0) if op.shared else (room_per_reader(board.chunk, size), me)
    if op.takes(me):
        yield from stream(executor, first, room, part, gives, givers, Deliveries(delivery))
        delivery.finish()
        submission.error = delivery.error
    else:
        yield from stream(executor, first, room, part, gives, givers, None)
        delivery.finish()


def _streams(op: Parcels, given: Sequence[Parcel], size: int, me: int) -> dict[int, PayloadSource]:
    """This rank's streams, by the part of its slots.

    There are no streams if no other rank takes them. With a stream per rank, ranks that take none get empty streams.
    """
    if not op.gives(me) or op.taker == me or size == 1:
        return {}
    if op.shared:
        return {0: _stream(given[0])}
    nothing = PayloadSource(0, 0, 0)
    return {rank: _stream(given[rank]) if rank != me and op.takes(rank) else nothing for rank in range(size)}


def _stream(parcel: Parcel) -> PayloadSource:
    tensors = [arithmetic.plain(tensor) for tensor in parcel.tensors]
    pieces = [(address_of(parcel.head), len(parcel.head)), *[(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]]
    data = Scattered(pieces, (parcel.head, tensors))
    return PayloadSource(len(parcel.head), data.nbytes - len(parcel.head), data)


@final
class Deliveries:
    """The parcels that one submission receives: a ``PayloadSink``."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._lengths: Mapping[int, tuple[int, int]] = {}
        self._payloads: dict[int, int] = {}
        self._heads: dict[int, list[bytes]] = {}  # chunks of incomplete heads
        self._targets: dict[int, Scattered | None] = {}  # of payloads, once the head is complete; None: discard

    def begin(self, lengths: Mapping[int, tuple[int, int]]) -> None:
        """See ``PayloadSink.begin``. Raises: BackendError if a head is too long."""
        for rank, (head, _) in lengths.items():
            if head > MAX_HEAD:
                raise BackendError(f"rank {rank} announces {head} bytes of a parcel's head; more than {MAX_HEAD}")
        self._lengths = lengths
        self._payloads = {rank: body for rank, (_, body) in lengths.items()}
        self._heads = {rank: [] for rank in lengths}

    def take(self, source: int, start: int, n: int, address: int) -> None:
        """See ``PayloadSink.take``."""
        head = self._lengths[source][0]
        end = start + n
        if start < head:
            self._heads[source].append(ctypes.string_at(address, min(end, head) - start))
        if end >= head and source not in self._targets:
            self._targets[source] = self._accept(source, b"".join(self._heads.pop(source)))
        if end > head:
            target = self._targets[source]
            skip = max(0, head - start)
            if target is not None:
                target.write(start + skip - head, n - skip, address + skip)

    def target(self, source: int) -> Scattered | None:
        """See ``PayloadSink.target``."""
        return self._targets[source]

    def _accept(self, source: int, head: bytes) -> Scattered | None:
        tensors = self._delivery.accept(source, head, self._payloads)
        if isinstance(self._delivery.error, BrokenError):
            raise self._delivery.error
        return None if tensors is None else scattered(tensors)
