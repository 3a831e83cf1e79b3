"""Operators of torch by a group's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asynccomm import WouldBlockError
from asynccomm.compat import operators


class Group:
    """A group of two ranks with equal tensors."""

    def _all_reduce_out_place(self, input_: torch.Tensor) -> Any:
        return input_ * 2

    def _all_gather_out_place(self, input_: torch.Tensor, dim: int) -> Any:
        return torch.cat([input_, input_], dim)

    def _reduce_scatter_out_place(self, input_: torch.Tensor, dim: int) -> Any:
        return (input_ * 2).chunk(2, dim)[0].contiguous()

    def _all_to_all_out_place(self, input_: torch.Tensor) -> Any:
        return torch.cat([input_.chunk(2)[0]] * 2)

    def _broadcast_out_place(self, input_: torch.Tensor, root: int) -> Any:
        return input_.clone()


def results(tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    return [
        torch.ops.asynccomm.all_reduce(tensor, name),
        torch.ops.asynccomm.all_gather(tensor, -1, 2, name),
        torch.ops.asynccomm.reduce_scatter(tensor, 0, 2, name),
        torch.ops.asynccomm.all_to_all(tensor, name),
        torch.ops.asynccomm.broadcast(tensor, 0, name),
    ]


def test_operators_find_their_group_and_its_results_without_it() -> None:
    name = operators.unique_name("here")
    group = Group()
    operators.register(name, group)
    real = results(torch.ones(4, 2), name)
    assert [tuple(tensor.shape) for tensor in real] == [(4, 2), (4, 4), (2, 2), (4, 2), (4, 2)]
    with FakeTensorMode():
        fake = results(torch.ones(4, 2), name)
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    del group
    with pytest.raises(ValueError, match=f"group_name must be of a group that exists, got '{name}'"):
        results(torch.ones(4, 2), name)


def test_names_are_numbered_and_removed() -> None:
    first, second = operators.unique_name("numbered"), operators.unique_name("numbered")
    assert (first, second) == ("numbered:0", "numbered:1")
    group = Group()
    operators.register(first, group)
    assert operators.group_called(first) is group
    operators.unregister(first)
    operators.unregister(first)
    with pytest.raises(ValueError, match="numbered:0"):
        operators.group_called(first)


@pytest.mark.exhaustive
def test_torch_finds_the_operators_right() -> None:
    name, group = operators.unique_name("checked"), Group()
    operators.register(name, group)
    for operator, arguments in (
        (torch.ops.asynccomm.all_reduce, (name,)),
        (torch.ops.asynccomm.all_gather, (1, 2, name)),
        (torch.ops.asynccomm.reduce_scatter, (0, 2, name)),
        (torch.ops.asynccomm.all_to_all, (name,)),
        (torch.ops.asynccomm.broadcast, (0, name)),
    ):
        torch.library.opcheck(operator.default, (torch.ones(4, 2), *arguments))


async def test_an_operator_does_not_block_a_loop() -> None:
    with pytest.raises(WouldBlockError, match="run the model in another thread"):
        torch.ops.asynccomm.all_reduce(torch.ones(1), "any")
