"""Every operation of torchcomms by its arguments in their order, on ranks without a loop and in coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from asynccomm import Comm
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import ReduceOp, TorchComm, TorchWork

CPU = torch.device("cpu")


def calls(comm: TorchComm) -> list[tuple[TorchWork, torch.Tensor | list[torch.Tensor], object]]:
    """Each operation, asynchronously: its Work, its output, and the value that it must have."""
    rank, size = comm.get_rank(), comm.get_size()
    mine = torch.tensor([float(rank + 1)])
    total = float(sum(range(1, size + 1)))
    hints, timeout = {}, timedelta(seconds=30)  # type: ignore[var-annotated]

    def outs(n: int = size) -> list[torch.Tensor]:
        return [torch.zeros(1) for _ in range(n)]

    found: list[tuple[TorchWork, torch.Tensor | list[torch.Tensor], object]] = []

    def add(work: TorchWork, output: torch.Tensor | list[torch.Tensor], expected: object) -> None:
        found.append((work, output, expected))

    everyone = [float(r + 1) for r in range(size)]
    t = mine.clone()
    add(comm.all_reduce(t, ReduceOp.SUM, True, hints, timeout), t, [total])
    t = mine.clone()
    add(comm.all_reduce(t, ReduceOp.PREMUL_SUM(2.0), async_op=True), t, [2 * total])
    t = mine.clone()
    add(comm.reduce(t, 1, ReduceOp.MAX, True, hints, timeout), t, [float(size) if rank == 1 else rank + 1.0])
    t = mine.clone()
    add(comm.broadcast(t, 1, True, hints, timeout), t, [2.0])
    o = outs()
    add(comm.all_gather(o, mine, True, hints, timeout), o, [[v] for v in everyone])
    o = [torch.zeros(r + 1) for r in range(size)]
    add(comm.all_gather_v(o, torch.ones(rank + 1), True), o, [[1.0] * (r + 1) for r in range(size)])
    s = torch.zeros(size)
    add(comm.all_gather_single(s, mine, True, hints, timeout), s, everyone)
    o1 = torch.zeros(1)
    add(comm.reduce_scatter(o1, [mine] * size, ReduceOp.SUM, True, hints, timeout), o1, [total])
    o2 = torch.zeros(1)
    add(comm.reduce_scatter_single(o2, mine.repeat(size), ReduceOp.SUM, True, hints, timeout), o2, [total])
    o = outs()
    add(
        comm.all_to_all(o, [mine * 10**r for r in range(size)], True, hints, timeout),
        o,
        [[v * 10**rank] for v in everyone],
    )
    s = torch.zeros(size)
    add(comm.all_to_all_single(s, mine.repeat(size), True, hints, timeout), s, everyone)
    s = torch.zeros(size)
    add(comm.all_to_all_v_single(s, mine.repeat(size), [1] * size, [1] * size, True, hints, timeout), s, everyone)
    o3 = torch.zeros(1)
    add(comm.scatter(o3, [torch.tensor([float(r)]) for r in range(size)], 1, True, hints, timeout), o3, [float(rank)])
    o = outs(size if rank == 1 else 0)
    add(comm.gather(o, mine, 1, True, hints, timeout), o, [[v] for v in everyone] if rank == 1 else [])
    s = torch.zeros(size)
    add(comm.gather_single(s, mine, 0, True, hints, timeout), s, everyone if rank == 0 else [0.0] * size)
    t = torch.zeros(1)
    batch = comm.batch_op_create()
    batch.send(mine, (rank + 1) % size)
    batch.recv(t, (rank - 1) % size)
    add(batch.issue(True), t, [float((rank - 1) % size + 1)])
    t = mine.clone()
    if rank == 0:
        add(comm.send(t, 1, True, hints, timeout), t, [1.0])
    elif rank == 1:
        add(comm.recv(t, 0, True, hints, timeout), t, [1.0])
    add(comm.barrier(True, hints, timeout), [], [])
    return found


def value(output: torch.Tensor | list[torch.Tensor]) -> object:
    return output.tolist() if isinstance(output, torch.Tensor) else [each.tolist() for each in output]


def program(backend: str) -> None:
    comm = torchcomms.new_comm(backend, CPU, name="calls", timeout=timedelta(seconds=40))
    for work, output, expected in calls(comm):
        assert work.wait() is None
        assert work.is_completed()
        work.wait_blocking()
        assert value(output) == expected
    tensor = torch.ones(1)
    assert comm.all_reduce(tensor, ReduceOp.SUM, async_op=False).is_completed()
    assert tensor.item() == comm.get_size()
    with pytest.raises(TypeError, match="async_op must be True or False, got SUM"):
        comm.all_reduce(tensor, False, ReduceOp.SUM)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing"):
        comm.all_reduce(tensor, ReduceOp.SUM)  # type: ignore[call-arg]
    with pytest.raises(RuntimeError, match=r"root must be in \[0, "):
        comm.broadcast(tensor, 9, False)
    with pytest.raises(RuntimeError, match="tensor_list"):
        comm.all_gather([], tensor, False)
    comm.finalize()


@pytest.mark.ranks([2, 3], backend=["shm", "gloo"])
async def test_every_operation_without_a_loop(comm: Comm) -> None:
    await asyncio.to_thread(program, comm.backend)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_every_operation_awaited(comm: Comm) -> None:
    own = await torchcomms.new_comm(comm.backend, CPU, name="calls")
    for work, output, expected in calls(own):
        await work
        assert value(output) == expected
    await own.finalize()


@pytest.mark.ranks(2)
async def test_outputs_are_not_made_for_the_caller(comm: Comm) -> None:
    none: Any = None
    t = torch.ones(2)
    own = await torchcomms.new_comm(comm.backend, CPU, name="outputs")
    refused: dict[str, list[Callable[[], TorchWork]]] = {
        "tensor_list": [lambda: own.all_gather(none, t, False), lambda: own.all_gather_v(none, t, False)],
        "output": [
            lambda: own.all_gather_single(none, t, False),
            lambda: own.reduce_scatter(none, [t, t], ReduceOp.SUM, False),
            lambda: own.reduce_scatter_single(none, t, ReduceOp.SUM, False),
            lambda: own.all_to_all_single(none, t, False),
            lambda: own.all_to_all_v_single(none, t, [1, 1], [1, 1], False),
            lambda: own.gather_single(none, t, own.get_rank(), False),
        ],
        "output_tensor_list": [
            lambda: own.all_to_all(none, [t, t], False),
            lambda: own.gather(none, t, own.get_rank(), False),
        ],
    }
    for name, calls_without in refused.items():
        for call in calls_without:
            with pytest.raises(TypeError, match=f"^{name} must be given, got None"):
                call()
    outputs = [torch.zeros(2), torch.zeros(2)] if own.get_rank() == 0 else none
    await own.gather(outputs, t, 0, False)  # other ranks need none
    await own.finalize()
