"""``dispatch`` and ``combine`` with gradients.

The tensors travel outside of autograd, between two nodes of the graph: one behind the inputs, made at the call, and one
before the results, made when the Work is read. In the backward pass, the latter keeps the gradients of the results, and
the former sends them the opposite way and waits for those of the inputs. autograd runs nodes that were made in one
thread in the opposite order, so all ranks send gradients in the opposite order of their calls, also where they read the
Works in another order, as long as that is in the same thread. With gradients enabled the nodes are there on every rank,
whether its tensors need gradients or not: a backward pass runs the same collectives everywhere.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, SupportsIndex, TypeVar, cast, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from asynccomm.comm.comm import Comm, check_comm
from asynccomm.core.work import Work
from asynccomm.errors import WouldBlockError
from asynccomm.ops import Call, experts
from asynccomm.ops.experts import Dispatched, Path
from asynccomm.ops.routing import ExpertPlacement, Routing
from asynccomm.ops.validation import as_list, check_no_tangent

T = TypeVar("T")


def dispatch(
    comm: Comm,
    hidden: Tensor,
    routing: Routing | None = None,
    extras: Sequence[Tensor] = (),
    sizes: Sequence[SupportsIndex] | None = None,
    *,
    timeout: float | timedelta | None = None,
    tag: str | None = None,
) -> Work[Dispatched]:
    """:meth:`Comm.dispatch` with gradients of ``hidden``, ``extras`` and the routing's weights.

    The gradient of a token is the sum of the gradients of its rows on all ranks. Gradients are on or off
    (``torch.no_grad``) at this call on all ranks alike. Which of ``extras`` and weights require gradients is the same
    on all ranks, too.

    backward() waits for the other ranks: on the CPU it must run in a thread without a running event loop, as in
    ``await asyncio.to_thread(loss.backward)``, and raises ``WouldBlockError`` elsewhere.

    Args:
        timeout, tag: also of the backward pass's operations.

    Returns: Work of a ``Dispatched``; its tensors are part of the graph.
    Raises: as :meth:`Comm.dispatch`; NotImplementedError for a tensor with a forward-mode derivative.
    """
    check_comm(comm)
    given = {"hidden": hidden, **{f"extras[{i}]": tensor for i, tensor in enumerate(as_list("extras", extras))}}
    if isinstance(routing, Routing) and routing.weights is not None:
        given["weights"] = routing.weights
    for name, tensor in given.items():
        check_no_tangent(name, tensor)
    if not torch.is_grad_enabled():
        return comm.dispatch(hidden, routing, extras, sizes, timeout=timeout, tag=tag)
    inputs = list(given.values())
    numbers = [i for i, each in enumerate(inputs) if _differentiable(each) and (i == 0 or each.requires_grad)]
    way = GradientWay(comm, timeout, tag)

    def link(received: list[Tensor], path: Path) -> tuple[list[Tensor], Tensor | None]:
        if not numbers:
            return received, None
        linked, anchor = way.end([received[i] for i in numbers], begin, path.back)
        for i, tensor in zip(numbers, linked, strict=True):
            received[i] = tensor
        return received, anchor

    note = f", gradients of {numbers}"
    call = experts.dispatch(comm._group, hidden, routing, extras, sizes, link, note)
    begin = way.begin(_anchor(hidden), [inputs[i] for i in numbers])
    return way.send(call._replace(finish=_with_gradients(cast(Any, call.finish))))


def combine(
    comm: Comm, rows: Tensor, sent: Dispatched, *, timeout: float | timedelta | None = None, tag: str | None = None
) -> Work[Tensor]:
    """:meth:`Comm.combine` with gradients of ``rows``, and of the weights of the dispatch.

    Where the dispatch had a routing, ``rows`` are read at the call. Each rank's loss must depend on the result, also
    where the rank has no tokens: ``result.sum()`` is enough. Backward is that of :func:`dispatch`.

    Args:
        sent: the result of :func:`dispatch` on ``comm``.
        timeout, tag: also of the backward pass's operation.

    Raises: as :meth:`Comm.combine`; NotImplementedError for rows with a forward-mode derivative.
    """
    check_comm(comm)
    check_no_tangent("rows", rows)
    if not torch.is_grad_enabled():
        return comm.combine(rows, sent, timeout=timeout, tag=tag)
    experts.check_rows(comm._group, rows, sent)
    partial = sent.partial_sums(rows)
    way = GradientWay(comm, timeout, tag)
    # through the anchor, backward reaches the node of the dispatch even on a rank without rows
    begin = way.begin(_anchor(rows) if sent.anchor is None else sent.anchor, [partial])
    call = sent.path.back(partial)
    add_up = call.finish

    def finish(received: Tensor) -> Tensor:
        result = received if add_up is None else add_up(received)
        (linked,), _ = way.end([result], begin, sent.path.forth)
        return linked

    return way.send(call._replace(finish=_with_gradients(finish)))


def local_experts(
    comm: Comm, num_experts: SupportsIndex, placement: Sequence[SupportsIndex] | None = None
) -> tuple[int, ...]:
    """The ids of the experts that this rank holds, ascending. The arguments are those of ``Routing``.

    Raises: TypeError, ValueError.
    """
    check_comm(comm)
    return ExpertPlacement.of(comm._group, num_experts, placement, torch.device("cpu")).experts


@final
class GradientWay:
    """The way of the gradients of one call on ``comm``, from its results to its inputs."""

    def __init__(self, comm: Comm, timeout: float | timedelta | None, tag: str | None) -> None:
        self._comm = comm
        self._timeout = timeout
        self._tag = tag
        # weak, as the Work has the results, and their graph has this way
        self._work: weakref.ref[Work[Any]] | None = None
        self._number = -1  # of the call
        self._opposite: Callable[[Tensor], Call] | None = None  # the call for a gradient
        self.gradients: Sequence[Tensor] = ()  #: of the results, in a backward pass

    def send(self, call: Call) -> Work[Any]:
        """Submit the call itself."""
        work = self._comm._submit(call, self._timeout, None, self._tag)
        self._work = weakref.ref(work)
        return work

    def begin(self, anchor: Tensor, inputs: list[Tensor]) -> Tensor:
        """Put the node of ``inputs`` into the graph; a tensor that leads from the node of the results to it."""
        return cast(Tensor, cast(Any, _Inputs).apply(self, anchor, *inputs))

    def end(
        self, results: list[Tensor], begin: Tensor, opposite: Callable[[Tensor], Call]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """``results`` in the graph, and an anchor that leads to their node.

        The gradients of the results travel by ``opposite`` and become those of the inputs.
        """
        work = None if self._work is None else self._work()
        if work is not None:
            self._number = work.seq
        self._opposite = opposite
        *linked, anchor = cast(Any, _Results).apply(self, begin, results)
        return linked, anchor

    def returned(self) -> list[Tensor]:
        """The gradients of the inputs. Sends those of the results, and waits for the other ranks."""
        if self._comm.device.type == "cpu" and asyncio._get_running_loop() is not None:
            raise WouldBlockError(
                "backward() through dispatch() and combine() waits for the other ranks and would block the event "
                "loop of this thread: use `await asyncio.to_thread(loss.backward)`"
            )
        assert self._opposite is not None
        # in the tag, the number shows gradients of different calls that meet
        tag = f"gradients of #{self._number}" if self._tag is None else f"{self._tag}, gradients of #{self._number}"
        calls = [self._opposite(gradient) for gradient in self.gradients]
        self.gradients = ()
        works = [self._comm._submit(call, self._timeout, None, tag) for call in calls]
        return [work.wait() for work in works]


@final
class _Inputs(torch.autograd.Function):
    """The node of the tensors of a call: sends the gradients of its results, and has their gradients in return."""

    @staticmethod
    def forward(ctx: Any, way: GradientWay, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.way = way
        return torch.zeros(0, device=anchor.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, None, *ctx.way.returned()


@final
class _Results(torch.autograd.Function):
    """The node of tensors that came from other ranks: keeps their gradients for the node of the inputs."""

    @staticmethod
    def forward(ctx: Any, way: GradientWay, begin: Tensor, results: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.way = way
        return *results, torch.zeros(0, device=begin.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.way.gradients = gradients[:-1]
        return None, torch.zeros(0, device=gradients[0].device), None


def _differentiable(tensor: object) -> bool:
    if not isinstance(tensor, Tensor):  # dispatch refuses it
        return False
    return (tensor.is_floating_point() and tensor.itemsize > 1) or tensor.is_complex()


def _anchor(like: Tensor) -> Tensor:
    """An input of a node without any other input that requires a gradient."""
    return torch.zeros(0, device=like.device, requires_grad=True)


def _with_gradients(finish: Callable[[Any], T]) -> Callable[[Any], T]:
    """``finish`` with the mode of gradients of the call, however the Work is awaited."""

    def finished(value: Any) -> T:
        with torch.inference_mode(False), torch.enable_grad():
            return finish(value)

    return finished
