"""Checks of tensors in memory that other ranks can read: the results are those of any other tensors."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import expect_equal, sample

SIZES = (1, 1000, 20000, 300000)  # elements: beside and through slots, and read directly, with and without a reduction


def _shared(comm: Comm, values: Tensor, turn: int) -> Tensor:
    """``values`` in shared memory, in some turns on some ranks only."""
    if turn == 1 and comm.rank % 2:
        return values.clone()
    return comm.empty(values.shape, dtype=values.dtype).copy_(values)


async def shared_tensors_give_the_same_results(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for turn, n in ((turn, n) for turn in range(2) for n in SIZES):
        mine = [sample(each, (n,), salt=turn) for each in range(size)]
        plain, shared = mine[rank].clone(), _shared(comm, mine[rank], turn)
        await asyncio.gather(comm.all_reduce(plain), comm.all_reduce(shared))
        assert torch.equal(plain.view(torch.int32), shared.view(torch.int32)), f"all_reduce of {n}: other bits"
        shared.copy_(mine[rank])
        expect_equal(await comm.all_reduce(shared, ReduceOp.MAX), torch.stack(mine).amax(0), f"MAX of {n}")
        shared.copy_(mine[rank])
        gathered = _shared(comm, torch.zeros(size * n), turn)
        expect_equal(await comm.all_gather_single(gathered, shared), torch.cat(mine), f"all_gather of {n}")
        expect_equal(shared, mine[rank], "the input")
        expect_equal(await comm.broadcast(shared, size - 1), mine[-1], f"broadcast of {n}")
        rows = torch.cat([sample(rank, (n,), salt=reader) for reader in range(size)])
        part, source = torch.zeros(n), _shared(comm, rows, turn)
        await comm.reduce_scatter_single(part, source)
        whole = torch.zeros(n)
        await comm.reduce_scatter_single(whole, rows)
        assert torch.equal(part, whole), f"reduce_scatter of {n}: other values"
        wanted = torch.cat([sample(giver, (n,), salt=rank) for giver in range(size)])
        for target in (_shared(comm, torch.zeros(size * n), turn), source):  # elsewhere, and in place
            expect_equal(await comm.all_to_all_single(target, source), wanted, f"all_to_all of {n}")


async def shared_tensors_change_between_operations(comm: Comm) -> None:
    """An operation ends when the other ranks have read the tensor, so that it may be changed at once."""
    tensor, out = comm.empty(40000), torch.zeros(40000)
    for turn in range(30):
        tensor.fill_(comm.rank + turn)
        root = turn % comm.size
        if comm.rank == root:
            await comm.broadcast(tensor, root)
            tensor.fill_(-1)
        else:
            expect_equal(await comm.broadcast(out, root), torch.full_like(out, root + turn), f"turn {turn}")


async def modules_are_made_in_shared_memory(comm: Comm) -> None:
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    torch.manual_seed(3)
    with comm.memory():
        shared = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    for (name, one), other in zip(shared.state_dict().items(), plain.state_dict().values(), strict=True):
        expect_equal(one, other.to(one.device), name)
    if comm.device.type != "cpu":
        return
    shared(torch.ones(2, 300)).sum().backward()
    for parameter in shared.parameters():
        assert parameter.grad is not None
        await comm.all_reduce(parameter.grad)
        await comm.broadcast(parameter.detach(), 0)


async def registered_tensors_give_the_same_results(comm: Comm) -> None:
    """A backend that registers no tensors must refuse, and name the memory to be used instead."""
    tensor = sample(comm.rank, (3000,))
    try:
        await comm.register(tensor)
    except NotImplementedError as exc:
        assert f"{comm.backend!r} registers no tensors: comm.empty()" in str(exc), exc
        return
    expect_equal(
        await comm.all_reduce(tensor, ReduceOp.MAX),
        torch.stack([sample(each, (3000,)) for each in range(comm.size)]).amax(0),
        "MAX of registered tensors",
    )
    await comm.deregister(tensor)
    await comm.broadcast(tensor, 0)
    try:
        await comm.deregister(tensor)
    except ValueError as exc:
        assert "tensor must be registered" in str(exc), exc
    else:
        raise AssertionError("a tensor was deregistered twice")
