"""Groups and their communicators."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import distributed as dist

from asynccomm import Comm
from asynccomm.compat import bagua
from tests.compat.bagua.programs import without_a_loop
from tests.interop.world import world


@pytest.mark.ranks(4, backend=["shm", "gloo"])
async def test_communicators_are_made_once_and_kept(comm: Comm) -> None:
    def program() -> None:
        assert bagua.is_initialized()
        with pytest.raises(RuntimeError, match="initialized already"):
            bagua.init_process_group()
        stream: Any = object()  # a GPU's, of no use on the CPU
        group = bagua.new_group([3, 1], stream)
        assert isinstance(group, bagua.BaguaProcessGroup)
        assert (group.ranks, group.stream) == ([1, 3], stream)
        whole = group.get_global_communicator()
        assert group.get_global_communicator() is whole
        tensor = torch.full((1,), float(comm.rank))
        if comm.rank in (1, 3):
            assert (whole.rank(), whole.nranks()) == (comm.rank // 2, 2)
            bagua.allreduce_inplace(tensor, comm=whole)
            assert tensor.item() == 4
        else:  # no communicator of this process: nothing happens
            assert (whole.rank(), whole.nranks()) == (-1, 0)
            for _ in range(2):
                assert bagua.allreduce_inplace(tensor, comm=whole) is None
            assert bagua.send(tensor, 0, whole) is None
            assert bagua.broadcast_object("mine", 1, whole) == "mine"
            assert tensor.item() == comm.rank
        everyone = bagua.new_group()
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(everyone.get_global_communicator) for _ in range(2)]
        assert asked[0].result() is asked[1].result()
        intra, inter = everyone.get_intra_node_communicator(), everyone.get_inter_node_communicator()
        assert everyone.get_intra_node_communicator() is intra
        assert (intra.rank(), intra.nranks()) == (comm.rank, 4)
        assert (inter.rank(), inter.nranks()) == ((0, 1) if comm.rank == 0 else (-1, 0))
        assert group.get_intra_node_communicator().nranks() == whole.nranks()
        bagua.barrier(intra)
        for wrong in ([0, 0], [4], []):
            with pytest.raises(ValueError, match="ranks must be different ones"):
                bagua.new_group(wrong)

    await without_a_loop(comm, program)
    assert not bagua.is_initialized()
    await bagua.destroy_process_group()


@pytest.mark.ranks(2)
async def test_groups_in_a_coroutine(comm: Comm) -> None:
    await bagua.init_process_group(backend=comm.backend)
    assert (bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank()) == (comm.rank, 2, comm.rank)
    group = bagua.new_group([1])
    for communicator in (group.get_global_communicator, group.get_intra_node_communicator):
        found = await communicator()
        assert await communicator() is found
        assert found.nranks() == comm.rank
    both = bagua.new_group()
    first, second = await asyncio.gather(both.get_intra_node_communicator(), both.get_intra_node_communicator())
    assert first is second
    abandoned = asyncio.ensure_future(both.get_inter_node_communicator())
    await asyncio.sleep(0)
    abandoned.cancel()  # another task may want it
    assert (await both.get_inter_node_communicator()).nranks() == (1 if comm.rank == 0 else 0)
    await bagua.destroy_process_group()
    with pytest.raises(RuntimeError, match="call init_process_group"):
        bagua.new_group()


@pytest.mark.ranks(2)
async def test_a_group_of_torch(comm: Comm) -> None:
    def program() -> None:
        with world("gloo"):
            group = bagua.from_torch_group(dist.group.WORLD)
            assert group.ranks == [0, 1]
            whole = group.get_global_communicator()
            tensor = torch.ones(1)
            bagua.allreduce_inplace(tensor, comm=whole)
            assert tensor.item() == 2
            assert group.get_inter_node_communicator().nranks() == (1 if comm.rank == 0 else 0)
            bagua.destroy_process_group()

    await asyncio.to_thread(program)


@pytest.mark.ranks(3)
async def test_groups_of_all_after_groups_of_torch_of_some_ranks(comm: Comm) -> None:
    def program() -> None:
        with world("gloo"):
            pair = dist.new_group([0, 1])
            if comm.rank < 2:
                first, second = bagua.from_torch_group(pair), bagua.from_torch_group(pair)
                for group in (second, first):
                    assert group.get_intra_node_communicator().nranks() == 2
            everyone = bagua.new_group([0, 1, 2])
            assert everyone.group_name == "group:1"
            tensor = torch.ones(1)
            bagua.allreduce_inplace(tensor, comm=everyone.get_global_communicator())
            assert tensor.item() == 3

    await without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_a_group_of_torch_has_the_timeout_of_the_default_group(comm: Comm) -> None:
    def program() -> None:
        with world("gloo"):
            group = bagua.from_torch_group(dist.group.WORLD)
            for made in (group.get_global_communicator(), group.get_intra_node_communicator()):
                assert made.either.comm.options.timeout == 40  # of without_a_loop

    await without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_a_refused_group_counts(comm: Comm) -> None:
    def program() -> None:
        if comm.rank == 0:
            for wrong in ([5], [0.5]):
                with pytest.raises((ValueError, TypeError), match="ranks must be"):
                    bagua.new_group(wrong)  # type: ignore[arg-type]
        else:
            bagua.new_group([0, 1])
            bagua.new_group([0, 1])
        group = bagua.new_group([0, 1])
        assert group.group_name == "group:3"
        bagua.barrier(group.get_global_communicator())

    await without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_a_store_may_be_given(comm: Comm) -> None:
    def program() -> None:
        from tests.interop.world import store

        bagua.init_process_group(store("bagua"))
        bagua.barrier()
        bagua.destroy_process_group()

    await asyncio.to_thread(program)
