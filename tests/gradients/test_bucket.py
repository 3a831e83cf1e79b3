"""The memory of buckets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from asynccomm import Comm, ReduceOp
from asynccomm.gradients.bucket import GradientBucket, GradientBuckets
from asynccomm.gradients.planning import GradientLayout

from .ranks import on_ranks


def bucket_of(comm: Comm, *parameters: nn.Parameter) -> GradientBucket:
    names = [f"p{number}" for number in range(len(parameters))]
    layouts = [GradientLayout.of(each) for each in parameters]
    (bucket,) = GradientBuckets(comm, parameters, names, layouts, [range(len(parameters))]).all
    return bucket


def parameter(*shape: int, grad: float | None = None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(shape, dtype=dtype))
    made.grad = None if grad is None else torch.full_like(made, grad)
    return made


async def test_gradients_are_views_and_aligned() -> None:
    async def program(comm: Comm) -> None:
        weight = nn.Parameter(torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last))
        weight.grad = torch.randn_like(weight)
        before = weight.grad.clone()
        bucket = bucket_of(comm, parameter(3, grad=2.0), weight, parameter())
        bucket.put(0)
        bucket.put(1)
        assert weight.grad.data_ptr() == bucket.gradients[1].data_ptr()
        assert torch.equal(weight.grad, before)
        assert weight.grad.stride() == weight.stride()
        assert bucket.tensor.shape == (4 + 48 + 4,)
        assert bucket.tensor[:4].tolist() == [2, 2, 2, 0]
        address = bucket.tensor.data_ptr()
        assert all((view.data_ptr() - address) % 16 == 0 for view in bucket.gradients)
        view = weight.grad
        bucket.put(1)  # autograd has added to the view in place
        assert weight.grad is view

    await on_ranks(1, program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.SUM])
async def test_a_parameter_without_gradient_counts_as_zeros(dtype: torch.dtype, op: ReduceOp) -> None:
    async def program(comm: Comm) -> list[list[Tensor | None]]:
        def send(*grads: float | None) -> None:
            for slot, (each, grad) in enumerate(zip(parameters, grads, strict=True)):
                each.grad = None if grad is None else torch.full_like(each, grad)
                if grad is not None:
                    bucket.arrive(slot)
            bucket.seal()
            bucket.send(op, None)
            bucket.watch()

        parameters = [parameter(2, dtype=dtype) for _ in range(3)]
        bucket = bucket_of(comm, *parameters)
        found = []
        for grads in [(3.0, None, None), (None, 6.0, None), (3.0, 6.0, 9.0)]:
            send(*(grads if comm.rank == 1 or grads[2] else (None, None, None)))
            await bucket.receive()
            bucket.settle()
            found.append([None if each.grad is None else each.grad.clone() for each in parameters])
        return found

    third = 1 if op is ReduceOp.AVG else 3
    for found in await on_ranks(3, program):
        values = [[None if grad is None else grad[0].item() for grad in step] for step in found]
        assert values == [[third, None, None], [None, 2 * third, None], [3 * third, 6 * third, 9 * third]]


async def test_a_replaced_gradient_is_noticed() -> None:
    async def program(comm: Comm) -> None:
        weight = parameter(2, grad=1.0)
        bucket = bucket_of(comm, weight)
        bucket.seal()
        bucket.send(ReduceOp.AVG, None)
        weight.grad = None
        await bucket.receive()
        with pytest.raises(RuntimeError, match=r"the gradient of parameter 'p0' was replaced between backward and the"):
            bucket.settle()

    await on_ranks(1, program)


@pytest.mark.parametrize(
    "change",
    [
        lambda each: torch.nn.utils.clip_grad_norm_([each], 1.0),
        lambda each: torch.optim.SGD([each]).zero_grad(set_to_none=False),
        lambda each: each.grad.mul_(2),
    ],
)
async def test_a_gradient_that_is_changed_on_its_way_is_noticed(change: Callable[[nn.Parameter], object]) -> None:
    async def program(comm: Comm) -> None:
        weight = parameter(2, grad=1.0)
        bucket = bucket_of(comm, weight, parameter(2))
        bucket.arrive(0)
        bucket.seal()
        bucket.send(ReduceOp.AVG, torch.bfloat16)
        bucket.watch()
        change(weight)
        await bucket.receive()
        with pytest.raises(RuntimeError, match=r"changed in place .* in the bucket of parameters 'p0' to 'p1'; change"):
            bucket.settle()

    await on_ranks(1, program)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda each: setattr(each, "grad", None), r"the gradient of parameter 'p0' was replaced between backward"),
        (lambda each: each.grad.zero_(), r"gradients were changed in place between backward and the end of finish"),
    ],
)
async def test_a_gradient_that_is_changed_before_its_bucket_is_sent_is_noticed(
    change: Callable[[nn.Parameter], object], text: str
) -> None:
    async def program(comm: Comm) -> None:
        weight = parameter(2, grad=1.0)
        bucket = bucket_of(comm, weight, parameter(2))  # not full, so it is sent by finish()
        bucket.arrive(0)
        change(weight)
        with pytest.raises(RuntimeError, match=text):
            bucket.seal()

    await on_ranks(1, program)


async def test_elements_travel_in_a_narrower_dtype_only() -> None:
    async def program(comm: Comm) -> list[torch.dtype]:
        found = []
        for dtype in (torch.float64, torch.float32, torch.float16, torch.complex64):
            bucket = bucket_of(comm, parameter(2, grad=1 + 2**-20, dtype=dtype))
            bucket.seal()
            bucket.send(ReduceOp.AVG, torch.bfloat16)
            sent = await bucket.pending
            found.append(sent.dtype)
            await bucket.receive()
            assert bucket.gradients[0][0] == (1 if sent.dtype is torch.bfloat16 else bucket.parameters[0].grad[0])
        return found

    assert await on_ranks(1, program) == [[torch.bfloat16, torch.bfloat16, torch.float16, torch.complex64]]
