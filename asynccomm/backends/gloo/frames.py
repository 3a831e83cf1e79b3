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

import ctypes
import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

from asynccomm.backends import computing
from asynccomm.backends.arithmetic import accumulate, is_plain
from asynccomm.backends.base import Submission
from asynccomm.backends.computing import contributed_bytes, contribution, perform
from asynccomm.backends.gloo.links import Buffer, copied, fill
from asynccomm.backends.hazards import load
from asynccomm.backends.regions import bytes_of
from asynccomm.errors import BackendError
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Broadcast,
    Gather,
    Op,
    Parcels,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)
from asynccomm.ops.reduce_op import RedOpType
from asynccomm.ops.signature import signature

ROOM: Final = 1024  # bytes of a contribution: up to this size, sending it costs no more than omitting it
LONG: Final = 64 << 10  # bytes that a rank gives to the others or gets: up to this size, another thread takes longer
PAIR: Final = 512 << 10  # the same between two ranks, where no algorithm sends fewer bytes

_NUMBERS: Final = struct.Struct("<qq")
_HEADING: Final = struct.Struct("<QQQII")
_EQUAL: Final = _NUMBERS.size + _HEADING.size  # bytes that are equal on all ranks
_OWN: Final = struct.Struct("<QII")
_HEADER: Final = 64  # offset of the contribution: aligned for every dtype
LONGEST: Final = _HEADER + PAIR  # bytes of a frame
_HEAD: Final = struct.Struct("<I")  # length of a parcel's head
_MASK: Final = (1 << 64) - 1

#: dtypes that are combined as they are stored
_IN_OWN_DTYPE: Final = frozenset({torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})

assert _EQUAL + _OWN.size <= _HEADER


@final
class Frame:
    """A frame of this rank and the frames of all ranks at its place."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._received: list[bytearray] = [bytearray()] * size
        self._equal = b""
        self._mine = 0
        self._root: int | None = None  # the only rank that needs the contribution; None: all ranks do
        self._part = 0  # bytes of the contribution for each rank, if each gets a part of it

    def fill(self, submission: Submission, place: int, heading: bytes, *, contribute: bool = True) -> None:
        """Enter this rank's description of ``submission``, and its inputs if they are short.

        Args:
            contribute: False: the frame only describes the call.
        """
        op = submission.op
        self._equal = equal_part(place, submission.work.seq, heading)
        self._mine = balance(op, self._rank) if isinstance(op, AllToAll) else 0
        given: bytes | None = None
        if contribute:
            given = self._parcel(op, submission) if isinstance(op, Parcels) else self._contribution(op, submission)
        self._root = op.root if isinstance(op, (Gather, Reduce)) and given is not None else None
        gives_parts = has_parts(op) and (op.root is None or op.root == self._rank)
        self._part = len(given) // self._size if gives_parts and given else 0
        self._received[self._rank] = self._packed(given)

    def _packed(self, given: bytes | bytearray | None) -> bytearray:
        own = _OWN.pack(self._mine, len(given or b""), given is not None)
        return bytearray().join([(self._equal + own).ljust(_HEADER, b"\0"), given or b""])

    def packed(self, peer: int) -> bytearray:
        """This rank's frame for ``peer``, with the part of the contribution that the rank needs."""
        whole = self._received[self._rank]
        if self._part:
            start = _HEADER + peer * self._part
            return self._packed(whole[start : start + self._part])
        return whole if self._root is None or peer == self._root else self._packed(b"")

    def put(self, rank: int, data: bytes | bytearray) -> None:
        """Enter the frame of another rank. Raises: BackendError for a length that no rank sends."""
        if not _HEADER <= len(data) <= LONGEST or _HEADER + _OWN.unpack_from(data, _EQUAL)[1] != len(data):
            raise BackendError(f"rank {rank} sent a frame that cannot be: {len(data)} bytes")
        self._received[rank] = data if isinstance(data, bytearray) else bytearray(data)

    def fill_with(self, tensor: Tensor, place: int, number: int, heading: bytes) -> None:
        """Enter this rank's description of a call that contributes the memory of ``tensor``."""
        self._equal = equal_part(place, number, heading)
        self._received[self._rank] = self._packed(copied(tensor, tensor.nbytes))

    def rows(self, dtype: torch.dtype) -> list[Tensor] | None:
        """The contributions of all ranks, in the frames' memory; None if their descriptions or lengths differ."""
        head = self._received[self._rank][:_HEADER]
        if not all(data.startswith(head) for data in self._received):
            return None
        return [torch.frombuffer(data, dtype=dtype, offset=_HEADER) for data in self._received]

    def _contribution(self, op: Op, submission: Submission) -> bytes | None:
        """The data of this rank; None if there is too much."""
        inputs = submission.inputs
        table = struct.pack(f"<{self._size}q", *op.sends) if isinstance(op, AllToAll) else b""
        nbytes = contributed_bytes(op, inputs)
        if len(table) + nbytes > room_of(op, self._size):
            return None
        if not nbytes:
            return table
        load(submission)
        data = inputs[0] if len(inputs) == 1 and _is_given(op, inputs[0]) else contribution(op, inputs)
        return table + copied(data, nbytes)

    def _parcel(self, op: Parcels, submission: Submission) -> bytes | None:
        if not op.gives(self._rank) or not submission.parcels:  # no other rank receives a parcel from this rank
            return b""
        parcel = submission.parcels[0]
        head, tensors = parcel
        if not op.shared or _HEAD.size + len(head) + parcel.nbytes > ROOM:
            return None
        payload = [copied(data, data.nbytes) for data in map(bytes_of, tensors) if data.nbytes]
        return b"".join([_HEAD.pack(len(head)), head, *payload])

    def differing(self) -> tuple[int, tuple[int, int]] | None:
        """The first place where ranks differ, and two ranks that differ; the same on all ranks. None: no difference.

        A rank that sent the frame of a later place called the predicted collective at this place; the ranks that did
        not are among the senders of this place's frame.
        """
        heads = [data[:_EQUAL] for data in self._received]
        if heads.count(heads[0]) == self._size:
            return None
        places = [_NUMBERS.unpack_from(head)[0] for head in heads]
        first = min(places)
        here = [rank for rank, place in enumerate(places) if place == first]
        other = next((rank for rank in here if heads[rank] != heads[here[0]]), None)
        if other is None:
            other = next(rank for rank, place in enumerate(places) if place != first)
        return first, (min(here[0], other), max(here[0], other))

    def given(self) -> tuple[Sequence[Buffer] | None, bool]:
        """The contributions of all ranks, if all are whole; and whether the sizes of an uneven all_to_all fit.

        The contributions lie in the frames' memory.

        Raises: BackendError for fields that no rank writes.
        """
        total, complete = 0, True
        for rank, data in enumerate(self._received):
            mine, nbytes, whole = _OWN.unpack_from(data, _EQUAL)
            if whole > 1:
                raise BackendError(f"rank {rank} sent a frame that cannot be: {nbytes} bytes, flag {whole}")
            total += mine
            complete = complete and whole == 1
        return [memoryview(data)[_HEADER:] for data in self._received] if complete else None, total & _MASK == 0


def parcel_of(rank: int, given: bytes | Buffer) -> tuple[bytes, Tensor]:
    """Head and payload of the parcel of ``rank``. Raises: BackendError for an invalid contribution."""
    length = _HEAD.unpack_from(given)[0] if len(given) >= _HEAD.size else 0
    start = _HEAD.size + length
    if start > len(given):
        raise BackendError(f"rank {rank} sent a parcel of {len(given)} bytes with a head of {length} bytes")
    return bytes(given[_HEAD.size : start]), _tensor(given[start:])


def room_of(op: Op, size: int) -> int:
    """Bytes of a contribution up to which frames of ``size`` ranks carry it.

    Where another rank needs all of it, the ranks that wait for it get it at once, without another thread.
    """
    to_all = PAIR if size == 2 else max(ROOM, LONG // max(size - 1, 1))
    match op:
        case Gather():
            return max(LONG, to_all)
        case Scatter():
            return max(LONG, to_all) * size
        case AllReduce() | Reduce() | Broadcast() | AllGather() | AllGatherSingle():
            return to_all
    return to_all * size if has_parts(op) else ROOM


def has_parts(op: Op) -> bool:
    """Whether a rank gives a part of its contribution to each rank, all of one length."""
    return op.split and op.sizes_known and not op.counts


def extent(submission: Submission) -> tuple[int, int]:
    """The number of operations in the batch, as they were called, and the number of them before this submission."""
    if submission.batch is None:
        return len(submission.members) or 1, 0
    batch, at = submission.batch
    counts = [len(each.members) or 1 for each in batch]
    return sum(counts), sum(counts[:at])


def is_carried(submission: Submission, size: int) -> bool:
    """Whether frames carry the whole data of a call, if equal headings suffice to know it."""
    op = submission.op
    return op.sizes_known and not op.counts and contributed_bytes(op, submission.inputs) <= room_of(op, size)


def complete(submission: Submission, rank: int, given: Sequence[Buffer]) -> None:
    """Compute the outputs of a collective of tensors from the contributions. Their memory may be clobbered."""
    op, outputs = submission.op, submission.outputs
    if has_parts(op):  # each rank has got its part alone, but for the own contribution
        given = _parts(op, rank, given)
        if not isinstance(op, (ReduceScatter, ReduceScatterSingle)):
            if not _completed(op, outputs, given):
                computing.fill(outputs, _tensor(b"".join(given)))
            return
        op = Reduce(op.dtype, op.numel, rank, op.reduction)
    if not outputs or _completed(op, outputs, given):
        return
    ops = [op] * len(given)
    if isinstance(op, AllToAll):
        n = 8 * len(given)
        tables = [struct.unpack(f"<{len(given)}q", each[:n]) for each in given]
        ops = [AllToAll(op.dtype, sends, ()) for sends in tables]
        given = [each[n:] for each in given]
    perform(ops, [_tensor(each) for each in given], {rank: outputs})


def _parts(op: Op, rank: int, given: Sequence[Buffer]) -> Sequence[Buffer]:
    """The parts for this rank of the contributions. Raises: BackendError if a part has another length."""
    if op.root is not None and op.root != rank:
        return [given[op.root]]
    own = given[rank]
    n = len(own) // len(given)
    mine = own[rank * n : (rank + 1) * n]
    if op.root is not None:
        return [mine]
    parts = [mine if giver == rank else part for giver, part in enumerate(given)]
    for giver, part in enumerate(parts):
        if len(part) != n:
            raise BackendError(f"rank {giver} sent a frame that cannot be: {len(part)} bytes for a part of {n}")
    return parts


def _completed(op: Op, outputs: Sequence[Tensor], given: Sequence[Buffer]) -> bool:
    """Complete a usual call: one plain tensor for each part that comes, in its own dtype; False: it is not usual."""
    output = outputs[0]
    if not is_plain(output):
        return False
    match op:
        case Broadcast(root=root) if len(outputs) == 1:
            _fill(output, given[root])
        case Scatter() if len(outputs) == 1:
            _fill(output, given[0])
        case AllGatherSingle() | AllToAllSingle():
            _fill(output, b"".join(given))
        case AllGather() | Gather() if len(outputs) == len(given) and all(map(is_plain, outputs)):
            for each, data in zip(outputs, given, strict=True):
                _fill(each, data)
        case AllReduce() | Reduce() if len(outputs) == 1 and combined_as_stored(op):
            _check(output, given[0])
            if output.nbytes:
                total = accumulate([torch.frombuffer(each, dtype=op.dtype) for each in given], op.reduction)
                ctypes.memmove(output.data_ptr(), total.data_ptr(), output.nbytes)
        case _:
            return False
    return True


def _check(output: Tensor, data: bytes | Buffer) -> None:
    if len(data) != output.nbytes:
        raise BackendError(f"a collective has brought {len(data)} bytes where {output.nbytes} fit")


def _fill(output: Tensor, data: bytes | Buffer) -> None:
    _check(output, data)
    fill(output, data)


def _tensor(data: bytes | Buffer) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(data)
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _is_given(op: Op, tensor: Tensor) -> bool:
    """Whether the memory of the only input is the contribution."""
    return (op.reduction is None or op.reduction.factor is None) and is_plain(tensor)


@final
class CarriedReduce:
    """A kind of all_reduce of one plain tensor in place that frames carry.

    Attributes:
        heading: of every call of the kind.
    """

    def __init__(self, op: AllReduce, heading: bytes) -> None:
        self.heading = heading
        self._dtype = op.dtype
        self._reduction = op.reduction

    @classmethod
    def of(cls, submission: Submission, size: int) -> CarriedReduce | None:
        """The kind of ``submission``; None if it is no such call."""
        op = submission.op
        usual = isinstance(op, AllReduce) and submission.outputs is submission.inputs and len(submission.inputs) == 1
        if not usual or not is_carried(submission, size) or not op.nbytes or not is_plain(submission.inputs[0]):
            return None
        assert isinstance(op, AllReduce)
        combined = combined_as_stored(op)
        return cls(op, heading_of(submission)) if combined else None

    def complete(self, tensor: Tensor, frame: Frame) -> bool:
        """Compute the result from the frames of all ranks; False if they differ."""
        rows = frame.rows(self._dtype)
        if rows is None:
            return False
        total = accumulate(rows, self._reduction)
        ctypes.memmove(tensor.data_ptr(), total.data_ptr(), tensor.nbytes)
        return True


def equal_part(place: int, number: int, heading: bytes) -> bytes:
    """The bytes that the frames of all ranks begin with."""
    return _NUMBERS.pack(place, number) + heading


def beginning_of(equal: bytes, nbytes: int) -> bytes:
    """The bytes of a frame ahead of a whole contribution of ``nbytes``; ``equal`` is of ``equal_part``."""
    return (equal + _OWN.pack(0, nbytes, 1)).ljust(_HEADER, b"\0")


def combined_as_stored(op: AllReduce | Reduce | ReduceScatter | ReduceScatterSingle) -> bool:
    """Whether contributions are combined in the dtype of the op, and the sum is the result."""
    reduction = op.reduction
    return reduction.factor is None and reduction.type is not RedOpType.AVG and op.dtype in _IN_OWN_DTYPE


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
