"""Every function of Bagua, with and without a loop."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest
import torch

from asynccomm import Comm
from asynccomm.compat import bagua
from asynccomm.compat.bagua import ReduceOp
from tests.compat.bagua.programs import without_a_loop


def flow(rank: int, size: int, comm: Any = None) -> list[tuple[Any, torch.Tensor, list[Any]]]:
    """Each function: its result, its output, and the values that this must have."""
    mine = torch.tensor([float(rank), float(rank + 1)])
    gathered = [value for r in range(size) for value in (float(r), float(r + 1))]
    total = [float(sum(range(size))), float(sum(range(1, size + 1)))]
    many = torch.arange(2.0 * size) + rank
    summed = [size * value + sum(range(size)) for value in range(2 * size)]
    last = size - 1
    found: list[tuple[Any, torch.Tensor, list[Any]]] = []

    def add(result: Any, output: torch.Tensor, expected: list[Any]) -> None:
        found.append((result, output, expected))

    def zeros(n: int) -> torch.Tensor:
        return torch.zeros(n)

    t = zeros(2)
    add(bagua.allreduce(mine, t, comm=comm), t, total)
    t = mine.clone()
    add(bagua.allreduce_inplace(t, ReduceOp.MAX, comm), t, [float(last), float(size)])
    t = torch.tensor([1 + 1j, 2 + 2j]) + 2 * rank * (1 + 1j)
    u = torch.zeros(2, dtype=torch.cfloat)
    add(bagua.allreduce(t, u, comm=comm), u, [(v * size + sum(range(0, 2 * size, 2))) * (1 + 1j) for v in (1, 2)])
    t = zeros(2)
    add(bagua.reduce(mine, t, last, ReduceOp.SUM, comm), t, total if rank == last else [0, 0])
    t = mine.clone()
    add(bagua.reduce_inplace(t, 0, comm=comm), t, total if rank == 0 else mine.tolist())
    t = mine.clone()
    add(bagua.broadcast(t, comm=comm), t, [0, 1])
    t = zeros(2 * size)
    add(bagua.allgather(mine, t, comm), t, gathered)
    t = zeros(2 * size)
    t[2 * rank : 2 * rank + 2] = mine
    add(bagua.allgather_inplace(t, comm), t, gathered)
    t = zeros(2 * size)
    add(bagua.gather(mine, t, last, comm), t, gathered if rank == last else [0.0] * (2 * size))
    t = zeros(2 * size) if rank == last else mine.clone()
    t[-2:] = mine
    add(bagua.gather_inplace(t, 2, last, comm), t, gathered if rank == last else mine.tolist())
    t = zeros(2)
    add(bagua.scatter(torch.tensor(gathered), t, 0, comm), t, mine.tolist())
    t = torch.tensor(gathered) if rank == 0 else zeros(2)
    add(bagua.scatter_inplace(t, 2, 0, comm), t, gathered if rank == 0 else mine.tolist())
    t = zeros(2)
    add(bagua.reduce_scatter(many, t, comm=comm), t, summed[2 * rank : 2 * rank + 2])
    t = many.clone()
    add(bagua.reduce_scatter_inplace(t, ReduceOp.SUM, comm), t[:2], summed[2 * rank : 2 * rank + 2])
    swapped = [value + r for r in range(size) for value in (2.0 * rank, 2.0 * rank + 1)]
    t = zeros(2 * size)
    add(bagua.alltoall(many, t, comm), t, swapped)
    t = many.clone()
    add(bagua.alltoall_inplace(t, comm), t, swapped)
    return found


def messages(rank: int, size: int) -> None:
    if rank == 0:
        assert bagua.send(torch.ones(2), size - 1) is None
    elif rank == size - 1:
        t = torch.zeros(2)
        assert bagua.recv(t, 0) is None
        assert t.tolist() == [1, 1]
    state = {"step": 3, "weights": torch.ones(2)}
    got = bagua.broadcast_object(state if rank == 0 else None, 0)
    assert got["step"] == 3
    assert got["weights"].tolist() == [1, 1]
    assert bagua.barrier() is None


def refusals(rank: int) -> None:
    wide = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="tensor must be contiguous"):
        bagua.allgather_inplace(wide.t())
    with pytest.raises(ValueError, match="multiple of 2 elements, got 3"):
        bagua.reduce_scatter_inplace(torch.zeros(3))
    with pytest.raises(ValueError, match="must have 10 elements here, got 8"):
        bagua.gather_inplace(wide, 5, rank)
    with pytest.raises(ValueError, match="must have 5 elements here, got 8"):
        bagua.scatter_inplace(wide, 5, 1 - rank)
    first_alone = bagua.new_group([0]).get_global_communicator()
    with pytest.raises(TypeError, match="comm must be a communicator"):
        bagua.barrier("main")  # type: ignore[arg-type]
    none: Any = None
    for call in (
        lambda comm: bagua.reduce(wide, none, 0, comm=comm),
        lambda comm: bagua.allreduce(wide, none, comm=comm),
        lambda comm: bagua.allgather(wide, none, comm),
        lambda comm: bagua.reduce_scatter(wide, none, comm=comm),
        lambda comm: bagua.alltoall(wide, none, comm),
    ):
        with pytest.raises(TypeError, match=r"^recv_tensor must be a torch\.Tensor, got None"):
            call(None)
        if rank:
            assert call(first_alone) is None  # a communicator without this process


@pytest.mark.ranks([2, 3], backend=["shm", "gloo"])
async def test_every_function_without_a_loop(comm: Comm) -> None:
    def program() -> None:
        for result, output, expected in flow(comm.rank, comm.size):
            assert result is None
            assert output.tolist() == expected
        messages(comm.rank, comm.size)
        if comm.size == 2:
            refusals(comm.rank)

    await without_a_loop(comm, program)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_every_function_awaited(comm: Comm) -> None:
    await bagua.init_process_group(backend=comm.backend)
    for result, output, expected in flow(comm.rank, comm.size):
        assert isinstance(result, Awaitable)
        assert await result is None
        assert output.tolist() == expected
    assert await bagua.broadcast_object("x" if comm.rank == 1 else None, 1) == "x"
    await bagua.barrier()
    await bagua.destroy_process_group()


@pytest.mark.ranks(2)
async def test_the_documents_example(comm: Comm) -> None:
    def program() -> None:
        rank = bagua.get_rank()
        send_tensor = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
        recv_tensor = torch.zeros(2, dtype=torch.int64)
        bagua.allreduce(send_tensor, recv_tensor)
        assert recv_tensor.tolist() == [4, 6]
        send_tensor = torch.tensor([1 + 1j, 2 + 2j], dtype=torch.cfloat) + 2 * rank * (1 + 1j)
        recv_tensor = torch.zeros(2, dtype=torch.cfloat)
        bagua.allreduce(send_tensor, recv_tensor)
        assert recv_tensor.tolist() == [4 + 4j, 6 + 6j]
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1 + rank)
        state_dict = bagua.broadcast_object(optimizer.state_dict(), 0)
        if bagua.get_rank() > 0:
            optimizer.load_state_dict(state_dict)
        assert optimizer.param_groups[0]["lr"] == 0.1

    await without_a_loop(comm, program)


class Odd:
    """An object that only a pickle can carry."""


@pytest.mark.ranks(2)
async def test_objects_of_any_class_if_they_are_trusted(comm: Comm) -> None:
    def program() -> None:
        assert isinstance(bagua.broadcast_object(Odd()), Odd)

    await without_a_loop(comm, program, weights_only=False)
    with pytest.raises(RuntimeError, match="call init_process_group"):
        bagua.barrier()
