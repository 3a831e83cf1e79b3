"""The frame that each rank sends ahead of a collective, a description of the call, and short data.

gloo assumes that all ranks call the same collective: different sizes crash the process of the rank that receives more
than it expects, any other difference produces garbage. A frame begins with a part that must be equal on all ranks, and
ends with the rank's own part::

    place, number, signature (2 words), digest, length of the batch, place in it;
    balance, bytes of the contribution, whole

The place counts the collectives of the group, the number counts those of the comm as they were called. The fields from
the signature to the semicolon are the heading, which describes the call.

The digest covers properties that the signature encodes in few bits or not at all: the sizes of the pieces that an
operation is divided into, and the numbers of the operations that were fused into one. The balances of all ranks add up
to zero if each rank of an uneven all_to_all receives exactly the elements that the others send it. A contribution that
fits follows these fields, and ``whole`` is set: if it is set on all ranks, the frames have already carried the
collective.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.computing import contributed_bytes, contribution, perform
from asynccomm.backends.hazards import load
from asynccomm.backends.regions import bytes_of
from asynccomm.errors import BackendError
from asynccomm.ops import AllGather, AllReduce, AllToAll, Broadcast, Op, Parcels, ReduceScatter
from asynccomm.ops.signature import signature

ROOM: Final = 1024  # bytes of a contribution: up to this size, sending it costs no more than omitting it

_NUMBERS: Final = struct.Struct("<qq")
_HEADING: Final = struct.Struct("<QQQII")
_EQUAL: Final = _NUMBERS.size + _HEADING.size  # bytes that are equal on all ranks
_OWN: Final = struct.Struct("<QII")
_HEADER: Final = 64  # offset of the contribution: aligned for every dtype
LONGEST: Final = _HEADER + ROOM  # bytes of a frame
_HEAD: Final = struct.Struct("<I")  # length of a parcel's head
_MASK: Final = (1 << 64) - 1

assert _EQUAL + _OWN.size <= _HEADER


@final
class Frame:
    """The memory of a frame and of the frames of all ranks, for repeated use.

    Attributes:
        mine: the frame of this rank, as a tensor.
        all: the frames of all ranks, as one tensor.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._sent = bytearray(LONGEST)
        self._received = bytearray(size * LONGEST)
        with torch.inference_mode(False):  # other threads write it
            self.mine: Tensor = torch.frombuffer(self._sent, dtype=torch.uint8)
            self.all: Tensor = torch.frombuffer(self._received, dtype=torch.uint8)

    def fill(self, submission: Submission, place: int, heading: bytes, *, contribute: bool = True) -> None:
        """Write this rank's description of ``submission``, and its inputs if they are short.

        Args:
            contribute: False: the frame only describes the call.
        """
        op = submission.op
        _NUMBERS.pack_into(self._sent, 0, place, submission.work.seq)
        self._sent[_NUMBERS.size : _EQUAL] = heading
        mine = balance(op, self._rank) if isinstance(op, AllToAll) else 0
        nbytes = -1
        if contribute:
            nbytes = self._give_parcel(op, submission) if isinstance(op, Parcels) else self._give(op, submission)
        _OWN.pack_into(self._sent, _EQUAL, mine, max(nbytes, 0), nbytes >= 0)

    def packed(self) -> bytes:
        """This rank's frame without the unused part of its room."""
        return bytes(self._sent[: _HEADER + _OWN.unpack_from(self._sent, _EQUAL)[1]])

    def put(self, rank: int, data: bytes) -> None:
        """Enter the frame of ``rank``. Raises: BackendError for a length that no rank sends."""
        if not _HEADER <= len(data) <= LONGEST or _HEADER + _OWN.unpack_from(data, _EQUAL)[1] != len(data):
            raise BackendError(f"rank {rank} sent a frame that cannot be: {len(data)} bytes")
        self._received[rank * LONGEST : rank * LONGEST + len(data)] = data

    def _give(self, op: Op, submission: Submission) -> int:
        """Returns the number of bytes contributed; -1 if there are too many."""
        inputs = submission.inputs
        start = 8 * self._size if isinstance(op, AllToAll) else 0
        nbytes = start + contributed_bytes(op, inputs)
        if nbytes > ROOM:
            return -1
        if isinstance(op, AllToAll):
            struct.pack_into(f"<{self._size}q", self._sent, _HEADER, *op.sends)
        if nbytes > start:
            load(submission)
            self.mine[_HEADER + start : _HEADER + nbytes].copy_(contribution(op, inputs))
        return nbytes

    def _give_parcel(self, op: Parcels, submission: Submission) -> int:
        if not op.gives(self._rank) or not submission.parcels:  # no other rank receives a parcel from this rank
            return 0
        parcel = submission.parcels[0]
        head, tensors = parcel
        start = _HEAD.size + len(head)
        nbytes = start + parcel.nbytes
        if not op.shared or nbytes > ROOM:
            return -1
        _HEAD.pack_into(self._sent, _HEADER, len(head))
        self._sent[_HEADER + _HEAD.size : _HEADER + start] = head
        if nbytes > start:
            self.mine[_HEADER + start : _HEADER + nbytes].copy_(torch.cat([bytes_of(tensor) for tensor in tensors]))
        return nbytes

    def differing(self) -> tuple[int, tuple[int, int]] | None:
        """The first place where ranks differ, and two ranks that differ; the same on all ranks. None: no difference.

        A rank that sent the frame of a later place called the predicted collective at this place; the ranks that did
        not are among the senders of this place's frame.
        """
        received = self._received
        heads = [bytes(received[rank * LONGEST : rank * LONGEST + _EQUAL]) for rank in range(self._size)]
        if heads.count(heads[0]) == self._size:
            return None
        places = [_NUMBERS.unpack_from(head)[0] for head in heads]
        first = min(places)
        here = [rank for rank, place in enumerate(places) if place == first]
        other = next((rank for rank in here if heads[rank] != heads[here[0]]), None)
        if other is None:
            other = next(rank for rank, place in enumerate(places) if place != first)
        return first, (min(here[0], other), max(here[0], other))

    def given(self) -> tuple[Sequence[Tensor] | None, bool]:
        """The contributions of all ranks, if all are whole; and whether the sizes of an uneven all_to_all fit.

        Raises: BackendError for fields that no rank writes.
        """
        total, complete = 0, True
        contributions = []
        for rank in range(self._size):
            at = rank * LONGEST
            mine, nbytes, whole = _OWN.unpack_from(self._received, at + _EQUAL)
            if nbytes > ROOM or whole > 1:
                raise BackendError(f"rank {rank} sent a frame that cannot be: {nbytes} bytes of {ROOM}, flag {whole}")
            total += mine
            complete = complete and whole == 1
            contributions.append(self.all[at + _HEADER : at + _HEADER + nbytes])
        return contributions if complete else None, total & _MASK == 0

    def parcel(self, rank: int, contribution: Tensor) -> tuple[bytes, Tensor]:
        """Head and payload of the parcel of ``rank``. Raises: BackendError for an invalid contribution."""
        at, nbytes = rank * LONGEST + _HEADER, len(contribution)
        length = _HEAD.unpack_from(self._received, at)[0]
        start = _HEAD.size + length
        if start > nbytes:
            raise BackendError(f"rank {rank} sent a parcel of {nbytes} bytes with a head of {length} bytes")
        return bytes(self._received[at + _HEAD.size : at + start]), contribution[start:]


def extent(submission: Submission) -> tuple[int, int]:
    """The number of operations in the batch, as they were called, and the number of them before this submission."""
    if submission.batch is None:
        return len(submission.members) or 1, 0
    batch, at = submission.batch
    counts = [len(each.members) or 1 for each in batch]
    return sum(counts), sum(counts[:at])


def is_carried(submission: Submission) -> bool:
    """Whether frames carry the whole data of a call, if equal headings suffice to know it."""
    op = submission.op
    counts = getattr(op, "counts", ())
    return op.sizes_known and not counts and contributed_bytes(op, submission.inputs) <= ROOM


def complete(submission: Submission, rank: int, given: Sequence[Tensor]) -> None:
    """Compute the outputs of a collective of tensors from the contributions."""
    op, ops = submission.op, [submission.op] * len(given)
    if isinstance(op, AllToAll):
        n = 8 * len(given)
        tables = [struct.unpack(f"<{len(given)}q", bytes(each[:n].tolist())) for each in given]
        ops = [AllToAll(op.dtype, sends, ()) for sends in tables]
        given = [each[n:] for each in given]
    perform(ops, given, {rank: submission.outputs})


def heading_of(submission: Submission) -> bytes:
    """The description of a collective call without its number: equal for equal calls."""
    return _HEADING.pack(*signature(submission.op), digest(submission), *extent(submission))


def digest(submission: Submission) -> int:
    """A hash that distinguishes operations whose signatures may be equal."""
    op = submission.op
    pieces: Sequence[Tensor] = ()
    match op:
        case AllReduce() | Broadcast() if op.layout:
            pieces = submission.inputs or submission.outputs
        case AllGather() if op.layout:
            pieces = submission.outputs
        case ReduceScatter() if op.layout:
            pieces = submission.inputs
    if not pieces and not submission.numbers:
        return 0
    first = submission.work.seq  # relative numbers, so equal calls in a loop have one digest
    numbers = array("q", [*[number - first for number in submission.numbers], *[tensor.nbytes for tensor in pieces]])
    return int.from_bytes(hashlib.blake2b(numbers.tobytes(), digest_size=8).digest())


def balance(op: AllToAll, rank: int) -> int:
    """Hashes of the sizes that ``rank`` sends, minus those that it receives; all ranks' sum is 0 modulo 2**64."""
    sent = sum([_hash(rank, peer, count) for peer, count in enumerate(op.sends)])
    received = sum([_hash(peer, rank, count) for peer, count in enumerate(op.receives)])
    return (sent - received) & _MASK


def _hash(source: int, target: int, count: int) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d %d %d" % (source, target, count), digest_size=8).digest())
