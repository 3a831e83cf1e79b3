"""From operations to algorithms: which form, on which vectors, in how many steps.

What is only moved travels as bytes. Output that is not plain memory (strides, lazy conjugation) is received beside it
and copied there at the end. Inputs that overlap outputs in a way that the steps would clobber are cloned first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import memmove
from typing import Any, Final

from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.shm.algorithms import (
    Progress,
    exchange,
    meet,
    part_bytes,
    publish,
    reduce_parts,
    reduce_whole,
    steps_for,
)
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.reduction import reduction_for
from asynccomm.backends.shm.signature import signature
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)

__all__ = ["start"]


def start(board: Board, submission: Submission, whole: int) -> Progress:
    """Begin a collective.

    Args:
        whole: bytes up to which a reduction is done by everybody at once.
    """
    return _FORMS[type(submission.op)](board, submission, whole)


def _barrier(board: Board, submission: Submission, whole: int) -> Progress:
    return meet(board, _begin(board, submission, 1))


def _reduce(board: Board, submission: Submission, whole: int) -> Progress:
    """all_reduce and reduce."""
    op: Any = submission.op
    reduction = reduction_for(op.dtype, op.reduction, board.size)
    tensor = submission.inputs[0]
    source = reduction.contribution(tensor)
    target = land = None
    if submission.outputs:
        in_place = submission.outputs is submission.inputs and source.data_ptr() == tensor.data_ptr()
        if in_place and not tensor.is_inference():
            target = source
        else:
            target, land = reduction.target(submission.outputs[0])
    nbytes = source.nbytes
    if nbytes <= whole:
        yield from reduce_whole(board, _begin(board, submission, 1), source, target, reduction)
    else:
        steps = steps_for(nbytes, board.chunk)
        yield from reduce_parts(board, _begin(board, submission, steps), steps, source, target, reduction)
    if land is not None:
        land()


def _reduce_scatter(board: Board, submission: Submission, whole: int) -> Progress:
    op: Any = submission.op
    size, me = board.size, board.rank
    reduction = reduction_for(op.dtype, op.reduction, size)
    dtype = reduction.dtype
    output = submission.outputs[0]
    inputs = _apart(submission.inputs, [output], harmless=())
    if len(inputs) == 1:
        sources = _split(reduction.contribution(inputs[0]), size)
    else:
        sources = [reduction.contribution(tensor) for tensor in inputs]
    target, land = reduction.target(output)
    room = part_bytes(board) // dtype.itemsize
    mine = me * room

    def take(step: int, byte: int) -> None:
        start = byte // dtype.itemsize
        out = target[start : start + room]
        n = out.numel()
        rows = list(board.parts(dtype, step, mine, n))
        rows[me] = sources[me][start : start + n]
        reduction.combine(rows, out)

    steps = steps_for(target.nbytes, part_bytes(board))
    first = _begin(board, submission, steps)
    yield from exchange(board, first, steps, target.nbytes, _addresses(sources), board.others, take)
    if land is not None:
        land()


def _publish(board: Board, submission: Submission, whole: int) -> Progress:
    """broadcast, all_gather, all_gather_single, gather."""
    op: Any = submission.op
    size, me = board.size, board.rank
    nbytes = op.nbytes
    copies: list[Callable[[], object]] = []
    outputs = [_landing(output, copies) for output in submission.outputs]
    targets: dict[int, int]
    if isinstance(op, AllGatherSingle):
        start = outputs[0].data_ptr()
        targets = {rank: start + rank * nbytes for rank in range(size)}
    elif isinstance(op, Broadcast):
        targets = {op.root: outputs[0].data_ptr()} if outputs else {}
    else:
        targets = dict(enumerate(_addresses(outputs)))
    source = None
    if submission.inputs:
        source = submission.inputs[0]
        in_place = isinstance(op, AllGatherSingle) and source.data_ptr() == targets[me]  # its chunk of the output
        if not in_place:
            harmless = ((source, submission.outputs[me]),) if len(submission.outputs) > 1 else ()
            source = _apart(submission.inputs, submission.outputs, harmless)[0]
        source = arithmetic.resolved(source)
    steps = steps_for(nbytes, board.chunk)
    address = None if source is None else source.data_ptr()
    yield from publish(board, _begin(board, submission, steps), steps, nbytes, address, targets)
    for copy in copies:
        copy()


def _distribute(board: Board, submission: Submission, whole: int) -> Progress:
    """scatter and all_to_all_single."""
    op: Any = submission.op
    size, me = board.size, board.rank
    copies: list[Callable[[], object]] = []
    output = _landing(submission.outputs[0], copies)
    inputs: Sequence[Tensor] = ()  # what the addresses belong to
    sources: Sequence[int] | None = None
    if isinstance(op, AllToAllSingle):
        nbytes = op.nbytes // size
        same = submission.inputs[0].data_ptr() == submission.outputs[0].data_ptr()
        harmless = ((submission.inputs[0], submission.outputs[0]),) if same else ()
        inputs = [arithmetic.resolved(_apart(submission.inputs, submission.outputs, harmless)[0])]
        sources = [inputs[0].data_ptr() + rank * nbytes for rank in range(size)]
        targets = [output.data_ptr() + rank * nbytes for rank in range(size)]
        givers = board.others
    else:
        nbytes = op.nbytes
        targets = [output.data_ptr()] * size
        givers = [] if me == op.root else [op.root]
        if me == op.root:
            harmless = ((submission.inputs[me], submission.outputs[0]),)
            inputs = [arithmetic.resolved(t) for t in _apart(submission.inputs, submission.outputs, harmless)]
            sources = _addresses(inputs)
    if sources is not None and sources[me] != targets[me]:
        memmove(targets[me], sources[me], nbytes)
    room = part_bytes(board)

    def take(step: int, start: int) -> None:
        n = min(room, nbytes - start)
        for rank in givers:
            memmove(targets[rank] + start, board.slot_address(step, rank) + me * room, n)

    steps = steps_for(nbytes, room)
    yield from exchange(board, _begin(board, submission, steps), steps, nbytes, sources, givers, take)
    for copy in copies:
        copy()


_FORMS: Final[Mapping[type[Op], Callable[[Board, Submission, int], Progress]]] = {
    AllReduce: _reduce,
    Reduce: _reduce,
    ReduceScatter: _reduce_scatter,
    ReduceScatterSingle: _reduce_scatter,
    Broadcast: _publish,
    AllGather: _publish,
    AllGatherSingle: _publish,
    Gather: _publish,
    Scatter: _distribute,
    AllToAllSingle: _distribute,
    Barrier: _barrier,
}


def _begin(board: Board, submission: Submission, steps: int) -> int:
    return board.begin(submission.work.seq, signature(submission.op), steps)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _split(vector: Tensor, size: int) -> Sequence[Tensor]:
    return vector.view(size, -1).unbind() if vector.numel() else [vector] * size


def _landing(output: Tensor, copies: list[Callable[[], object]]) -> Tensor:
    """Plain memory to be filled for ``output``; what brings it there, if it is not its own, goes to ``copies``."""
    place, copy = arithmetic.landing(output)
    if copy is not None:
        copies.append(copy)
    return place


def _apart(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], harmless: Sequence[tuple[Tensor, Tensor]]
) -> Sequence[Tensor]:
    """``inputs``, cloned if they share memory with an output in other ways than the pairs that are ``harmless``.

    A pair is harmless only if it begins at the same place.
    """
    spans = [_span(output) for output in outputs]
    for tensor in inputs:
        start, end = _span(tensor)
        for i, (out_start, out_end) in enumerate(spans):
            if start < out_end and out_start < end:
                same = start == out_start and any(a is tensor and b is outputs[i] for a, b in harmless)
                if not same:
                    return [t.clone() for t in inputs]
    return inputs


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first element and behind the last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = (
        sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    )
    return start, start + (last + 1) * tensor.itemsize
