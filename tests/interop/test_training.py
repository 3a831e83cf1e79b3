"""What torch builds on a backend, run for real and compared to gloo: training, redistributions, checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.interop.world import world
from tests.sampling import some

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.11 uses what it deprecates
    from torch.distributed.optim import ZeroRedundancyOptimizer

Trained = list[Tensor]


def both(train: Callable[[], Trained]) -> None:
    """``train`` on gloo and on ours, to equal results."""
    with world("gloo") as group:  # held: gloo ends the process when the last who lets go of it is a thread of its own
        torch.manual_seed(0)
        expected = train()
    with world():
        torch.manual_seed(0)
        found = train()
    del group
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Net(nn.Module):
    """With a branch that not every input takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.branch = nn.Linear(64, 64)

    def forward(self, x: Tensor, branch: bool = False) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.branch(x) if branch else self.second(x))
        return self.third(x)


def data(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 8, generator=generator)


def parameters_of(model: nn.Module) -> Trained:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("views", [False, True])
async def test_ddp(unused: bool, views: bool) -> None:
    """Several buckets, parameters that get no gradient, steps without synchronisation."""

    def train() -> Trained:
        model = DistributedDataParallel(
            Net() if unused else nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4)),
            bucket_cap_mb=0.01,
            find_unused_parameters=unused,
            gradient_as_bucket_view=views,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                model(data(2 * step), *([step % 2 == 0] if unused else [])).square().sum().backward()
            model(data(2 * step + 1), *([step % 2 == 1] if unused else [])).square().sum().backward()
            optimizer.step()
        return parameters_of(model)

    both(train)


def hooked(hook: str, bucket: float) -> Trained:
    layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    model = DistributedDataParallel(layers, bucket_cap_mb=bucket)  # type: ignore[arg-type]
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        model(data(step)).square().sum().backward()
        optimizer.step()
    return parameters_of(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("hook", "bucket"), [("fp16", 0.01), ("power", 25)])
async def test_ddp_with_hooks_on_the_gradients(hook: str, bucket: float) -> None:
    """PowerSGD's callbacks wait for other operations; on a CPU this takes one bucket, or these come in any order."""
    both(lambda: hooked(hook, bucket))


@pytest.mark.ranks(2)
async def test_ddp_with_builtin_hooks() -> None:
    def train() -> Trained:
        model = DistributedDataParallel(nn.Linear(8, 4))
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        model(data(0)).square().sum().backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    both(train)
    with world(label="fp16"):  # as the README says
        model = DistributedDataParallel(nn.Linear(8, 4))
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        with pytest.raises(RuntimeError, match="allreduce should return TensorList"):
            model(data(0)).sum().backward()


@pytest.mark.ranks(2)
async def test_ddp_with_sparse_gradients() -> None:
    def train() -> Trained:
        with torch.sparse.check_sparse_tensor_invariants(False):
            model = DistributedDataParallel(nn.EmbeddingBag(20, 4, mode="sum", sparse=True))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                words = torch.arange(6) + 3 * dist.get_rank() + step
                model(words, torch.tensor([0, 3])).square().sum().backward()
                optimizer.step()
        return parameters_of(model)

    both(train)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("initial", [False, True])
async def test_ddp_with_uneven_inputs(initial: bool) -> None:
    """The ranks that are through shadow the others' collectives."""

    def train() -> Trained:
        model = DistributedDataParallel(nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=initial):
            for step in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                model(data(step)).square().mean().backward()
                optimizer.step()
        return parameters_of(model)

    both(train)


@pytest.mark.ranks(2)
async def test_zero_redundancy_optimizer() -> None:
    def train() -> Trained:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4)))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            model(data(step)).square().sum().backward()
            optimizer.step()
        optimizer.consolidate_state_dict(0)
        return parameters_of(model)

    both(train)


@pytest.mark.ranks(some([2, 4], 1))
async def test_fully_shard() -> None:
    def train() -> Trained:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 4))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(data(step)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return [parameter.full_tensor().detach() for parameter in model.parameters() if isinstance(parameter, DTensor)]

    both(train)


@pytest.mark.ranks(4)
async def test_hybrid_sharding_and_tensor_parallelism() -> None:
    """Meshes of two dimensions, whose groups live side by side."""

    def train() -> Trained:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(data(step)).square().mean().backward()
            optimizer.step()
        return [parameter.full_tensor().detach() for parameter in model.parameters() if isinstance(parameter, DTensor)]

    both(train)


@pytest.mark.ranks(some([4, 2], 1))
async def test_dtensors_are_redistributed() -> None:
    def run() -> Trained:
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        full = torch.arange(6.0 * size * size).reshape(2 * size, 3 * size)
        uneven = torch.arange(15.0).reshape(5, 3)
        found = []
        for source in (full, uneven):
            tensor = distribute_tensor(source, mesh, [Shard(0)])
            for placement in (Replicate(), Shard(1), Shard(0), Replicate(), Shard(0)):
                tensor = tensor.redistribute(mesh, [placement])
                found += [tensor.to_local().clone(), tensor.full_tensor()]
        partial = DTensor.from_local(torch.ones(2 * size, 3) * dist.get_rank(), mesh, [Partial()])
        found += [partial.redistribute(mesh, [place]).to_local() for place in (Replicate(), Shard(0), Shard(1))]
        left, right = distribute_tensor(full, mesh, [Shard(1)]), distribute_tensor(full.t(), mesh, [Shard(0)])
        return [*found, (left @ right).full_tensor()]

    both(run)


@pytest.mark.ranks(2)
async def test_checkpoints_are_saved_and_loaded(tmp_path: Path) -> None:
    def train() -> Trained:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weight = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)])
        state: dict[str, Any] = {"weight": weight, "plain": torch.ones(3) * 7, "step": 5}
        folder = tmp_path / dist.get_backend()
        checkpoint.save(state, checkpoint_id=folder)
        other: dict[str, Any] = {
            "weight": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)]),
            "plain": torch.zeros(3),
            "step": 0,
        }
        checkpoint.load(other, checkpoint_id=folder)
        assert other["step"] == 5
        saved = checkpoint.async_save({"plain": torch.ones(2)}, checkpoint_id=folder / "async")
        saved.result()
        return [other["weight"].full_tensor(), other["plain"]]

    both(train)


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
async def test_pipelines(schedule: Any) -> None:
    def train() -> Trained:
        rank, size = dist.get_rank(), dist.get_world_size()
        layer = nn.Linear(8, 8)
        with torch.no_grad():
            layer.weight += rank * 0.01
        stage = PipelineStage(layer, rank, size, torch.device("cpu"))
        plan = schedule(stage, 4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            inputs, targets = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
            if rank == 0:
                plan.step(inputs)
            elif rank == size - 1:
                plan.step(target=targets)
            else:
                plan.step()
            optimizer.step()
        return parameters_of(layer)

    both(train)


PROGRAM = """
import os, sys, torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel
import asynccomm.interop.torch_backend

dist.init_process_group("asynccomm")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
for step in range(3):
    model(torch.ones(2, 4) * dist.get_rank()).sum().backward()
    if attempt == 0 and step == 1 and dist.get_rank() == 1:
        os._exit(3)
norm = torch.stack([p.grad.norm() for p in model.parameters()]).sum()
every = [torch.zeros(()) for _ in range(dist.get_world_size())]
dist.all_gather(every, norm)
assert every[0] == every[1]
open(os.path.join(sys.argv[1], f"done.{dist.get_rank()}"), "w").write(str(attempt))
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_torchrun_restarts(tmp_path: Path) -> None:
    """A rank dies, the others hear of it, and all start again."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", str(program)]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"done.{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert "ResourceWarning" not in done.stderr
