"""Comms over process groups, and what wrap takes."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

import asynccomm
from asynccomm import Comm, RendezvousError, wrap
from asynccomm.interop import wrap as wrap_module
from asynccomm.interop.torch_backend import group_over
from asynccomm.testing import loopback_world
from tests.interop.world import world


async def check(comm: Comm, size: int = 2) -> None:
    tensor = torch.tensor([comm.rank + 1.0])
    await comm.all_reduce(tensor)
    assert (comm.size, tensor.item()) == (size, size * (size + 1) / 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["gloo", "asynccomm"])
async def test_comms_over_a_group(backend: str) -> None:
    with world(backend) as group:
        async with wrap(group) as comm:
            assert (comm.rank, comm.backend, comm.device.type) == (group.rank(), "shm", "cpu")
            work = wrap(dist.all_reduce(torch.ones(1), async_op=True))  # the group is its own
            await check(comm)
            assert [output.item() for output in await work] == [2]
            # others of the same group, at the same time; one on another backend
            async with wrap(group, name="more") as more, wrap(group, "gloo", timeout=30) as third:
                assert [each.name for each in (comm, more, third)] == ["0/0", "more", "0/2"]
                assert (third.backend, third.options.timeout) == ("gloo", 30)
                await asyncio.gather(check(more), check(third), check(comm))
        two = await asyncio.gather(wrap(group), wrap(group))
        await asyncio.gather(*(check(each) for each in two))
        await asyncio.gather(*(each.aclose() for each in two))
        if group.rank() == 0:  # counts, on all ranks
            with pytest.raises(TypeError, match="unexpected arguments: size"):
                wrap(group, size=3)  # type: ignore[call-overload]
        else:
            wrap(group)
        async with wrap(group) as last:
            assert last.name == "0/6"
        alone = dist.new_group([1])
        if group.rank() == 1:
            async with wrap(alone) as one:
                await check(one, 1)
        else:
            with pytest.raises(ValueError, match="not a member"):
                wrap(alone)


@pytest.mark.ranks(2)
async def test_it_outlives_the_group() -> None:
    with world("gloo") as group:
        comm = await wrap(group)
    del group
    await check(comm)
    await comm.aclose()


@pytest.mark.ranks(2)
async def test_ranks_that_do_not_come() -> None:
    with world("gloo") as group:
        connecting = wrap(group, timeout=0.2)
        if group.rank() == 0:
            with pytest.raises(RendezvousError, match=r"ranks \[1\] of 2 did not come"):
                await connecting
        else:
            dist.barrier(group)
            del connecting
        if group.rank() == 0:
            dist.barrier(group)
        async with wrap(group) as comm:
            await check(comm)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_a_group_without_a_store(comm: Comm) -> None:
    group = group_over(comm)
    async with wrap(group) as one:
        await check(one)
        one, two = await asyncio.gather(wrap(group), wrap(group, name="two"))
        await asyncio.gather(check(one), check(two), check(comm))
        async with two.split([1, 0], "turned") as turned:
            await check(turned)
        await asyncio.gather(one.aclose(), two.aclose())
    with pytest.raises(ValueError, match="unknown"):
        wrap(group, "nothing")  # at the call


@pytest.mark.ranks(2)
async def test_no_store_can_be_hosted(comm: Comm) -> None:
    def listen(*_: Any) -> Any:
        raise RendezvousError("no port is free")

    group = group_over(comm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrap_module, "listen", listen)
        expected = "no port is free" if comm.rank == 0 else "rank 0 of the group could not host a store"
        with pytest.raises(RendezvousError, match=expected):
            await wrap(group)
    async with wrap(group) as again:
        await check(again)


@pytest.mark.ranks(2)
async def test_a_store_on_another_host(comm: Comm) -> None:
    group = group_over(comm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrap_module, "_own_address", lambda: "127.0.0.2")
        if comm.rank == 1:
            patch.setattr(wrap_module, "socket", SimpleNamespace(gethostname=lambda: "elsewhere"))
        async with wrap(group) as other:
            await check(other)
    store = wrap_module._place_of(group).meet(group)
    assert isinstance(store, dist.TCPStore)
    assert store.host == ("127.0.0.1" if comm.rank == 0 else "127.0.0.2")


@pytest.mark.parametrize(("found", "expected"), [("10.1.2.3", "10.1.2.3"), ("127.0.1.1", ""), (None, "")])
def test_own_address(found: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(_: str) -> str:
        if found is None:
            raise OSError("no such name")
        return found

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    assert wrap_module._own_address() == expected


async def test_what_it_does_not_take() -> None:
    takes = "wrap takes a process group or a Work of torch, got"
    with pytest.raises(TypeError, match=f"{takes} None; without async_op=True, torch gives None"):
        wrap(None)
    with pytest.raises(TypeError, match=f"{takes} 3$"):
        wrap(3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="not a member"):
        wrap(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="wrap the manager"):
        wrap(dist.distributed_c10d._IllegalWork())
    with pytest.raises(ValueError, match="async_ops=True, and wrap it after its block"):
        wrap(dist.distributed_c10d._CoalescingManager())
    assert asynccomm.wrap is wrap


async def test_arguments_are_checked_at_the_call() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        with pytest.raises(TypeError, match="unexpected arguments: size, store"):
            wrap(group, store="env://", size=3)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="backend 'nothing' is unknown"):
            wrap(group, "nothing")
        with pytest.raises(ValueError, match="timeout"):
            wrap(group, timeout=-1)
        work: Any = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(TypeError, match="a Work takes no arguments, got timeout"):
            wrap(work, timeout=3)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="a Work takes no arguments, got backend"):
            wrap(work, "shm")
        await wrap(work)
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(torch.full((1,), 2.0))
        assert [output.item() for output in await wrap(manager)] == [2]
    finally:
        dist.destroy_process_group()


class Group(dist.ProcessGroup):
    """One whose devices are what they are said to be."""

    def __init__(self, devices: list[str], bound: str | None = None) -> None:
        super().__init__(0, 1)
        self.devices = [torch.device(device) for device in devices]
        self.bound = None if bound is None else torch.device(bound)

    @property
    def _device_types(self) -> Any:
        return self.devices

    @property
    def bound_device_id(self) -> Any:
        return self.bound


@pytest.mark.parametrize(
    ("devices", "bound", "device"),
    [
        (["cpu"], None, "cpu"),
        (["cuda", "cpu"], None, "cpu"),
        (["cuda"], None, "cuda:3"),
        (["cuda", "cpu"], "cuda:1", "cuda:1"),
        ([], None, "cpu"),
    ],
)
def test_where_tensors_live(
    devices: list[str], bound: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert wrap_module._device_of(Group(devices, bound)) == torch.device(device)


async def test_a_group_without_a_name() -> None:
    async with loopback_world(1) as (comm,):
        group = group_over(comm, name="known")
        assert wrap_module._name_of(group) == "known"
    assert wrap_module._name_of(Group([])) == "group"
