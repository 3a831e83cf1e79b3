"""torch.distributed on the backend "asynccomm", on real GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.opening import choose_gpu, needs_gpu
from tests.interop.world import world

pytestmark = needs_gpu


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def data(step: int, rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, batches: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(steps: int, device: torch.device) -> list[Tensor]:
    """The parameters after training on the batches of all ranks in one process."""
    model = net().to(device)
    train(
        model,
        [torch.cat([data(step, rank) for rank in range(dist.get_world_size())]).to(device) for step in range(steps)],
    )
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.ranks(2)
async def test_blocking_and_asynchronous_collectives() -> None:
    device = choose_gpu()
    with world():
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.full((1 << 20,), rank + 1.0, device=device)
        dist.all_reduce(tensor)
        assert tensor.eq(3).all()
        gathered = torch.zeros(2 * size, device=device)
        work = dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device=device), async_op=True)
        assert work is not None
        work.wait()  # in the stream
        assert gathered.tolist() == [0, 0, 1, 1]
        mixed = torch.ones(3)  # on the host, in the same group
        dist.all_reduce(mixed)
        assert mixed.tolist() == [2, 2, 2]
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        other = 1 - rank
        received = torch.zeros(5, device=device)
        ops = [
            dist.P2POp(dist.isend, torch.full((5,), float(rank), device=device), other),
            dist.P2POp(dist.irecv, received, other),
        ]
        for each in dist.batch_isend_irecv(ops):
            each.wait()
        assert received.eq(other).all()
        dist.barrier()


@pytest.mark.ranks(2)
async def test_functional_collectives() -> None:
    device = choose_gpu()
    with world() as group:
        found = functional.all_reduce(torch.ones(2, device=device), "sum", group)
        assert functional.wait_tensor(found).tolist() == [2, 2]
        several = functional.all_reduce_coalesced([torch.ones(n, device=device) for n in (1, 2)], "sum", group)
        assert [functional.wait_tensor(one).tolist() for one in several] == [[2], [2, 2]]


@pytest.mark.ranks(2)
async def test_ddp() -> None:
    device = choose_gpu()
    with world():
        model = DistributedDataParallel(net().to(device), device_ids=[device.index], bucket_cap_mb=0.01)
        train(model, [data(step, dist.get_rank()).to(device) for step in range(5)])
        for one, other in zip(model.parameters(), alone(5, device), strict=True):
            torch.testing.assert_close(one.detach(), other)


@pytest.mark.ranks(2)
async def test_fsdp() -> None:
    device = choose_gpu()
    with world():
        mesh = init_device_mesh("cuda", (2,))
        model = net().to(device)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, [data(step, dist.get_rank()).to(device) for step in range(5)])
        for parameter, other in zip(model.parameters(), alone(5, device), strict=True):
            assert isinstance(parameter, DTensor)
            torch.testing.assert_close(parameter.full_tensor().detach(), other)


@pytest.mark.ranks(2)
async def test_dtensors_are_redistributed() -> None:
    choose_gpu()
    with world():
        mesh = init_device_mesh("cuda", (2,))
        whole = torch.arange(24.0, device="cuda").view(4, 6)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        columns = rows.redistribute(placements=[Shard(1)])
        assert torch.equal(columns.to_local(), whole.chunk(2, 1)[dist.get_rank()])
        assert torch.equal(columns.redistribute(placements=[Replicate()]).to_local(), whole)
