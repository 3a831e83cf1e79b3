"""A mixture of experts trained on several ranks equals the one trained by a single process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from asynccomm import CollectiveMismatchError, Comm, PayloadError, Routing, WouldBlockError, experts
from asynccomm.testing import loopback_world

WIDTH, EXPERTS, CHOSEN = 4, 5, 2


class Mixture(nn.Module):
    """A router and some of the experts; all of them where there is no comm."""

    def __init__(self, comm: Comm | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.router = nn.Linear(WIDTH, EXPERTS, dtype=torch.float64)
        every = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(EXPERTS)]
        self.comm = comm
        mine = range(EXPERTS) if comm is None else experts.local_experts(comm, EXPERTS)
        self.experts = nn.ModuleDict({str(number): every[number] for number in mine})

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.first(tokens)
        weights, ids = self.router(hidden).softmax(-1).topk(CHOSEN)
        return hidden, weights, ids

    async def forward(self, tokens: Tensor) -> Tensor:
        assert self.comm is not None
        hidden, weights, ids = self.route(tokens)
        sent = await experts.dispatch(self.comm, hidden, Routing(ids, EXPERTS, weights))
        parts = zip(self.experts.values(), sent.hidden.split(sent.expert_counts), strict=True)
        return await experts.combine(self.comm, torch.cat([expert(rows).tanh() for expert, rows in parts]), sent)

    async def forward_on_all(self, tokens: Tensor) -> Tensor:
        """Every rank gets all tokens, and computes those of its experts."""
        assert self.comm is not None
        hidden, weights, ids = self.route(tokens)
        sent = await experts.dispatch(self.comm, hidden, extras=[weights, ids])
        weights, ids = sent.extras
        total = torch.zeros_like(sent.hidden)
        for number, expert in self.experts.items():
            factor = ((ids == int(number)) * weights).sum(1, keepdim=True)
            total = total + expert(sent.hidden).tanh() * factor
        return await experts.combine(self.comm, total, sent)

    def whole(self, tokens: Tensor) -> Tensor:
        """The same by one process, token by token."""
        hidden, weights, ids = self.route(tokens)
        rows = [
            sum(w * self.experts[str(int(number))](token).tanh() for w, number in zip(weight, chosen, strict=True))
            for token, weight, chosen in zip(hidden, weights, ids, strict=True)
        ]
        return torch.stack(rows) if rows else hidden


def batch(rank: int, step: int) -> Tensor:
    tokens = (0, 7, 4, 1)[(rank + step) % 4]
    return torch.randn(tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


async def train(comm: Comm, form: Callable[[Mixture, Tensor], object]) -> None:
    """Three steps by ``form`` on the ranks, and by one process on all their tokens."""
    model, whole = Mixture(comm), Mixture(None)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, whole)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        result = await form(model, batch(comm.rank, step))  # type: ignore[misc]
        await asyncio.to_thread(result.square().sum().backward)
        for name in ("first", "router"):  # held by all ranks, each with its own tokens
            for parameter in getattr(model, name).parameters():
                await comm.all_reduce(parameter.grad)
        results = [whole.whole(batch(rank, step)) for rank in range(comm.size)]
        torch.testing.assert_close(result, results[comm.rank])
        torch.cat(results).square().sum().backward()
        found = dict(whole.named_parameters())
        for name, parameter in model.named_parameters():
            expected = found[name].grad if found[name].grad is not None else torch.zeros_like(parameter)
            torch.testing.assert_close(parameter.grad, expected, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.ranks([2, 4], backend=["shm", "gloo"])
async def test_training_equals_one_process(comm: Comm) -> None:
    await train(comm, Mixture.forward)
    await train(comm, Mixture.forward_on_all)


@pytest.mark.parametrize("size", [1, 3])
async def test_training_within_a_process(size: int) -> None:
    async with loopback_world(size) as comms:
        await asyncio.gather(*(train(comm, Mixture.forward) for comm in comms))
        await asyncio.gather(*(train(comm, Mixture.forward_on_all) for comm in comms))


async def test_gradients_of_extras_and_of_weights_by_finite_differences() -> None:
    async with loopback_world(1) as (comm,):
        ids = torch.tensor([[0, 1], [1, -1], [0, 0]])

        def function(hidden: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
            sent = experts.dispatch(comm, hidden, Routing(ids, 2, weights), [scales]).wait()
            return experts.combine(comm, (sent.hidden * sent.extras[0]).sin(), sent).wait()

        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (3, 2), (3, 1))]
        assert await asyncio.to_thread(torch.autograd.gradcheck, function, inputs)


async def test_ranks_without_rows_take_part_in_backward() -> None:
    """All tokens go to rank 0, and only rank 0's expert computes; no rank's hidden states require a gradient."""

    async def program(comm: Comm) -> None:
        expert = nn.Linear(WIDTH, WIDTH)
        sent = await experts.dispatch(comm, torch.ones(3, WIDTH), Routing(torch.zeros(3, 1, dtype=torch.long), 2))
        rows = expert(sent.hidden) if comm.rank == 0 else sent.hidden.detach()
        result = await experts.combine(comm, rows, sent)
        await asyncio.to_thread(result.sum().backward)
        await comm.barrier()  # all ranks have called the same collectives
        assert (expert.bias.grad is not None) == (comm.rank == 0)
        if expert.bias.grad is not None:
            assert expert.bias.grad.tolist() == [6] * WIDTH

    async with loopback_world(2) as comms:
        await asyncio.gather(*(program(comm) for comm in comms))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.float32])
@pytest.mark.parametrize("routed", [True, False])
async def test_ranks_with_rows_of_no_input_send_the_gradients_of_a_dispatch(dtype: torch.dtype, routed: bool) -> None:
    """Rank 0 computes; rank 1 has no rows, or rows that depend on nothing, and its program drops the extras."""

    async def program(comm: Comm, learned: str) -> None:
        hidden = torch.ones(3, 1).to(dtype)
        scales, weights = (torch.full((3, 1), 2.0, requires_grad=name in learned) for name in ("scales", "weights"))
        routing = Routing(torch.zeros(3, 1, dtype=torch.long), 2, weights) if routed else None
        sent = await experts.dispatch(comm, hidden, routing, [scales] if routed else [scales, weights])
        if comm.rank == 0:
            rows = sent.hidden.float() * sent.extras[0] * (1 if routed else sent.extras[1])
        else:
            rows = torch.zeros(len(sent.hidden), 1)
            sent.extras.clear()
        result = await experts.combine(comm, rows, sent)
        await asyncio.to_thread(result.sum().backward)
        await comm.barrier()  # all ranks have called the same collectives
        for name, tensor in (("scales", scales), ("weights", weights)):
            assert (tensor.grad is not None) == (name in learned)
            assert tensor.grad is None or tensor.grad.tolist() == [[2]] * 3

    async with loopback_world(2) as comms:
        for learned in ("scales", "weights", "scales and weights"):
            await asyncio.gather(*(program(comm, learned) for comm in comms))


@pytest.mark.parametrize("sizes", [[1, 1], None])
async def test_gradients_travel_by_the_order_of_the_calls_not_of_the_awaits(sizes: list[int] | None) -> None:
    async def program(comm: Comm) -> None:
        tensors = [torch.full((1, 3), scale, requires_grad=True) for scale in (1.0, 10.0)]
        routing = None if sizes else Routing(torch.tensor([[1 - comm.rank]]), 2)
        works = [experts.dispatch(comm, tensor, routing, sizes=sizes) for tensor in tensors]
        sent: dict[int, Any] = {}
        for number in (0, 1) if comm.rank else (1, 0):
            sent[number] = await works[number]
        rows = [sent[number].hidden * (number + 2) for number in ((1, 0) if comm.rank else (0, 1))]
        if comm.rank:
            rows.reverse()
        results = [experts.combine(comm, rows[number], sent[number]) for number in (0, 1)]
        total = (await results[1]).sum() + (await results[0]).sum()
        await asyncio.to_thread(total.backward)
        of_all = 2 if sizes else 1
        assert [tensor.grad.unique().tolist() for tensor in tensors] == [[2 * of_all], [3 * of_all]]  # type: ignore[union-attr]

    async with loopback_world(2) as comms:
        await asyncio.gather(*(program(comm) for comm in comms))


@pytest.mark.parametrize("routing", [None, Routing(torch.tensor([[0], [0]]), 1)])
async def test_tensors_may_change_once_their_operation_is_done(routing: Routing | None) -> None:
    async with loopback_world(1) as (comm,):
        hidden = torch.ones(2, 3, requires_grad=True)
        copy = hidden * 1
        dispatched = experts.dispatch(comm, copy, routing)
        await comm.barrier()
        copy.mul_(10)
        sent = await dispatched
        rows = sent.hidden * 2
        combined = experts.combine(comm, rows, sent)
        await comm.barrier()
        if routing is None:  # else autograd refuses it, as the sums need the rows
            rows.mul_(10)
        result = await combined
        assert result.unique().tolist() == [2]
        await asyncio.to_thread(result.sum().backward)
        assert hidden.grad is not None
        assert hidden.grad.unique().tolist() == [2]


async def test_gradients_of_different_calls_never_meet() -> None:
    """As where one rank makes its calls in several threads: each has its own order in the backward pass."""

    async def program(comm: Comm) -> None:
        tensors = [torch.ones(1, 3, requires_grad=True) for _ in range(2)]
        sent = [await experts.dispatch(comm, tensor, Routing(torch.tensor([[0]]), 2)) for tensor in tensors]
        first = sent[comm.rank].hidden.sum()
        with pytest.raises(CollectiveMismatchError, match=r"tag='gradients of #[01]'"):
            await asyncio.to_thread(first.backward)

    async with loopback_world(2) as comms:
        await asyncio.gather(*(program(comm) for comm in comms))


async def test_the_mode_at_the_call_decides() -> None:
    async with loopback_world(1) as (comm,):
        hidden, routing = torch.ones(2, 3, requires_grad=True), Routing(torch.tensor([[0], [0]]), 1)
        with torch.no_grad():
            work = experts.dispatch(comm, hidden, routing)
        sent = await work
        assert not sent.hidden.requires_grad
        work = experts.dispatch(comm, hidden, routing)
        with torch.inference_mode():
            sent = await work
        assert sent.hidden.requires_grad
        with torch.no_grad():
            result = experts.combine(comm, sent.hidden, sent)
        assert not (await result).requires_grad
        codes = torch.ones(2, 3, dtype=torch.float8_e4m3fn)
        sent = await experts.dispatch(comm, codes, routing)
        assert not sent.hidden.requires_grad, "float8 has no gradients"
        assert sent.hidden.view(torch.uint8).equal(codes.view(torch.uint8))


async def test_modes_that_differ_between_ranks_are_an_error() -> None:
    routing = Routing(torch.tensor([[0]]), 2)
    async with loopback_world(2) as (a, b):
        with torch.no_grad():
            works = [experts.dispatch(a, torch.ones(1, 3), routing)]
        works.append(experts.dispatch(b, torch.ones(1, 3), routing))
        for work in works:
            with pytest.raises(PayloadError, match=r"rank \d sent a tensor that differs in dtype"):
                await work


@pytest.mark.parametrize("grad", [False, True])
async def test_with_sizes_ranks_that_differ_in_their_gradients_are_an_error(grad: bool) -> None:
    hidden = torch.ones(1, 3, requires_grad=True)
    async with loopback_world(2) as (a, b):
        with torch.set_grad_enabled(grad):
            works = [experts.dispatch(a, hidden, extras=[torch.ones(1, 2, requires_grad=True)], sizes=[1, 1])]
        works.append(experts.dispatch(b, hidden, extras=[torch.ones(1, 2)], sizes=[1, 1]))
        for work in works:
            with pytest.raises(CollectiveMismatchError, match=r"dispatch\(float32\[5\] in pieces\)"):
                await work


async def test_backward_on_the_thread_of_an_event_loop_is_refused_before_anything_is_sent() -> None:
    async with loopback_world(1) as (comm,):
        hidden = torch.ones(2, 3, requires_grad=True)
        sent = await experts.dispatch(comm, hidden, Routing(torch.tensor([[0], [0]]), 1))
        total = (await experts.combine(comm, sent.hidden, sent)).sum()
        with pytest.raises(WouldBlockError, match=r"use `await asyncio.to_thread\(loss.backward\)`"):
            total.backward()
        assert comm.statistics().submitted == 2


async def test_arguments_are_checked_at_the_call() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(TypeError, match=r"hidden must be a torch.Tensor, got 3"):
            experts.dispatch(comm, 3)  # type: ignore[arg-type]
        for routing, extras, text in [
            (3, (), r"routing must be an asynccomm.Routing or None, got 3 \(int\)"),
            (None, None, "extras must be a list or tuple of tensors, got NoneType"),
            (None, [3], r"extras\[0\] must be a torch.Tensor, got 3"),
        ]:
            with pytest.raises(TypeError, match=text):
                experts.dispatch(comm, torch.ones(1, 2), routing, extras)  # type: ignore[arg-type]
        for call in (
            lambda: experts.dispatch(3, torch.ones(1, 2)),  # type: ignore[arg-type]
            lambda: experts.combine(3, torch.ones(1, 2), None),  # type: ignore[arg-type]
            lambda: experts.local_experts(3, 4),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError, match=r"comm must be a Comm, got 3 \(int\)"):
                call()
        with pytest.raises(TypeError, match=r"sent must be the result of dispatch\(\), got None"):
            experts.combine(comm, torch.ones(1), None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"placement\[0\] must be a rank in \[0, 1\), got 1"):
            experts.local_experts(comm, 1, [1])
        assert experts.local_experts(comm, 3) == (0, 1, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # of torch's own forward mode
@pytest.mark.parametrize("grad", [True, False])
async def test_derivatives_in_forward_mode_are_refused_before_anything_is_sent(grad: bool) -> None:
    async with loopback_world(1) as (comm,):
        plain, ids = torch.ones(3, 2), torch.zeros(3, 1, dtype=torch.int64)
        sent = await experts.dispatch(comm, plain)
        with forward_ad.dual_level(), torch.set_grad_enabled(grad):
            dual = forward_ad.make_dual(plain, plain)
            weighted = Routing(ids, 1, dual[:, :1])
            calls: list[tuple[str, Callable[[], Any]]] = [
                ("hidden", lambda: experts.dispatch(comm, dual)),
                (r"extras\[1\]", lambda: experts.dispatch(comm, plain, extras=[plain, dual])),
                ("weights", lambda: experts.dispatch(comm, plain, weighted)),
                ("rows", lambda: experts.combine(comm, dual, sent)),
            ]
            for name, call in calls:
                with pytest.raises(NotImplementedError, match=f"{name} must not be differentiated in forward mode"):
                    call()
        assert comm.statistics().submitted == 1
