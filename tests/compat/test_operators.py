"""Operators of torch by a group's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from asynccomm import WouldBlockError
from asynccomm.compat import operators


class Group:
    """Rank 0 of a group of two ranks with equal tensors."""

    def _operate(self, name: str, *arguments: Any, out: torch.Tensor | None = None) -> Any:
        if name == "all_reduce":
            assert out is not None
            return out.copy_(arguments[0] * (1 if arguments[1].type.name == "MAX" else 2))
        if name == "all_gather_single":
            return torch.cat([arguments[1]] * 2, arguments[2])
        if name == "reduce_scatter_single":
            return (arguments[1] * 2).chunk(2, arguments[3])[0].contiguous()
        if name == "all_to_all_single":
            return arguments[0].copy_(torch.cat([arguments[1].chunk(2)[0]] * 2))
        if name == "all_to_all_v_single":
            return arguments[0].fill_(1)
        if name == "reduce":
            return arguments[0].mul_(2) if arguments[1] == 0 else None
        assert name == "broadcast"
        return arguments[0]


def results(tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    return [
        torch.ops.asynccomm.all_reduce(tensor, name),
        torch.ops.asynccomm.all_gather(tensor, -1, 2, name),
        torch.ops.asynccomm.reduce_scatter(tensor, 0, 2, name),
        torch.ops.asynccomm.all_to_all(tensor, name),
        torch.ops.asynccomm.all_to_all_v(tensor, [1, 2], [3, 1], name),
        torch.ops.asynccomm.broadcast(tensor, 0, name),
        torch.ops.asynccomm.reduce(tensor, 1, 2, name),
    ]


def test_operators_find_their_group_and_its_results_without_it() -> None:
    name = operators.unique_name("here")
    group = Group()
    operators.register(name, group)
    real = results(torch.ones(4, 2), name)
    assert [tuple(tensor.shape) for tensor in real] == [(4, 2), (4, 4), (2, 2), (4, 2), (3, 2), (4, 2), (4, 2)]
    assert real[-1].eq(0).all()  # this rank is not the root
    assert torch.ops.asynccomm.reduce(torch.ones(1), 0, 2, name).item() == 2
    assert torch.ops.asynccomm.all_reduce(torch.ones(1), name, "MAX").item() == 1
    with pytest.raises(ValueError, match=r"op must be one of SUM, AVG, .*, got 'PREMUL_SUM'"):
        torch.ops.asynccomm.all_reduce(torch.ones(1), name, "PREMUL_SUM")
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


def test_reductions_without_a_gradient_are_refused_in_the_backward_pass() -> None:
    name, group = operators.unique_name("gradients"), Group()
    operators.register(name, group)
    tensor = torch.ones(2, requires_grad=True)
    for result in (
        torch.ops.asynccomm.all_reduce(tensor, name, "MAX"),
        torch.ops.asynccomm.reduce_scatter(tensor, 0, 2, name, "MIN"),
        torch.ops.asynccomm.reduce(tensor, 0, 2, name, "PRODUCT"),
    ):
        with pytest.raises(NotImplementedError, match=r"gradients for op SUM and AVG, got (MAX|MIN|PRODUCT)"):
            result.sum().backward()
    assert tensor.grad is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # of torch's own forward mode
def test_tangents_are_refused() -> None:
    name, group = operators.unique_name("tangents"), Group()
    operators.register(name, group)
    with forward_ad.dual_level():
        tensor = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(NotImplementedError, match="input must not be differentiated in forward mode"):
            torch.ops.asynccomm.all_reduce(tensor, name)
        assert torch.ops.asynccomm.all_reduce(torch.ones(2), name).tolist() == [2, 2]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the check itself reads
def test_torch_finds_the_operators_right() -> None:
    name, group = operators.unique_name("checked"), Group()
    operators.register(name, group)
    for operator, arguments in (
        (torch.ops.asynccomm.all_reduce, (name,)),
        (torch.ops.asynccomm.all_gather, (1, 2, name)),
        (torch.ops.asynccomm.reduce_scatter, (0, 2, name)),
        (torch.ops.asynccomm.all_to_all, (name,)),
        (torch.ops.asynccomm.all_to_all_v, ([1, 2], [3, 1], name)),
        (torch.ops.asynccomm.broadcast, (0, name)),
        (torch.ops.asynccomm.reduce, (0, 2, name)),
    ):
        for needs_gradient in (False, True):
            tensor = torch.ones(4, 2, requires_grad=needs_gradient)
            torch.library.opcheck(operator.default, (tensor, *arguments))


async def test_an_operator_does_not_block_a_loop() -> None:
    with pytest.raises(WouldBlockError, match="run the model in another thread"):
        torch.ops.asynccomm.all_reduce(torch.ones(1), "any")
