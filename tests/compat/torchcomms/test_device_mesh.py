"""DeviceMesh over TorchComms, with torch's users of meshes on it."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from asynccomm import Comm
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import device_mesh

CPU = torch.device("cpu")


def train(backend: str) -> None:
    world = torchcomms.new_comm(backend, CPU, "world")
    row, column = divmod(world.get_rank(), 2)
    dp = world.split([column, column + 2], "dp")
    tp = world.split([2 * row, 2 * row + 1], "tp")
    with pytest.raises(RuntimeError, match="_global_comm"):
        device_mesh.init_device_mesh((dp, tp), ("dp", "tp"))
    mesh = device_mesh.init_device_mesh(mesh_dim_comms=(dp, tp), mesh_dim_names=("dp", "tp"), _global_comm=world)
    try:
        assert mesh.shape == (2, 2)
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh.get_group("tp"))
        assert total.item() == 2
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        sharded = fully_shard(copy.deepcopy(model), mesh=mesh["dp"])
        replica = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        for trained in (replica, sharded):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            trained(torch.full((1, 4), float(row))).sum().backward()
            optimizer.step()
        assert model.weight.grad is not None
        assert model.weight.grad.eq(0.5).all()  # the average of the rows
        assert sharded.weight.to_local().shape == (2, 4)
        assert sharded.weight.full_tensor().allclose(model.weight)
    finally:
        dist.destroy_process_group()
    for comm in (tp, dp, world):
        comm.finalize()


@pytest.mark.ranks(4, backend=["shm", "gloo"])
async def test_training_over_a_mesh(comm: Comm) -> None:
    await asyncio.to_thread(train, comm.backend)


def test_dimensions_are_torchcomms() -> None:
    with pytest.raises(TypeError, match="TorchComms"):
        device_mesh.init_device_mesh((None,), ("dp",))  # type: ignore[arg-type]
