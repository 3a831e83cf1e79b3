"""Bagua's operations: functions of tensors and a communicator.

``comm=None`` is the global communicator of the default group. On a communicator without this process, a function
returns at once and does nothing. Ranks are ranks in the communicator. On a thread without a loop a function blocks
until the host may read the result; in a coroutine its result is awaited. Functions in place take contiguous tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.compat.bagua.groups import BaguaSingleCommunicatorPy, default_communicator, trusts_values_only
from asynccomm.compat.bagua.reduction import ReduceOp, reduction
from asynccomm.compat.either import at_once, outcome
from asynccomm.core.work import Work
from asynccomm.ops.renamed import Renamed
from asynccomm.ops.validation import as_index, check_is_tensor

# the names of the functions' arguments, by those of the comm's methods
_PAIR: Final = {"tensor": "send_tensor", "input": "send_tensor", "out": "recv_tensor", "output": "recv_tensor"}
_IN_PLACE: Final = {"input": "tensor", "output": "tensor"}


def send(tensor: Tensor, dst: int, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Send ``tensor`` to rank ``dst``."""
    return _run(comm, lambda c: c.send(tensor, dst))


def recv(tensor: Tensor, src: int, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Receive a tensor from rank ``src`` into ``tensor``."""
    return _run(comm, lambda c: c.recv(tensor, src))


def broadcast(tensor: Tensor, src: int = 0, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Copy ``tensor`` of rank ``src`` into that of all ranks."""
    return _run(comm, lambda c: c.broadcast(tensor, src), root="src")


def broadcast_object(obj: object, src: int = 0, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """The ``obj`` of rank ``src``, on all ranks; ``obj`` itself on a communicator without this process."""
    safe = trusts_values_only()
    return _run(comm, lambda c: c.broadcast_object(obj, src, weights_only=safe), lambda found: found, obj, root="src")


def reduce(
    send_tensor: Tensor,
    recv_tensor: Tensor,
    dst: int,
    op: int = ReduceOp.SUM,
    comm: BaguaSingleCommunicatorPy | None = None,
) -> Any:
    """Combine all ranks' ``send_tensor`` into ``recv_tensor`` of rank ``dst``; the others' are not changed."""
    return _run(
        comm, lambda c: c.reduce(send_tensor, dst, reduction(op), out=_output(recv_tensor)), names=_PAIR, root="dst"
    )


def reduce_inplace(
    tensor: Tensor, dst: int, op: int = ReduceOp.SUM, comm: BaguaSingleCommunicatorPy | None = None
) -> Any:
    """Combine all ranks' ``tensor`` in place on rank ``dst``; the others' are not changed."""
    return _run(comm, lambda c: c.reduce(tensor, dst, reduction(op)), root="dst")


def allreduce(
    send_tensor: Tensor, recv_tensor: Tensor, op: int = ReduceOp.SUM, comm: BaguaSingleCommunicatorPy | None = None
) -> Any:
    """Combine all ranks' ``send_tensor`` into ``recv_tensor`` on all ranks, bitwise the same everywhere."""
    return _run(comm, lambda c: c.all_reduce(send_tensor, reduction(op), out=_output(recv_tensor)), names=_PAIR)


def allreduce_inplace(tensor: Tensor, op: int = ReduceOp.SUM, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Combine all ranks' ``tensor`` in place on all ranks."""
    return _run(comm, lambda c: c.all_reduce(tensor, reduction(op)))


def allgather(send_tensor: Tensor, recv_tensor: Tensor, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Collect all ranks' ``send_tensor`` in ``recv_tensor``, of ``nranks`` times as many elements."""
    return _run(comm, lambda c: c.all_gather_single(_output(recv_tensor), send_tensor), names=_PAIR)


def allgather_inplace(tensor: Tensor, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Collect in ``tensor`` the chunks of all ranks; this rank's chunk is its input."""
    return _run(comm, lambda c: c.all_gather_single(_flat("tensor", tensor), _chunks(tensor, c.size)[c.rank]))


def gather(send_tensor: Tensor, recv_tensor: Tensor, dst: int, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Collect all ranks' ``send_tensor`` in ``recv_tensor`` of rank ``dst``; the others' are not used."""

    def call(c: Comm) -> Work[Any]:
        output = _flat("recv_tensor", recv_tensor) if c.rank == dst else None
        return c.gather_single(output, _any_strides("send_tensor", send_tensor), dst)

    return _run(comm, call, names=_PAIR, root="dst")


def gather_inplace(tensor: Tensor, count: int, dst: int, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Collect ``count`` elements of each rank in ``tensor`` of rank ``dst``, of ``nranks * count`` elements."""

    def call(c: Comm) -> Work[Any]:
        _check_count(tensor, count, c.size if c.rank == dst else 1)
        if c.rank != dst:
            return c.gather_single(None, _any_strides("tensor", tensor), dst)
        return c.gather_single(_flat("tensor", tensor), _chunks(tensor, c.size)[dst], dst)

    return _run(comm, call, root="dst")


def scatter(send_tensor: Tensor, recv_tensor: Tensor, src: int, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Give each rank its chunk of ``send_tensor`` of rank ``src``; the others' are not used."""

    def call(c: Comm) -> Work[Any]:
        source = _any_strides("send_tensor", send_tensor) if c.rank == src else None
        return c.scatter_single(_flat("recv_tensor", recv_tensor), source, src)

    return _run(comm, call, names=_PAIR, root="src")


def scatter_inplace(tensor: Tensor, count: int, src: int, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Give each rank ``count`` elements of ``tensor`` of rank ``src``, which keeps its own in their place."""

    def call(c: Comm) -> Work[Any]:
        _check_count(tensor, count, c.size if c.rank == src else 1)
        if c.rank != src:
            return c.scatter_single(_flat("tensor", tensor), None, src)
        return c.scatter_single(_chunks(tensor, c.size)[src], _flat("tensor", tensor), src)

    return _run(comm, call, root="src")


def reduce_scatter(
    send_tensor: Tensor, recv_tensor: Tensor, op: int = ReduceOp.SUM, comm: BaguaSingleCommunicatorPy | None = None
) -> Any:
    """Combine all ranks' ``send_tensor``, and give each rank its chunk in ``recv_tensor``."""
    return _run(comm, lambda c: c.reduce_scatter_single(_output(recv_tensor), send_tensor, reduction(op)), names=_PAIR)


def reduce_scatter_inplace(
    tensor: Tensor, op: int = ReduceOp.SUM, comm: BaguaSingleCommunicatorPy | None = None
) -> Any:
    """Combine all ranks' ``tensor``; this rank's chunk of the result is in the first chunk, the rest is undefined."""

    def call(c: Comm) -> Work[Any]:
        return c.reduce_scatter_single(_chunks(tensor, c.size)[0], _flat("tensor", tensor), reduction(op))

    return _run(comm, call)


def alltoall(send_tensor: Tensor, recv_tensor: Tensor, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Send chunk r of ``send_tensor`` to each rank r; chunk s of ``recv_tensor`` comes from rank s."""
    return _run(comm, lambda c: c.all_to_all_single(_output(recv_tensor), send_tensor), names=_PAIR)


def alltoall_inplace(tensor: Tensor, comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """As :func:`alltoall`, with ``tensor`` for both."""
    return _run(comm, lambda c: c.all_to_all_single(tensor, tensor))


def barrier(comm: BaguaSingleCommunicatorPy | None = None) -> Any:
    """Wait until every rank has called it."""
    return _run(comm, lambda c: c.barrier())


def _run(
    comm: BaguaSingleCommunicatorPy | None,
    call: Callable[[Comm], Work[Any]],
    finish: Callable[[Any], Any] = lambda _: None,
    absent: object = None,
    *,
    names: Mapping[str, str] = _IN_PLACE,
    root: str = "root",
) -> Any:
    """The result of ``call`` on the comm; ``absent`` if this process is not among the ranks.

    Args:
        names, root: of the function's arguments, for errors.
    """
    here = default_communicator() if comm is None else comm
    if not isinstance(here, BaguaSingleCommunicatorPy):
        raise TypeError(f"comm must be a communicator of a BaguaProcessGroup, got {comm!r}")
    either = here.either
    if either is None:
        return at_once(absent)

    def done(value: Any) -> Any:
        if either.comm.device.type == "cuda":
            torch.cuda.current_stream(either.comm.device).synchronize()
        return finish(value)

    with here.on_stream():
        with Renamed({**names, "root": root}):
            work = either.call(call, either.comm)
        return outcome(work, done)


def _output(recv_tensor: Tensor) -> Tensor:
    # a comm takes None for a new tensor, or for the input, and Bagua's functions return no tensor
    check_is_tensor("recv_tensor", recv_tensor)
    return recv_tensor


def _any_strides(name: str, tensor: Tensor) -> Tensor:
    check_is_tensor(name, tensor)
    return tensor.reshape(-1)


def _flat(name: str, tensor: Tensor) -> Tensor:
    check_is_tensor(name, tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()} of shape {tuple(tensor.shape)}")
    return tensor.view(-1)


def _chunks(tensor: Tensor, size: int) -> Tensor:
    """``tensor`` as ``size`` rows."""
    flat = _flat("tensor", tensor)
    if flat.numel() % size:
        raise ValueError(f"tensor must have a multiple of {size} elements, got {flat.numel()}")
    return flat.view(size, -1)


def _check_count(tensor: Tensor, count: int, times: int) -> None:
    check_is_tensor("tensor", tensor)
    each = as_index(count)
    if each is None:
        raise TypeError(f"count must be an integer, got {count!r}")
    if tensor.numel() != each * times:
        raise ValueError(f"tensor must have {each * times} elements here, got {tensor.numel()}")
