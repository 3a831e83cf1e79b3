"""DeviceMesh over comms: what it accepts, what it does to torch, and that torch's collectives run on it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from asynccomm import Comm, new_comm, wrap
from asynccomm.blocking.loop_thread import detached
from asynccomm.compat.c10d.fake import fake_comm
from asynccomm.interop.mesh import init_device_mesh
from asynccomm.interop.torch_version import PYTHON_BACKENDS
from asynccomm.testing import loopback_world
from tests.interop.world import world
from tests.sampling import some


@contextlib.contextmanager
def groups_end() -> Iterator[None]:
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.asynccontextmanager
async def two_by_two(comm: Comm) -> AsyncIterator[tuple[Comm, Comm]]:
    """The comms of a mesh of 2 x 2 ranks, by dimension."""
    row, column = divmod(comm.rank, 2)
    columns, rows = comm.split([column, column + 2], "down"), comm.split([2 * row, 2 * row + 1], "along")
    async with columns as down, rows as along:
        assert down is not None
        assert along is not None
        yield down, along


def check_tensors(mesh: DeviceMesh) -> None:
    whole = torch.arange(16.0).view(4, 4)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    row, column = divmod(dist.get_rank(), 2)
    assert torch.equal(tensor.to_local(), whole[2 * row : 2 * row + 2, 2 * column : 2 * column + 2])
    assert torch.equal(tensor.full_tensor(), whole)
    turned = tensor.redistribute(mesh, [Replicate(), Shard(0)]).redistribute(mesh, [Shard(1), Replicate()])
    assert torch.equal(turned.to_local(), whole[:, 2 * row : 2 * row + 2])
    assert torch.equal((tensor @ turned).full_tensor(), whole @ whole)  # partial sums, reduced
    assert torch.equal((tensor + 1).sum().full_tensor(), whole.sum() + 16)


def check_functional(mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    row, column = divmod(rank, 2)
    mine = torch.tensor([float(rank)])
    assert functional.all_reduce(mine, "sum", (mesh, 0)).tolist() == [2 * column + 2]
    assert functional.all_gather_tensor(mine, 0, (mesh, 1)).tolist() == [2 * row, 2 * row + 1]
    assert functional.reduce_scatter_tensor(mine.repeat(2), "sum", 0, (mesh, 1)).tolist() == [4 * row + 1]
    swapped = functional.all_to_all_single(10 * mine + torch.arange(2.0), None, None, (mesh, 0))
    assert swapped.tolist() == [10 * column + row, 10 * column + 20 + row]
    assert functional.broadcast(mine, 0, mesh["along"].get_group()).tolist() == [2 * row]


def check_training(mesh: DeviceMesh) -> None:
    """Shards along the rows, replicas down the columns: as all the data on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    alone = copy.deepcopy(model)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    for step in range(2):
        data = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(step))
        model(data[dist.get_rank()]).square().mean().backward()
        torch.stack([alone(data[rank]).square().mean() for rank in range(4)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for part, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(part.full_tensor(), expected)  # type: ignore[attr-defined]


def check_all(mesh: DeviceMesh) -> None:
    check_tensors(mesh)
    check_functional(mesh)
    check_training(mesh)


@pytest.mark.ranks(4, backend=some(["shm", "gloo"], 1))
@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_torch_runs_on_it(comm: Comm) -> None:
    async with two_by_two(comm) as (down, along):
        with groups_end():
            mesh = init_device_mesh((down, along), ("down", "along"), _global_comm=comm)
            assert mesh.get_coordinate() == divmod(comm.rank, 2)
            assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
            assert (mesh.get_rank(), mesh.get_local_rank("along")) == (comm.rank, comm.rank % 2)
            assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (comm.rank, 4, "asynccomm")
            assert mesh["down"].get_group().group_name == "down"
            assert dist.get_process_group_ranks(mesh.get_group("down")) == [comm.rank % 2, comm.rank % 2 + 2]
            before = along.statistics()
            # while the loop turns; DTensor crashes in a second thread of a process, on any group of torch 2.11 alike
            await asyncio.to_thread(check_all if PYTHON_BACKENDS else check_functional, mesh)
            assert along.statistics() != before
            with detached():
                check_all(mesh)  # and while it does not
            assert mesh._flatten("all").get_group() is dist.group.WORLD
            gathered: list[Any] = [None] * 4
            with detached():
                dist.all_gather_object(gathered, comm.rank)
            assert gathered == [0, 1, 2, 3]
            with pytest.raises(Exception, match="group 'test' was made over comms and has no store"), detached():
                dist.new_group([comm.rank], use_local_synchronization=True)
        # the comms are as they were
        for each in (comm, down, along):
            assert (await each.all_gather_single(None, torch.tensor([comm.rank]))).numel() == each.size


@pytest.mark.ranks(4)
async def test_ranks_that_do_not_fit(comm: Comm) -> None:
    async with two_by_two(comm) as (down, along):
        with groups_end():
            with pytest.raises(ValueError, match=r"2 \('along'\) x 2 \('down'\)"):  # on all ranks
                init_device_mesh((along, down), ("along", "down"), comm)
            with pytest.raises(RuntimeError, match=r"2 \('down'\) x 2 \('along'\) needs .*: pass _global_comm"):
                init_device_mesh((down, along), ("down", "along"))
            with pytest.raises(ValueError, match="has 2 ranks, _global_comm has 4"):
                init_device_mesh((along,), ("along",), comm)
            async with comm.split([3, 2, 1, 0], "turned") as turned:
                assert turned is not None
                with pytest.raises(ValueError, match=f"this is rank {comm.rank} by .* but rank {3 - comm.rank} of"):
                    init_device_mesh((down, along), ("down", "along"), turned)
            async with comm.split([0, 2, 1, 3], "swapped") as swapped:
                assert swapped is not None
                with pytest.raises(ValueError, match=r"this is rank|other processes"):
                    init_device_mesh((down, along), ("down", "along"), swapped)
            assert not dist.is_initialized()
            init_device_mesh((along,), ("along",))  # one dimension: that is all ranks
            with pytest.raises(ValueError, match="of 2 in the default group: destroy_process_group"):
                init_device_mesh((down, along), ("down", "along"), comm)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_one_dimension(comm: Comm) -> None:
    with groups_end():
        mesh = init_device_mesh([comm], ["main"])
        group = mesh.get_group()
        assert group is dist.group.WORLD
        assert group.group_name == "main"
        tensor = torch.ones(1)
        (output,) = await wrap(dist.all_reduce(tensor, async_op=True))
        assert output is tensor
        assert tensor.item() == 2
        whole = torch.arange(3.0)
        with detached():
            assert torch.equal(distribute_tensor(whole, mesh, [Shard(0)]).full_tensor(), whole)
        # once more over the same comm: the same group; another name: another one
        assert init_device_mesh([comm], ["main"]).get_group() is group
        other = init_device_mesh([comm], ["other"])
        assert other.get_group() is not group
        assert dist.group.WORLD is group
        # another comm, whose mesh has a name that is taken
        async with comm.dup() as twin:
            second = init_device_mesh([twin], ["main"], comm)
            old = second.get_group()
            assert old.group_name == f"main/{twin.name}"
            with detached():
                assert torch.equal(distribute_tensor(whole, second, [Shard(0)]).full_tensor(), whole)
        # a group whose comm is closed gives its name away
        async with comm.dup() as third:
            again = init_device_mesh([third], ["main"])
            assert again.get_group().group_name == f"main/{third.name}"
            assert again.get_group() is not old


@pytest.mark.ranks(2)
async def test_the_default_group() -> None:
    with world("gloo") as group:  # one that is there stays
        async with new_comm(name="one") as comm:
            init_device_mesh([comm], ["dim"])
            assert dist.group.WORLD is group
            with detached():
                dist.barrier()
    with groups_end():
        async with new_comm(name="two") as comm:  # one of a mesh, which is over, does not
            first = init_device_mesh([comm], ["dim"]).get_group()
            assert dist.group.WORLD is first
        async with new_comm(name="three") as comm:
            second = init_device_mesh([comm], ["dim"]).get_group()
            assert second is not first
            assert dist.group.WORLD is second
            assert second.group_name == "dim"
    assert not dist.is_initialized()


async def test_comms_of_several_types_of_device() -> None:
    limit = timedelta(seconds=1)
    gpu = await fake_comm("gpu", 0, 1, torch.device("cuda", 0), limit)  # on none, and nothing is sent
    async with gpu, loopback_world(1) as (comm,):
        with pytest.raises(ValueError, match=r"must be on one type of device, got \['cpu', 'cuda:0'\]"):
            init_device_mesh([comm, gpu], ["a", "b"])
        with pytest.raises(ValueError, match="_global_comm is on cuda:0, mesh_dim_comms are on cpu"):
            init_device_mesh([comm], ["a"], gpu)
    assert not dist.is_initialized()


@pytest.mark.ranks(4)
async def test_comms_of_other_processes(comm: Comm) -> None:
    """Sizes and ranks fit, but it is not the column that this rank is in."""
    row, column = divmod(comm.rank, 2)
    crossing = comm.split([0, 3] if row == column else [1, 2], "crossed")
    async with two_by_two(comm) as (down, along), crossing as crossed:
        assert crossed is not None
        assert crossed.rank == row
        with pytest.raises(ValueError, match=r"dimension 'down' of a mesh of .* but comm '.*crossed' is of other"):
            init_device_mesh((crossed, along), ("down", "along"), comm)
        with pytest.raises(ValueError, match="_global_comm has 2"):
            init_device_mesh((down, along), ("down", "along"), down)
    assert not dist.is_initialized()


async def test_arguments() -> None:
    async with loopback_world(1) as (comm,), loopback_world(1) as (other,):
        with groups_end():
            for comms, names, kind, message in [
                (comm, ["a"], TypeError, "mesh_dim_comms must be comms"),
                ([], [], TypeError, "mesh_dim_comms must be comms"),
                ([3], ["a"], TypeError, "mesh_dim_comms must be comms"),
                (3, ["a"], TypeError, "mesh_dim_comms must be comms"),
                (iter([comm]), ["a"], TypeError, "mesh_dim_comms must be comms"),
                ({comm, other}, ["a", "b"], TypeError, "mesh_dim_comms must be comms"),  # in no order
                ([comm], "a", TypeError, "mesh_dim_names must be strs"),
                ([comm], [1], TypeError, "mesh_dim_names must be strs"),
                ([comm], None, TypeError, "mesh_dim_names must be strs"),
                ([comm, other], {"a", "b"}, TypeError, "mesh_dim_names must be strs"),
                ([comm], ["a", "b"], ValueError, "must be as many as the comms, got 2 for 1"),
                ([comm, other], ["a", "a"], ValueError, "must differ"),
                ([comm], [""], ValueError, "must differ, and not be empty"),
            ]:
                with pytest.raises(kind, match=message):
                    init_device_mesh(comms, names)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="_global_comm must be a Comm, got 3"):
                init_device_mesh([comm], ["a"], 3)  # type: ignore[arg-type]
            assert not dist.is_initialized()
            mesh = init_device_mesh((comm, other), ("a", "b"), comm)
            assert mesh.shape == (1, 1)
            assert dist.get_world_size() == 1
    async with loopback_world(1) as (comm,):
        await comm.aclose()
        with pytest.raises(Exception, match="closed"):
            init_device_mesh([comm], ["a"])
    assert not dist.is_initialized()
