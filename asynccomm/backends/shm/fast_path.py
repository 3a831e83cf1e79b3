"""Small collectives from call to result in C (``_fast_path.c``), by recipes that are made here.

A recipe of a kind of call consists of the program, the reductions, and the tensors among the arguments that the
program's vectors lie in. Calls of equal arguments, up to the memory and the values of tensors, share a recipe.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.nn import Parameter

from asynccomm.backends.base import DirectCalls, FastCalls, HeldCall, Submission
from asynccomm.backends.shm.endpoint import largest_short
from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.lowering import has_program, is_large, lowered
from asynccomm.backends.shm.torch_functions import torch_functions
from asynccomm.backends.shm.vectors import Operand, Scattered
from asynccomm.backends.spinning import SHORT_WAIT_SECONDS
from asynccomm.core import outcome
from asynccomm.core.callsite import call_site, passed_files, user_files
from asynccomm.core.native import CoreUnavailable, load
from asynccomm.core.work import Work
from asynccomm.ops import Call, Several
from asynccomm.ops.dtypes import CODES
from asynccomm.ops.reduce_op import CONSTANTS
from asynccomm.ops.signature import Signature, signature
from asynccomm.ops.validation import CommInfo

_TORCHS: Final = (
    [getattr(torch.distributed.ReduceOp, op.type.name) for op in CONSTANTS] if torch.distributed.is_available() else []
)


@final
class Limits(NamedTuple):
    """The settings that the fast path follows."""

    inline_bytes: int  #: as of ``lowering.is_large``
    whole_bytes: int  #: as of ``lowering.start``
    patience: float  #: seconds to spin for a late rank


# the number of a tensor, the offset in it, and bytes; or -1 and an address, of memory of the recipe's own
Place = tuple[int, int, int]


@final
class Recipe(NamedTuple):
    """A kind of call, for ``_core.FastPath``."""

    program: Any  #: compiled
    words: Signature
    kernels: Sequence[tuple[int, int, int]]
    vectors: Sequence[Sequence[Place]]  #: the pieces of each vector
    op: Any
    result: int  #: the number of the argument that is the result; -1: the result is None
    owners: object = None  #: of memory of the recipe's own
    message: tuple[int, int, bool] | None = None  #: peer, tag, and whether it is sent; without a program then
    nbytes: int = 0  #: of the operation, for the statistics
    kind: int = -1  #: of ``DirectCalls.fusion_kind``; -1 for None
    weight: int = 0  #: bytes that count for ``Backend.fused_limit``
    large: bool = False  #: for the progress thread, which gets the run before it has moved anything


def fast_path(
    executor: Executor,
    calls: DirectCalls,
    limits: Limits,
    driven: Callable[[], bool],
    broken: Callable[[BaseException], object],
    arm: Callable[[], object],
    waited: set[Work[Any]],
    *queues: Sequence[Any],
) -> FastCalls | None:
    """The fast path of the calls of a comm; None without the executor in C, or if torch shows it no tensors.

    Args:
        driven: whether a thread drives the engine.
        broken: called with an exception that leaves an operation half done.
        arm: called on the loop when a message has been posted, for the engine to take it over soon.
        waited: the Works that threads wait for.
        queues: operations that must be done before.
    """
    states = load("asynccomm.core._work")
    if (
        executor.segment is None
        or isinstance(states, CoreUnavailable)
        or not issubclass(Work, states.WorkState)  # chosen when it was imported
        or (questions := torch_functions()) is None
    ):
        return None
    board = executor.board
    path = executor.core.FastPath(
        executor.segment,
        board.state,
        calls.counts,
        Work,
        calls.mailbox,
        board.difference,
        partial(recipe, executor, calls, limits),
        calls.call,
        calls.adopt,
        broken,
        call_site if calls.records_sites else None,
        user_files,
        passed_files,
        calls.recent,
        calls.notes,
        calls.note,
        vars(profiler),
        calls.lock,
        driven,
        (calls.driver, arm, waited, calls.in_flight.waiters, outcome.deciding.locked),
        *queues,
        Tensor,
        Parameter,
        questions,
        (None, True, False, *CONSTANTS, *_TORCHS),  # arguments of a recipe that are neither tensors nor integers
        largest_short(board.layout),
        (limits.patience, SHORT_WAIT_SECONDS),
        (
            calls.queues,
            calls.in_flight.works,
            calls.in_flight.settled,
            calls.overdue,
            calls.note_deadline,
            partial(recipe_of_held, executor, calls, limits),
            calls.adopt_held,
            Tensor.untyped_storage,
            calls.fused_limit,
        ),
    )
    return path  # type: ignore[no-any-return]


def recipe(
    executor: Executor, calls: DirectCalls, limits: Limits, check: Callable[..., Call | Several], *arguments: Any
) -> Recipe | None:
    """The recipe of calls like ``check(group, *arguments)``; None if they are not for the fast path."""
    try:
        made = check(calls.group, *arguments)
    except Exception:  # for the ordinary path, which raises it again
        return None
    if isinstance(made, Several):
        if len(made.calls) > 1:
            return None
        call = made.calls[0]._replace(result=made.result)
    else:
        call = made
    # the last of equals: an output may be another tensor in the same memory, and comes behind the input
    result = max([k for k, argument in enumerate(arguments) if argument is call.result is not None], default=-1)
    if (result < 0 and call.result is not None) or call.finish is not None:
        return None
    if call.op.p2p:
        return _message(calls.group, limits, call, result)
    if not has_program(call.op):
        return None
    kind = calls.fusion_kind(call.op)
    return _collective(executor, limits, call, _tensors(arguments), result, -1 if kind is None else kind)


def recipe_of_held(executor: Executor, calls: DirectCalls, limits: Limits, held: Sequence[HeldCall]) -> Recipe | None:
    """The recipe of the one call that several held calls become; None if the submitter has to send them."""
    call, arguments = calls.fused(held)
    return _collective(executor, limits, call, _tensors(arguments), -1, -1)


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, in the order in which the fast path takes their addresses."""
    tensors: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors += [item for item in argument if isinstance(item, Tensor)]
    return tensors


def _collective(
    executor: Executor, limits: Limits, call: Call, tensors: Sequence[Tensor], result: int, kind: int
) -> Recipe | None:
    submission = Submission(call, None)  # type: ignore[arg-type]
    if call.copies:
        return None
    try:
        with torch.inference_mode(False):
            low = lowered(executor, submission, limits.whole_bytes)
    except Exception:  # of torch, for tensors without all of their memory
        return None
    kernels = [reduction.kernel for reduction in low.reductions]
    vectors = [
        _places(operand, tensors) if number != low.scratch else [(-1, operand.data_ptr(), 0)]  # type: ignore[union-attr]
        for number, operand in enumerate(low.operands)
    ]
    if low.compiled.core is None or low.lands or None in kernels or None in vectors:
        return None
    owners = None if low.scratch < 0 else low.operands[low.scratch]
    words = signature(call.op)
    return Recipe(
        low.compiled.core,
        words,
        kernels,  # type: ignore[arg-type]
        vectors,  # type: ignore[arg-type]
        call.op,
        result,
        owners,
        nbytes=submission.nbytes,
        kind=kind,
        weight=call.op.nbytes,
        large=is_large(submission, limits.inline_bytes),
    )


def _message(group: CommInfo, limits: Limits, call: Call, result: int) -> Recipe | None:
    op: Any = call.op
    nbytes = op.numel * op.dtype.itemsize
    if op.peer is None or op.peer == group.rank or nbytes > limits.inline_bytes:
        return None
    message = op.peer, op.tag, op.is_send
    return Recipe(None, (CODES[op.dtype], op.numel), (), (), op, result, None, message, nbytes)


def _places(operand: Operand | int, tensors: Sequence[Tensor]) -> list[Place] | None:
    """The pieces of an operand; None if one is not in the memory of the arguments."""
    if isinstance(operand, Scattered):
        ends = zip(operand.starts, operand.starts[1:], strict=False)
        pieces = [(address, end - start) for address, (start, end) in zip(operand.addresses, ends, strict=True)]
    elif isinstance(operand, int):
        pieces = [(operand, 0)]
    else:
        pieces = [(operand.data_ptr(), 0)]
    # of tensors in the same memory, the search finds the last one here, which is the first argument
    order = sorted((tensor.data_ptr(), -number, tensor.nbytes) for number, tensor in enumerate(tensors))
    starts = [start for start, _, _ in order]
    places: list[Place] = []
    for address, left in pieces:
        while True:  # a piece may go on in the next tensor, which is elsewhere in other calls
            found = bisect_right(starts, address) - 1
            if found < 0 or address >= order[found][0] + order[found][2]:
                return None
            start, number, nbytes = order[found]
            offset = address - start
            n = min(left, nbytes - offset)
            places.append((-number, offset, n))
            address, left = address + n, left - n
            if not left:
                break
    return places
