"""Collectives that combine tensors."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import _make_nccl_premul_sum

import asynccomm
import asynccomm.compat.c10d as dist
from tests.compat.c10d.worlds import alone, run_ranks

ARGUMENTS = {
    "all_reduce": "tensor op group async_op",
    "all_reduce_coalesced": "tensors op group async_op",
    "reduce": "tensor dst op group async_op group_dst",
    "reduce_scatter": "output input_list op group async_op",
    "reduce_scatter_tensor": "output input op group async_op",
    "_reduce_scatter_base": "output input op group async_op",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(dist, name)).parameters
    assert list(parameters) == ARGUMENTS[name].split()
    assert parameters["op"].default == dist.ReduceOp.SUM
    assert parameters["async_op"].default is False


async def test_all_reduce() -> None:
    async def body(rank: int) -> list[float]:
        tensor = torch.rand(100, generator=torch.Generator().manual_seed(rank))
        assert await dist.all_reduce(tensor) is tensor
        return tensor.tolist()

    first, *others = await run_ranks(3, body)
    assert all(other == first for other in others)  # to the bit


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, 6),
        (dist.ReduceOp.AVG, 3),
        (dist.ReduceOp.PRODUCT, 8),
        (dist.ReduceOp.MIN, 2),
        (dist.ReduceOp.MAX, 4),
        (dist.ReduceOp.BAND, 0),
        (dist.ReduceOp.BOR, 6),
        (dist.ReduceOp.BXOR, 6),
        pytest.param(dist.ReduceOp(dist.ReduceOp.MAX), 4, id="made of MAX"),
        (asynccomm.ReduceOp.PREMUL_SUM(2), 12),
        pytest.param(_make_nccl_premul_sum(torch.tensor([3])), 18, id="PREMUL_SUM of torch"),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
async def test_reductions(op: Any, expected: int) -> None:
    async def body(rank: int) -> None:
        tensor = torch.tensor([2 * rank + 2])
        work = dist.all_reduce(tensor, op, async_op=True)
        assert isinstance(work, dist.Work)
        await work
        assert tensor.item() == expected

    await run_ranks(2, body)


@pytest.mark.parametrize("name", ["PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
async def test_complex_tensors_have_no_order(name: str) -> None:
    op = getattr(dist.ReduceOp, name)
    one = torch.ones(1, dtype=torch.complex64)
    async with alone():
        calls: list[Any] = [
            lambda: dist.all_reduce(one, op),
            lambda: dist.reduce(one, 0, op),
            lambda: dist.reduce_scatter(one, [one], op),
            lambda: dist.reduce_scatter_tensor(one, one.clone(), op),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="complex"):
                call()
        with pytest.warns(FutureWarning), pytest.raises(ValueError, match="complex"):
            dist.all_reduce_coalesced([one], op)


async def test_complex_sums() -> None:
    async def body(rank: int) -> None:
        value = torch.tensor([1 + 2j, 3j]) * (rank + 1)
        for call in (dist.all_reduce, lambda tensor: dist.reduce(tensor, 0)):
            tensor = value.clone()
            await call(tensor)
            if rank == 0:
                assert torch.equal(tensor, torch.tensor([3 + 6j, 9j]))
        out = torch.empty(1, dtype=torch.complex64)
        await dist.reduce_scatter_tensor(out, value.clone())
        assert out.item() == (3 + 6j, 9j)[rank]
        await dist.reduce_scatter(out, list(value.clone().split(1)))
        assert out.item() == (3 + 6j, 9j)[rank]

    await run_ranks(2, body)


@pytest.mark.parametrize("paired", [0, 1], ids=["the first is complex", "the second is complex"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
async def test_complex_on_one_rank_and_its_parts_on_another(dtype: torch.dtype, paired: int) -> None:
    async def body(rank: int) -> None:
        value, expected = torch.tensor([1 + 2j, 3j], dtype=dtype), torch.tensor([3 + 6j, 9j], dtype=dtype)

        def form(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if rank == paired else torch.view_as_real(tensor).clone()

        mine = form(value * (rank + 1))
        for op, factor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 2)):
            tensor = mine.clone()
            assert await dist.all_reduce(tensor, op) is tensor
            assert torch.equal(tensor, form(expected / factor))
        tensor = mine.clone()
        async with dist._coalescing_manager():
            dist.all_reduce(tensor)
        assert torch.equal(tensor, form(expected))
        several = [mine.clone(), form(value[:1])]
        with pytest.warns(FutureWarning):
            assert await dist.all_reduce_coalesced(several) is several
        assert torch.equal(several[0], form(expected))
        assert torch.equal(several[1], form(value[:1] * 2))

    await run_ranks(2, body)


async def test_complex_tensors_as_they_are() -> None:
    """Those that do not go in parts, for the others may not either; and those of torch that never do."""

    async def body(rank: int) -> None:
        value = torch.tensor([1 + 2j, 3j])
        tensor = value.clone().conj()
        assert tensor.is_conj()
        assert await dist.all_reduce(tensor) is tensor
        assert torch.equal(tensor, (2 * value).conj())
        both = [value.clone().conj(), value.clone()]
        with pytest.warns(FutureWarning):
            await dist.all_reduce_coalesced(both)
        assert torch.equal(both[0], (2 * value).conj())
        assert torch.equal(both[1], 2 * value)
        tensor = value.clone()
        await dist.all_reduce(tensor, asynccomm.ReduceOp.PREMUL_SUM([2, 1j][rank]))
        assert torch.equal(tensor, value * (2 + 1j))
        pg = await dist.new_group([0, 1])
        with pytest.raises(asynccomm.CollectiveMismatchError, match="complex64"):
            await dist.reduce(value.clone() if rank else torch.view_as_real(value).clone(), 0, group=pg)
        await dist.barrier()

    await run_ranks(2, body)


async def test_reduce_leaves_others_alone() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2])
        if rank == 0:
            return
        for where in ({"dst": 2}, {"group_dst": 1}):
            tensor = torch.tensor([float(rank)])
            await dist.reduce(tensor, group=pg, **where)
            assert tensor.item() == (3 if rank == 2 else 1)
        with pytest.raises(ValueError, match="dst or group_dst must be given"):
            dist.reduce(torch.ones(1), group=pg)

    await run_ranks(3, body)


async def test_reduce_scatter_of_lists_also_uneven() -> None:
    async def body(rank: int) -> None:
        output = torch.empty(rank + 1)
        inputs = [torch.ones(1), torch.full((2,), 2.0)]
        work = dist.reduce_scatter(output, inputs, async_op=True)
        await work
        assert output.tolist() == [[2.0], [4.0, 4.0]][rank]

    await run_ranks(2, body)


async def test_reduce_scatter_tensor_concatenated_or_stacked() -> None:
    async def body(rank: int) -> None:
        for shape in ((4,), (2, 2)):
            output = torch.empty(2)
            await dist.reduce_scatter_tensor(output, torch.arange(4.0).reshape(shape))
            assert output.tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]
        with pytest.warns(FutureWarning, match="use reduce_scatter_tensor"):
            await dist._reduce_scatter_base(output, torch.ones(4))
        assert output.tolist() == [2.0, 2.0]

    await run_ranks(2, body)


async def test_all_reduce_coalesced() -> None:
    async def body(rank: int) -> None:
        tensors = [torch.ones(1), torch.ones(2)]
        with pytest.warns(FutureWarning, match="all_reduce_coalesced is deprecated") as seen:
            await dist.all_reduce_coalesced(tensors)
        assert seen[0].filename == __file__
        assert tensors[1].tolist() == [2.0, 2.0]
        single = torch.ones(1)
        with pytest.warns(FutureWarning):
            future = dist.all_reduce_coalesced(single, dist.ReduceOp.MAX, async_op=True)
        assert not isinstance(future, dist.Work)
        await future
        with pytest.warns(FutureWarning), pytest.raises(ValueError, match="one dtype"):
            dist.all_reduce_coalesced([torch.ones(1), torch.ones(1, dtype=torch.int8)])

    await run_ranks(2, body)


async def test_a_group_of_one_still_applies_factors() -> None:
    async with alone():
        tensor = torch.tensor([3.0])
        await dist.all_reduce(tensor, asynccomm.ReduceOp.PREMUL_SUM(2.0))
        await dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.item() == 6
        output = torch.empty(1)
        await dist.reduce_scatter_tensor(output, tensor)
        assert output.item() == 6


async def test_what_is_no_reduction() -> None:
    async with alone():
        with pytest.raises(TypeError, match="op must be one of"):
            dist.all_reduce(torch.ones(1), "SUM")


class Mine(torch.Tensor):
    """Takes over the functions that let tensors do so."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func.__name__, args, kwargs


async def test_tensors_may_take_over() -> None:
    mine = torch.ones(1).as_subclass(Mine)
    one = torch.ones(1)
    none = {"group": None, "async_op": False}
    assert dist.all_reduce(mine, dist.ReduceOp.MAX) == ("all_reduce", (mine,), {"op": dist.ReduceOp.MAX, **none})
    expected = ("reduce_scatter_tensor", (one, mine), {"op": dist.ReduceOp.SUM, **none})
    assert dist.reduce_scatter_tensor(one, mine) == expected
    for call in (lambda: dist.reduce(mine, 0), lambda: dist.broadcast(mine, 0)):
        with dist.use_world(dist.World()), pytest.raises(ValueError, match="await init_process_group"):
            call()
