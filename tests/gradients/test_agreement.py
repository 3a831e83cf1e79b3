"""Ranks whose models or settings differ get the difference, all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from asynccomm import Comm, GradientReducer, ReduceOp
from asynccomm.gradients.agreement import agree, describe_model, first_difference

from .ranks import on_ranks


def odd(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    change(model)
    return model


def freeze(model: nn.Sequential) -> None:
    model[1].weight.requires_grad_(False)


DIFFERENT = {
    "dtype": (lambda m: m[1].double(), r"rank 1 has parameter '1.weight': float64\[4\]; rank 0 has .*: float32"),
    "shape": (
        lambda m: m.__setitem__(0, nn.Conv2d(2, 4, 5)),
        r"rank 1 has parameter '0.weight': float32\[4, 2, 5, 5\]; rank 0 has .*3, 3",
    ),
    "name": (lambda m: m.append(nn.Linear(1, 1)), r"has parameter '2.weight'.*rank 0 has buffer '1.running_mean'"),
    "less": (lambda m: m.pop(1), "rank 1 has nothing more; rank 0 has parameter '1.weight'"),
    "frozen": (freeze, "rank 1 has parameter '1.weight': .*without gradient; rank 0"),
    "buffer": (lambda m: m[1].register_buffer("more", torch.ones(2)), "rank 1 has buffer '1.more'.*; rank 0 has"),
    "strides": (
        lambda m: m[0].to(memory_format=torch.channels_last),
        r"'0.weight'.*with strides \(18, 1, 6, 2\); rank",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
async def test_the_first_difference_is_raised_on_all_ranks(name: str) -> None:
    change, text = DIFFERENT[name]

    async def program(comm: Comm) -> None:
        model = odd(change if comm.rank == 1 else len)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(ValueError, match=f"model or settings differ between ranks: .*{text}"):
            await GradientReducer(model, comm)
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)), "nothing was copied"
        await comm.barrier()  # the comm goes on

    await on_ranks(3, program)


@pytest.mark.parametrize(
    "options", [{"bucket_mb": 1}, {"op": ReduceOp.SUM}, {"compress": torch.bfloat16}, {"compress": len}]
)
async def test_settings_must_be_the_same(options: dict[str, object]) -> None:
    async def program(comm: Comm) -> None:
        given = options if comm.rank == 1 else {}
        with pytest.raises(ValueError, match=f"settings differ between ranks: rank 1 has {next(iter(options))}="):
            await GradientReducer(nn.Linear(2, 2), comm, **given)  # type: ignore[arg-type]

    await on_ranks(2, program)


async def test_the_plan_is_that_of_the_root() -> None:
    async def program(comm: Comm) -> object:
        return await agree(comm, 1, ["line"], [False, [[comm.rank]]])

    assert await on_ranks(2, program) == [[False, [[1]]]] * 2


def test_equal_models_have_equal_descriptions() -> None:
    lines = describe_model(odd(len))
    assert lines[:2] == ["parameter '0.weight': float32[4, 2, 3, 3]", "parameter '0.bias': float32[4]"]
    assert lines[-1] == "buffer '1.num_batches_tracked': int64[]"
    assert first_difference(lines, list(lines), 1, 0) is None
