"""Inputs and outputs of one operation that share memory: the copies that keep the result right.

The meaning of an operation does not depend on where its tensors lie: the operation reads all inputs as they are when it
takes effect, and writes its outputs as if one after the other, so that of two overlapping outputs the later one stays.
A backend that moves data piece by piece can promise this only for tensors that share no memory. Each backend therefore
calls this module when it starts an operation:

- An input that overlaps an output is copied first, unless the input lies *in place*: exactly where the operation puts
  this rank's own share, which a step reads before it writes.
- A tensor that some input could not be a view of is copied to the memory of that input (``Submission.copies``).
- Outputs that overlap each other are received in separate memory and copied to their places at the end, in order. A
  list of tensors counts as if its tensors were gathered one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.regions import Region, RegionSet, disjoint, overlap, region, regions
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Gather,
    Op,
    Parcel,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)

T = TypeVar("T")
Tensors = tuple[Tensor, ...]
Kinds = frozenset[type[Op]]


class Hazards(NamedTuple):
    """The preparations that an operation needs before it may run piece by piece."""

    copied: frozenset[int] = frozenset()  #: indices of the inputs to be copied first
    staged: bool = False  #: whether the outputs must be received in separate memory


class Buffers(NamedTuple):
    """Tensors that a backend may read and write in any order, except for inputs that lie in place."""

    inputs: Tensors
    outputs: Tensors
    lands: Sequence[Callable[[], object]] = ()  #: copy the outputs back; called last, in order


NONE: Final = Hazards()


def accesses(submission: Submission) -> tuple[list[Region], list[Region]]:
    """The memory that an operation only reads, and the memory that it writes, without payloads still to come."""
    inputs, outputs = submission.inputs, submission.outputs
    reads = [] if inputs is outputs else regions(inputs)
    reads += regions([tensor for _, tensor in submission.copies])
    for parcel in submission.parcels:
        reads += regions(parcel.tensors)
    return reads, regions(outputs)


def separated(submission: Submission, rank: int, out_of_place: Kinds = frozenset()) -> Buffers:
    """The tensors of ``submission`` on ``rank``, copied or staged where necessary. Called when the operation starts.

    Args:
        out_of_place: operations that the transport cannot run in place.
    """
    load(submission)
    inputs, outputs = submission.inputs, submission.outputs
    copied, staged = find(submission.op, inputs, outputs, rank, out_of_place)
    if staged:
        places, lands = _staged(outputs)
        return Buffers(inputs, places, in_order(submission.op, len(inputs), lands))
    if copied:
        inputs = tuple([tensor.clone() if i in copied else tensor for i, tensor in enumerate(inputs)])
    return Buffers(inputs, outputs)


def load(submission: Submission) -> None:
    """Make the submission's ``copies``. Called when the operation takes effect, before its inputs or parcels are read.

    A second call does nothing.
    """
    for fill, tensor in submission.copies:
        fill(tensor)
    submission.copies = ()  # only now: until the copies are made, the source tensors count as read


def apart(
    parcels: Sequence[Parcel], outputs: Tensors
) -> tuple[tuple[Parcel, ...], Tensors, Sequence[Callable[[], object]]]:
    """Parcels and outputs that may be read and filled in any order, and functions that copy the outputs back."""
    writes = regions(outputs)
    written = RegionSet()
    written.add(writes)
    kept = [
        parcel._replace(tensors=tuple([t.clone() if written.overlaps(regions([t])) else t for t in parcel.tensors]))
        for parcel in parcels
    ]
    if len(outputs) > 1 and not disjoint((), writes) and _overlapping(writes):
        return (tuple(kept), *_staged(outputs))
    return tuple(kept), outputs, ()


def _staged(outputs: Tensors) -> tuple[Tensors, Sequence[Callable[[], object]]]:
    """Separate memory for ``outputs``, and the functions that copy it to their places, in order."""
    with torch.inference_mode(False):  # any thread may write it
        places = tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in outputs])
    return places, [partial(arithmetic.write, *pair) for pair in zip(outputs, places, strict=True)]


def in_order(op: Op, count: int, lands: Sequence[T]) -> list[T]:
    """``lands``, one for each output of ``op`` with ``count`` inputs, in the order in which the outputs are written.

    Several tensors are gathered as if one after the other.
    """
    if isinstance(op, AllGather) and count > 1:
        return [land for i in range(count) for land in lands[i::count]]
    return list(lands)


def find(op: Op, inputs: Tensors, outputs: Tensors, rank: int, out_of_place: Kinds = frozenset()) -> Hazards:
    """The hazards of running ``op`` on ``rank`` piece by piece with these tensors."""
    if not outputs or (len(outputs) == 1 and (inputs is outputs or not inputs)):
        return NONE
    if len(outputs) == 1 and len(inputs) == 1:  # the usual case, inlined
        one, other = inputs[0], outputs[0]
        if not one.numel() or not other.numel() or not overlap(region(one), region(other)):
            return NONE
    writes = regions(outputs)
    if inputs is outputs:
        return NONE if disjoint((), writes) else Hazards(staged=_overlapping(writes))
    if disjoint(regions(inputs), writes):
        return NONE
    if len(outputs) > 1 and _overlapping(writes):
        return Hazards(staged=True)
    written = RegionSet()
    written.add(writes)
    in_place = _nowhere if type(op) in out_of_place else _IN_PLACE.get(type(op), _nowhere)
    return Hazards(
        frozenset(
            i
            for i, tensor in enumerate(inputs)
            if tensor.numel() and written.overlaps([region(tensor)]) and not in_place(i, inputs, outputs, rank)
        )
    )


def _overlapping(writes: Sequence[tuple[int, int, Any]]) -> bool:
    seen = RegionSet()
    for write in writes:
        if seen.overlaps([write]):
            return True
        seen.add([write])
    return False


# -- in place: input i lies where the operation puts this rank's own share of it --------------------------------------


def _nowhere(i: int, inputs: Tensors, outputs: Tensors, rank: int) -> bool:
    return False


def _as_numbered(i: int, inputs: Tensors, outputs: Tensors, rank: int) -> bool:
    return _identical(inputs[i], outputs[i])


def _gathered(i: int, inputs: Tensors, outputs: Tensors, rank: int) -> bool:
    return _identical(inputs[i], outputs[rank * len(inputs) + i])


def _divided(i: int, inputs: Tensors, outputs: Tensors, rank: int) -> bool:
    number = i - rank * len(outputs)
    return 0 <= number < len(outputs) and _identical(inputs[i], outputs[number])


def _chunk_of_output(i: int, inputs: Tensors, outputs: Tensors, rank: int) -> bool:
    return _is_chunk(inputs[0], outputs[0], rank)


def _chunk_of_input(i: int, inputs: Tensors, outputs: Tensors, rank: int) -> bool:
    return _is_chunk(outputs[0], inputs[0], rank)


def _identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    if one.data_ptr() != other.data_ptr() or one.nbytes != other.nbytes:
        return False
    return (arithmetic.is_plain(one) and arithmetic.is_plain(other)) or _form(one) == _form(other)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _is_chunk(part: Tensor, whole: Tensor, rank: int) -> bool:
    plain = arithmetic.is_plain(part) and arithmetic.is_plain(whole)
    return plain and part.data_ptr() == whole.data_ptr() + rank * part.nbytes


_IN_PLACE: Final[dict[type[Op], Callable[[int, Tensors, Tensors, int], bool]]] = {
    AllReduce: _as_numbered,
    Reduce: _as_numbered,
    AllGather: _gathered,
    Gather: _gathered,
    AllGatherSingle: _chunk_of_output,
    Scatter: _divided,
    ReduceScatter: _divided,
    ReduceScatterSingle: _chunk_of_input,
    AllToAll: _as_numbered,
    AllToAllSingle: _as_numbered,
}
