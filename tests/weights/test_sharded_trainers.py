"""Trainers under ``fully_shard`` push to servers with tensor parallelism, and to servers of whole models."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from asynccomm import Comm
from asynccomm.weights import Publisher, Server
from tests.interop.world import world

VERSIONS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def advance(parameters: list[torch.Tensor]) -> None:
    """A step that gives the same values on a sharded model and on a whole one."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.5).add_(1)


def expected(version: int) -> dict[str, torch.Tensor]:
    whole = model()
    for _ in range(version):
        advance(list(whole.parameters()))
    return dict(whole.state_dict())


async def train(comm: Comm, mesh: DeviceMesh) -> None:
    sharded = model()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    async with comm.split([0, 1], "trainers") as trainers:
        assert trainers is not None
        async with Publisher(trainers, sharded, servers=2, backend=comm.backend, bucket_mb=1e-4) as publisher:
            for version in range(1, VERSIONS + 1):
                advance(list(sharded.parameters()))
                result = await publisher.push()
                assert sorted(result.servers) == ["2", "3"]
                assert result.version == version


async def serve(comm: Comm, mesh: DeviceMesh) -> None:
    """Rank 2 has a whole model in bfloat16, rank 3 columns and rows of DTensors."""
    whole = model().bfloat16()
    tensors = {name: tensor.float() for name, tensor in whole.state_dict().items()}
    parallel = {
        name: distribute_tensor(tensor, mesh, [Shard(tensor.ndim - 1)]) if name.startswith("0") else tensor
        for name, tensor in tensors.items()
    }
    server = Server(whole if comm.rank == 2 else parallel, store=comm, label=str(comm.rank))
    async with server.updates() as updates:
        async for update in updates:
            update.apply()
            values = expected(update.version)
            for name, tensor in whole.state_dict().items() if comm.rank == 2 else ():
                assert torch.equal(tensor, values[name].bfloat16()), name
            for name, part in parallel.items() if comm.rank == 3 else ():
                if name.startswith("0"):
                    assert torch.equal(part.to_local(), values[name].chunk(2, -1)[1]), name
                else:
                    assert torch.equal(part, values[name]), name
    assert server.version == VERSIONS


@pytest.mark.ranks(4, backend=["shm", "gloo"], timeout=100)
async def test_fully_sharded_trainers_and_tensor_parallel_servers(comm: Comm) -> None:
    with world("gloo", f"weights {comm.backend}") as group:
        meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
        if comm.rank < 2:
            await train(comm, meshes[0])
        else:
            await serve(comm, meshes[1])
        dist.barrier()
    del group
