"""The examples of the documentation of torch.distributed, on the CPU and awaited; each part is one example.

Two of them cannot run as they are printed, in torch either: the cfloat all_to_all into int64 tensors, for which the
outputs here are cfloat, and ``new_subgroups(ranks=...)``, which is ``new_subgroups_by_enumeration``.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import MonitoredBarrierError
from asynccomm.compat.c10d import ReduceOp
from tests.compat.c10d.worlds import run_ranks

OBJECTS: list[Any] = ["foo", 12, {1: 2}]


def values(tensors: Any) -> Any:
    return tensors.tolist() if isinstance(tensors, torch.Tensor) else [values(tensor) for tensor in tensors]


async def coalescing_and_batches(rank: int, world_size: int) -> None:
    tensors = [torch.ones(n) for n in (1, 2)]
    async with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    async with dist._coalescing_manager(async_ops=True) as cm:
        for tensor in tensors:
            dist.all_reduce(tensor)
    await cm.wait()
    assert values(tensors) == [[4.0], [4.0, 4.0]]

    send_tensor = torch.arange(2, dtype=torch.float32) + 2 * rank
    recv_tensor = torch.randn(2, dtype=torch.float32)
    send_op = dist.P2POp(dist.isend, send_tensor, (rank + 1) % world_size)
    recv_op = dist.P2POp(dist.irecv, recv_tensor, (rank - 1 + world_size) % world_size)
    for req in dist.batch_isend_irecv([send_op, recv_op]):
        await req
    assert values(recv_tensor) == ([2, 3] if rank == 0 else [0, 1])


async def reductions_and_gathers(rank: int, world_size: int) -> None:
    tensor = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
    await dist.all_reduce(tensor, op=ReduceOp.SUM)
    assert values(tensor) == [4, 6]
    tensor = torch.tensor([1 + 1j, 2 + 2j], dtype=torch.cfloat) + 2 * rank * (1 + 1j)
    await dist.all_reduce(tensor, op=ReduceOp.SUM)
    assert values(tensor) == [4 + 4j, 6 + 6j]

    tensor_list = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    tensor = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
    await dist.all_gather(tensor_list, tensor)
    assert values(tensor_list) == [[1, 2], [3, 4]]
    tensor_list = [torch.zeros(2, dtype=torch.cfloat) for _ in range(2)]
    tensor = torch.tensor([1 + 1j, 2 + 2j], dtype=torch.cfloat) + 2 * rank * (1 + 1j)
    await dist.all_gather(tensor_list, tensor)
    assert values(tensor_list) == [[1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j]]

    tensor_in = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
    tensor_out = torch.zeros(world_size * 2, dtype=torch.int64)
    await dist.all_gather_into_tensor(tensor_out, tensor_in)
    assert values(tensor_out) == [1, 2, 3, 4]
    tensor_out2 = torch.zeros(world_size, 2, dtype=torch.int64)
    await dist.all_gather_into_tensor(tensor_out2, tensor_in)
    assert values(tensor_out2) == [[1, 2], [3, 4]]

    given = [[[[1, 1], [1, 1]], [2], [3, 3]], [[[3, 3], [3, 3]], [5], [1, 1]]]
    input_tensor_list = [torch.tensor(each) for each in given[rank]]
    output_tensor_lists = [[torch.full_like(tensor, -1) for tensor in input_tensor_list] for _ in range(2)]
    with pytest.warns(FutureWarning):
        await dist.all_gather_coalesced(output_tensor_lists, input_tensor_list)
    assert values(output_tensor_lists) == given

    tensor_out = torch.zeros(2, dtype=torch.int64)
    tensor_in = torch.arange(world_size * 2, dtype=torch.int64)
    await dist.reduce_scatter_tensor(tensor_out, tensor_in)
    assert values(tensor_out) == [[0, 2], [4, 6]][rank]
    await dist.reduce_scatter_tensor(tensor_out, torch.reshape(tensor_in, (world_size, 2)))
    assert values(tensor_out) == [[0, 2], [4, 6]][rank]


async def gather_and_scatter(rank: int, world_size: int) -> None:
    tensor = torch.ones(2) + rank
    gather_list = [torch.zeros_like(tensor) for i in range(2)] if dist.get_rank() == 0 else None
    await dist.gather(tensor, gather_list, dst=0)
    assert gather_list is None or values(gather_list) == [[1, 1], [2, 2]]

    output_tensor = torch.zeros(2)
    scatter_list = [torch.ones(2), torch.ones(2) * 5] if dist.get_rank() == 0 else None
    await dist.scatter(output_tensor, scatter_list, src=0)
    assert values(output_tensor) == [[1, 1], [5, 5]][rank]

    objects = list(OBJECTS)
    if dist.get_rank() == 0:
        await dist.send_object_list(objects, dst=1, device=torch.device("cpu"))
    else:
        objects = [None, None, None]
        await dist.recv_object_list(objects, src=0, device=torch.device("cpu"))
    assert objects == OBJECTS


async def test_two_ranks() -> None:
    async def body(rank: int) -> None:
        for part in (coalescing_and_batches, reductions_and_gathers, gather_and_scatter):
            await part(rank, dist.get_world_size())

    await run_ranks(2, body)


async def test_three_ranks() -> None:
    async def body(rank: int) -> None:
        output: list[Any] = [None for _ in OBJECTS]
        await dist.all_gather_object(output, OBJECTS[dist.get_rank()])
        assert output == OBJECTS
        output = [None for _ in OBJECTS]
        await dist.gather_object(OBJECTS[rank], output if dist.get_rank() == 0 else None, dst=0)
        assert output == (OBJECTS if rank == 0 else [None] * 3)
        objects = list(OBJECTS) if dist.get_rank() == 0 else [None, None, None]
        await dist.broadcast_object_list(objects, src=0, device=torch.device("cpu"))
        assert objects == OBJECTS
        objects = list(OBJECTS) if dist.get_rank() == 0 else [None, None, None]
        output_list: list[Any] = [None]
        await dist.scatter_object_list(output_list, objects, src=0)
        assert output_list == [OBJECTS[rank]]

    await run_ranks(3, body)


INPUTS = [range(6), range(10, 19), range(20, 25), range(30, 37)]
INPUT_SPLITS = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
OUTPUT_SPLITS = [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]]
OUTPUTS = [
    [[0, 1], [10, 11, 12], [20, 21], [30, 31]],
    [[2, 3], [13, 14], [22], [32, 33]],
    [[4], [15, 16], [23], [34, 35]],
    [[5], [17, 18], [24], [36]],
]


async def all_to_all(rank: int, world_size: int) -> None:
    input = torch.arange(4) + rank * 4
    output = torch.empty([4], dtype=torch.int64)
    await dist.all_to_all_single(output, input)
    assert values(output) == [rank, rank + 4, rank + 8, rank + 12]
    scatter_list, gather_list = list(input.chunk(world_size)), list(torch.empty_like(output).chunk(world_size))
    for i in range(world_size):
        await dist.scatter(gather_list[i], scatter_list if i == rank else [], src=i)
    assert torch.cat(gather_list).equal(output)  # "essentially, it is similar"

    input = torch.tensor(list(INPUTS[rank]))
    output = torch.empty(sum(OUTPUT_SPLITS[rank]), dtype=torch.int64)
    await dist.all_to_all_single(output, input, OUTPUT_SPLITS[rank], INPUT_SPLITS[rank])
    assert values(output) == list(itertools.chain(*OUTPUTS[rank]))
    outputs = [torch.empty(n, dtype=torch.int64) for n in OUTPUT_SPLITS[rank]]
    await dist.all_to_all(outputs, list(input.split(INPUT_SPLITS[rank])))
    assert values(outputs) == OUTPUTS[rank]

    input = torch.tensor([1 + 1j, 2 + 2j, 3 + 3j, 4 + 4j], dtype=torch.cfloat) + 4 * rank * (1 + 1j)
    expected = [(rank + 1 + 4 * i) * (1 + 1j) for i in range(4)]
    with pytest.raises(ValueError, match="dtype"):
        await dist.all_to_all_single(torch.empty([4], dtype=torch.int64), input)
    output = torch.empty([4], dtype=torch.cfloat)
    await dist.all_to_all_single(output, input)
    assert values(output) == expected
    outputs = list(torch.empty([4], dtype=torch.cfloat).chunk(4))
    await dist.all_to_all(outputs, list(input.chunk(4)))
    assert torch.cat(outputs).equal(output)


async def test_four_ranks() -> None:
    async def body(rank: int) -> None:
        await all_to_all(rank, dist.get_world_size())

        cur_subgroup, subgroups = await dist.new_subgroups(2)  # there are no CUDA devices to count
        tensor = torch.ones(1) * rank
        await dist.all_reduce(tensor, group=cur_subgroup)
        assert tensor.item() == (1 if rank < 2 else 5)
        await dist.barrier()
        for subgroup in subgroups:
            await dist.destroy_process_group(subgroup)
        cur_subgroup, subgroups = await dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        tensor = torch.ones(1) * rank
        await dist.all_reduce(tensor, group=cur_subgroup)
        assert tensor.item() == (4 if rank % 2 else 2)

        if dist.get_rank() != 1:
            with pytest.raises(MonitoredBarrierError, match="1"):
                await dist.monitored_barrier(timeout=timedelta(seconds=0.3))
        if dist.get_rank() == 0:
            with pytest.raises(MonitoredBarrierError) as caught:
                await dist.monitored_barrier(timeout=timedelta(seconds=0.1), wait_all_ranks=True)
            assert caught.value.missing == (1, 2, 3)
        await dist.barrier()

    await run_ranks(4, body)
