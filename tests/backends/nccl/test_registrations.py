"""Tensors that are registered with NCCL."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
import torch

from asynccomm import BackendError, ClosedError, Comm

from .conftest import World
from .simulation import LIMIT, SimulatedComm
from .test_backend import backend_of, until


def registered(comm: Comm) -> list[tuple[int, int]]:
    """The memory that NCCL knows of, by address and size."""
    handle = backend_of(comm)._collectives.communicator._shared._handle
    assert isinstance(handle, SimulatedComm)
    return sorted(handle.registered.values())


async def test_a_tensor_is_registered_and_deregistered(world: World) -> None:
    async with world(2) as comms:
        one, tensor = comms[0], torch.ones(4, 3)
        await one.register(tensor)
        assert registered(one) == [(tensor.data_ptr(), 48)]
        assert registered(comms[1]) == []
        await one.register(row := tensor[1])
        assert (row.data_ptr(), 12) in registered(one)
        await asyncio.gather(*(comm.all_reduce(tensor if comm is one else torch.ones(4, 3)) for comm in comms))
        assert tensor.tolist() == [[2.0] * 3] * 4
        await one.deregister(tensor.view(-1))  # the same memory
        assert registered(one) == [(row.data_ptr(), 12)]
        await one.deregister(row)
        assert registered(one) == []
        await one.register(tensor)  # again


async def test_a_comm_keeps_registered_tensors_and_ends_with_its_registrations(world: World) -> None:
    async with world(2) as comms:
        tensor = torch.ones(4)
        there = weakref.ref(tensor.untyped_storage())
        await comms[0].register(tensor)
        ((address, _),) = registered(comms[0])
        del tensor
        gc.collect()
        assert registered(comms[0]) == [(address, 16)]
        del there
        nccl = backend_of(comms[0]).nccl
        nccl.calls.clear()
    assert nccl.calls == ["deregister", "finalize", "destroy"]


async def test_a_deregistration_waits_for_earlier_collectives(world: World) -> None:
    async with world(2) as comms:
        tensors = [torch.ones(4) for _ in comms]
        await asyncio.gather(*(comm.all_reduce(tensor) for comm, tensor in zip(comms, tensors, strict=True)))
        await comms[0].register(tensors[0])
        gate = threading.Event()
        backend_of(comms[0])._collectives.communicator.stream.put(lambda: gate.wait(LIMIT))
        works = [comm.all_reduce(tensor) for comm, tensor in zip(comms, tensors, strict=True)]
        task = asyncio.ensure_future(comms[0].deregister(tensors[0]))
        await asyncio.sleep(0.05)
        assert registered(comms[0])
        gate.set()
        await asyncio.gather(task, *works)
        assert not registered(comms[0])


async def test_tensors_that_cannot_be_registered(world: World) -> None:
    async with world(1) as (comm,):
        tensor = torch.ones(4, 3)
        for wrong in (tensor.T, torch.empty(0), tensor[:, 1]):
            with pytest.raises(ValueError, match=r"^tensor must be contiguous and have elements, got float32\["):
                await comm.register(wrong)
        with pytest.raises(ValueError, match=r"^tensor must be registered with this comm, got float32\[4, 3\]"):
            await comm.deregister(tensor)
        await comm.register(tensor)
        with pytest.raises(ValueError, match=r"^tensor must not be registered yet, got float32\[4, 3\] at address 0x"):
            await comm.register(tensor)
        with pytest.raises(TypeError, match="tensor"):
            await comm.register([1.0])  # type: ignore[arg-type]


async def test_nccl_refuses(world: World) -> None:
    async with world(1) as (comm,):
        nccl, tensor = backend_of(comm).nccl, torch.ones(3)
        nccl.fail["register"] = "out of descriptors"
        with pytest.raises(BackendError, match="out of descriptors"):
            await comm.register(tensor)
        nccl.fail.clear()
        await comm.register(tensor)
        await comm.barrier()


async def test_an_older_library_is_named(world: World) -> None:
    async with world(1, native=()) as (comm,):
        with pytest.raises(NotImplementedError, match=r"^NCCL 2\.30\.7 cannot register memory$"):
            await comm.register(torch.ones(3))


async def test_before_nccl_is_connected(world: World) -> None:
    async with world(1, hints={"connect": "lazy"}) as (comm,):
        with pytest.raises(RuntimeError, match="NCCL is not connected yet"):
            await comm.register(torch.ones(3))
        await comm.all_reduce(torch.ones(1))
        await comm.register(torch.ones(3))


async def test_a_cancelled_call_registers(world: World) -> None:
    async with world(1) as (comm,):
        tensor = torch.ones(3)
        task = asyncio.ensure_future(comm.register(tensor))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: bool(registered(comm)))
        await comm.deregister(tensor)
    with pytest.raises(ClosedError):
        await comm.register(tensor)
