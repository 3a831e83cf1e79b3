"""The order in which a step sends its buckets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from asynccomm import Comm, ReduceOp
from asynccomm.gradients.bucket import GradientBuckets
from asynccomm.gradients.planning import GradientLayout
from asynccomm.gradients.step import GradientStep

from .ranks import on_ranks


def step_of(comm: Comm, plan: Sequence[Sequence[int]]) -> tuple[list[nn.Parameter], GradientStep]:
    parameters = [nn.Parameter(torch.zeros(2)) for numbers in plan for _ in numbers]
    names = [f"p{number}" for number in range(len(parameters))]
    buckets = GradientBuckets(comm, parameters, names, [GradientLayout.of(each) for each in parameters], plan)
    step = GradientStep(buckets, ReduceOp.AVG, None)
    for number, each in enumerate(parameters):
        each.register_post_accumulate_grad_hook(lambda _, number=number: step.arrived(number, sync=True))
    return parameters, step


async def test_buckets_leave_in_one_order_whatever_is_there_first() -> None:
    async def program(comm: Comm) -> list[int]:
        parameters, step = step_of(comm, [[0, 1], [2], [3]])
        counts = []
        for number in [3, 1, 0, 2] if comm.rank == 0 else [2, 3, 1, 0]:
            (parameters[number] * (number + 1 + comm.rank)).sum().backward()
            counts.append(len(step.works))
        await step.receive()
        assert step.recorded == ([3, 1, 0, 2] if comm.rank == 0 else [2, 3, 1, 0])
        assert [each.grad[0].item() for each in parameters] == [1.5, 2.5, 3.5, 4.5]
        return counts

    assert await on_ranks(2, program) == [[0, 0, 1, 3], [0, 0, 0, 3]]


async def test_the_rest_is_sent_at_the_end() -> None:
    async def program(comm: Comm) -> None:
        parameters, step = step_of(comm, [[0], [1], [2]])
        parameters[1].sum().backward()
        assert step.began
        assert not step.running
        assert not step.works
        step.send_rest()
        assert len(step.works) == 3
        assert list(await step.receive()) == []
        assert [each.grad is None for each in parameters] == [True, False, True]

    await on_ranks(2, program)


async def test_a_pass_that_raises_does_not_end() -> None:
    async def program(comm: Comm) -> None:
        (parameter, other), step = step_of(comm, [[0], [1]])
        copy = other.clone()
        copy.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (parameter + copy).sum().backward()
        assert len(step.works) == 1
        assert step.running

    await on_ranks(1, program)


async def test_a_cancelled_wait_goes_on_later() -> None:
    cancelled = asyncio.Event()

    async def program(comm: Comm) -> None:
        parameters, step = step_of(comm, [[0], [1]])
        if comm.rank == 1:
            await cancelled.wait()
        torch.cat(parameters).sum().backward()  # type: ignore[arg-type]
        if comm.rank == 0:
            waiting = asyncio.create_task(step.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            cancelled.set()
        await step.receive()
        assert [each.grad[0].item() for each in parameters] == [1, 1]

    await on_ranks(2, program)


@pytest.mark.parametrize("number", [0, 1])
async def test_gradients_on_their_way_must_not_change(number: int) -> None:
    async def program(comm: Comm) -> None:
        parameters, step = step_of(comm, [[0, 1]])
        parameters[0].sum().backward()
        step.send_rest()
        text = f"parameter 'p{number}' got another gradient while gradients of the last backward are on their way"
        with pytest.raises(RuntimeError, match=text):
            parameters[number].sum().backward()
        with pytest.raises(RuntimeError, match=text):
            await step.receive()

    await on_ranks(2, program)
