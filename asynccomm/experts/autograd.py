"""``dispatch`` and ``combine`` with gradients.

The tensors travel outside of autograd, and a node of the graph is put behind them: its backward sends the gradients the
opposite way and waits for them. One node has all tensors of a call, so that a call has one place in the order of the
gradients. With gradients enabled the nodes are there on every rank, whether its tensors need gradients or not: a
backward pass runs the same collectives everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, SupportsIndex, TypeVar, cast, final

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
    travels = GradientTravel(comm, timeout, tag)
    numbers = [i for i, each in enumerate(inputs) if _differentiable(each) and (i == 0 or each.requires_grad)]

    def link(received: list[Tensor], path: Path) -> list[Tensor]:
        if numbers:
            results = [received[i] for i in numbers]
            linked = travels.behind(results, path.back, _anchor(hidden), [inputs[i] for i in numbers])
            for i, tensor in zip(numbers, linked, strict=True):
                received[i] = tensor
        return received

    note = f", gradients of {numbers}"
    call = experts.dispatch(comm._group, hidden, routing, extras, sizes, link, note)
    return travels.send(call._replace(finish=_with_gradients(cast(Any, call.finish))))


def combine(
    comm: Comm, rows: Tensor, sent: Dispatched, *, timeout: float | timedelta | None = None, tag: str | None = None
) -> Work[Tensor]:
    """:meth:`Comm.combine` with gradients of ``rows``, and of the weights of the dispatch.

    ``rows`` are read at the call. Each rank's loss must depend on the result, also where the rank has no tokens:
    ``result.sum()`` is enough. Backward is that of :func:`dispatch`.

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
    travels = GradientTravel(comm, timeout, tag)
    # through the anchor, backward reaches the node of the dispatch even on a rank without rows
    anchor = sent.hidden if sent.hidden.requires_grad else _anchor(rows)
    call = sent.path.back(partial)
    add_up = call.finish

    def finish(received: Tensor) -> Tensor:
        result = received if add_up is None else add_up(received)
        (linked,) = travels.behind([result], sent.path.forth, anchor, [partial])
        return linked

    return travels.send(call._replace(finish=_with_gradients(finish)))


def local_experts(
    comm: Comm, num_experts: SupportsIndex, placement: Sequence[SupportsIndex] | None = None
) -> tuple[int, ...]:
    """The ids of the experts that this rank holds, ascending. The arguments are those of ``Routing``.

    Raises: TypeError, ValueError.
    """
    check_comm(comm)
    return ExpertPlacement.of(comm._group, num_experts, placement, torch.device("cpu")).experts


@final
class GradientTravel(NamedTuple):
    """Sends tensors, and later their gradients, on ``comm``."""

    comm: Comm
    timeout: float | timedelta | None
    tag: str | None

    def send(self, call: Call) -> Work[Any]:
        return self.comm._submit(call, self.timeout, None, self.tag)

    def behind(
        self, results: list[Tensor], opposite: Callable[[Tensor], Call], anchor: Tensor, inputs: list[Tensor]
    ) -> Sequence[Tensor]:
        """``results`` in the graph: their gradients travel by ``opposite`` and become those of ``inputs``."""

        def returned(gradients: Sequence[Tensor]) -> list[Tensor]:
            if self.comm.device.type == "cpu" and asyncio._get_running_loop() is not None:
                raise WouldBlockError(
                    "backward() through dispatch() and combine() waits for the other ranks and would block the event "
                    "loop of this thread: use `await asyncio.to_thread(loss.backward)`"
                )
            works = [self.send(opposite(gradient)) for gradient in gradients]
            return [work.wait() for work in works]

        linked: Sequence[Tensor] = cast(Any, _Travelled).apply(returned, results, anchor, *inputs)
        return linked


@final
class _Travelled(torch.autograd.Function):
    """Results that came from other ranks, as functions of this rank's tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        returned: Callable[[Sequence[Tensor]], list[Tensor]],
        results: list[Tensor],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.returned = returned
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *ctx.returned(gradients)


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
