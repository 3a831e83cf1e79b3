"""Making the default group."""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as torch_dist
from torch.distributed import distributed_c10d as torch_c10d

import asynccomm.compat.c10d as dist
from asynccomm import Comm, MemoryStore, RendezvousError
from asynccomm.compat.c10d import backends, init
from asynccomm.store.base import PrefixStore
from tests.compat.c10d.worlds import alone, run_ranks

LIMIT = timedelta(seconds=30)
ONE = {"world_size": 1, "rank": 0}


@pytest.fixture
def fresh() -> Any:
    with dist.use_world(dist.World()) as known:
        yield known


def test_arguments() -> None:
    names = (
        "backend init_method timeout world_size rank store group_name pg_options device_id _ranks "  # in torch's order
        "enable_reconfigure"
    )
    assert list(inspect.signature(dist.init_process_group).parameters) == names.split()


async def test_what_the_default_group_is() -> None:
    async with alone("loopback", timeout=LIMIT, group_name="ignored") as pg:
        assert (pg.group_name, pg.group_desc) == ("0", "default_pg")
        assert (dist._world.backend, dist._world.init_method) == ("loopback", None)
        assert dist._world.pg_group_ranks[pg] == {0: 0}
        assert pg.timeout == LIMIT
        assert dist.is_initialized()


async def test_it_is_made_once(fresh: dist.World) -> None:
    store = MemoryStore()
    first = asyncio.ensure_future(dist.init_process_group("loopback", store=store, **ONE))
    await asyncio.sleep(0)
    for _ in range(2):  # while it is under way, and then
        with pytest.raises(ValueError, match="was called before"):
            await dist.init_process_group("loopback", store=store, **ONE)
        await first
    await dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_method": "env://", "rank": 0, "world_size": 1}, "init_method and store"),
        ({"rank": 0}, "world_size must be positive"),
        ({"rank": 0, "world_size": 0}, "world_size must be positive"),
        ({"world_size": 1}, "rank must not be negative"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("fresh")
async def test_what_goes_with_a_store(arguments: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        await dist.init_process_group("loopback", store=MemoryStore(), **arguments)


@pytest.mark.parametrize("timeout", [3, 2.5, "1"])
@pytest.mark.usefixtures("fresh")
async def test_timeouts_are_timedeltas(timeout: Any) -> None:
    with pytest.raises(TypeError, match=r"timeout must be a datetime.timedelta"):
        await dist.init_process_group("loopback", store=MemoryStore(), timeout=timeout, **ONE)


@pytest.mark.parametrize(("backend", "minutes"), [("loopback", 30), ("cpu:loopback", 30)])
async def test_default_timeouts(backend: str, minutes: int) -> None:
    async with alone(backend) as pg:
        assert pg.timeout == timedelta(minutes=minutes)
        assert pg.comm().options.timeout == 60 * minutes


@pytest.mark.usefixtures("fresh")
async def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(device: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            await dist.init_process_group("loopback", store=MemoryStore(), device_id=device, **ONE)

    monkeypatch.setattr(init, "accelerator", lambda: "cpu")
    await fail(0, "device_id is 0, but this machine has no accelerator")
    await fail(torch.device("cpu"), "must be an accelerator with an index")
    await fail(torch.device("cuda:0"), "the accelerator of this machine is of type 'cpu'")
    monkeypatch.setattr(init, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    await fail(torch.device("cuda"), "must have an index, got cuda")
    await fail(torch.device("cuda:2"), "device_id is cuda:2, but there are 2 devices")
    await fail(2, "device_id is cuda:2, but there are 2 devices")
    await fail(torch.device("xpu:0"), "the accelerator of this machine is of type 'cuda'")
    assert init._device(1) == torch.device("cuda:1")


async def test_a_bound_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    async with alone("loopback", device_id=1) as pg:
        assert pg.bound_device_id == torch.device("cuda:1")
        assert pg.comm().rank == 0  # connected now, as all groups are
        with pytest.raises(AssertionError, match="device_id is cuda:0, but cuda:1 is bound"):
            await dist.new_group([0], device_id=torch.device("cuda:0"))
        assert (await dist.new_group([0])).bound_device_id == torch.device("cuda:1")  # type: ignore[union-attr]


async def test_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", {"cpu": "loopback", "cuda": "loopback"})
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(backends, "accelerator", lambda device=device: device)
        if device == "cpu":
            async with alone(None):
                assert dist.get_backend() == "undefined"
                assert dist.get_backend_config() == "cpu:loopback"
    monkeypatch.setattr(init, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    async with alone(None, device_id=0):
        assert dist.get_backend() == "loopback"


@pytest.mark.usefixtures("fresh")
async def test_mpi() -> None:
    with (
        pytest.warns(UserWarning, match="finds out rank and world_size itself"),
        pytest.raises(RuntimeError, match="backend 'mpi' is not available here"),
    ):
        await dist.init_process_group("mpi", store=MemoryStore(), **ONE)


async def test_hashed_names() -> None:
    async with alone(_ranks=[0]) as pg:
        assert len(pg.group_name) == 40
        assert dist.get_pg_count() == 0


async def test_a_store_that_is_given_is_used_as_it_is(fresh: dist.World) -> None:
    class Given(torch_dist.HashStore):
        def set_timeout(self, timeout: timedelta) -> None:
            raise AssertionError("it is the caller's")

    store = Given()
    await dist.init_process_group("gloo", store=store, **ONE)
    await dist._get_default_store().set("key", "value")
    assert store.get("0//key") == b"value"
    await dist.destroy_process_group()


@pytest.mark.usefixtures("fresh")
async def test_torch_s_world_and_ours_on_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch's stays
    store = torch_dist.HashStore()
    torch_dist.init_process_group("gloo", store=store, **ONE)
    try:
        await dist.init_process_group("gloo", store=store, **ONE)
        tensors = torch.ones(1), torch.ones(1)
        torch_dist.all_reduce(tensors[0])
        await dist.all_reduce(tensors[1])
        torch_c10d._get_default_store().set("theirs", "1")
        await dist._get_default_store().set("ours", "2")
        assert await dist._get_default_store().get("theirs") == b"1"  # under one prefix
        assert torch_c10d._get_default_store().get("ours") == b"2"
        await dist.destroy_process_group()
    finally:
        torch_dist.destroy_process_group()


@pytest.mark.usefixtures("fresh")
async def test_over_tcp() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"tcp://127.0.0.1:{port}"
    for _ in range(2):  # names and store begin anew
        await dist.init_process_group("gloo", url, world_size=1, rank=0, timeout=LIMIT)
        assert dist._world.init_method == url
        store = dist._get_default_store()
        assert isinstance(store, PrefixStore)
        assert isinstance(store.underlying, PrefixStore)
        assert (store.name, store.underlying.name) == ("0/", "default_pg")
        assert dist.group.WORLD.group_name == "0"  # type: ignore[union-attr]
        await dist.destroy_process_group()
        assert not dist.is_initialized()


async def test_what_failed_leaves_nothing(fresh: dist.World, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = sys.excepthook
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(RendezvousError):  # the port is in use
            await dist.init_process_group("gloo", url, timeout=LIMIT, **ONE)
    with pytest.raises(RuntimeError, match="not available"):
        await dist.init_process_group("ucc", store=MemoryStore(), **ONE)
    assert not fresh.starting
    assert fresh.group_count == 0
    assert sys.excepthook is hook
    await dist.init_process_group("loopback", store=MemoryStore(), **ONE)
    await dist.destroy_process_group()


async def test_cancelling_leaves_nothing(fresh: dist.World) -> None:
    task = asyncio.ensure_future(dist.init_process_group("loopback", store=MemoryStore(), world_size=2, rank=0))
    while not fresh.starting:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not fresh.starting
    assert not dist.is_initialized()


async def test_the_hook_is_there_until_the_end() -> None:
    hook = sys.excepthook
    async with alone():
        assert sys.excepthook is not hook
    assert sys.excepthook is hook


async def test_the_rank_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []
    monkeypatch.setattr(init, "_set_global_rank", said.append)
    async with alone() as pg:
        assert said == [0]
        dist._update_default_pg(pg)
    assert said == [0, 0, -1]


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False), ("2", False)])
def test_barrier_after_init_is_asked_for(value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("TORCH_DIST_INIT_BARRIER", raising=False)
    else:
        monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", value)
    assert dist._is_barrier_after_init() == expected


async def test_barriers_after_init_and_new_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")

    async def body(rank: int) -> None:
        await dist.new_group([1])  # all ranks pass, those that are not in it, too
        local = await dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
        store = dist._get_default_store()
        assert isinstance(store, PrefixStore)
        assert await store.get("store_based_barrier_key:1") == b"3"
        assert await store.underlying.get("store_based_barrier_key:0") == b"3"
        if local is not None:
            name = dist._get_process_group_name(local)
            assert await dist._get_process_group_store(local).get(f"store_based_barrier_key:{name}") == b"2"  # type: ignore[arg-type]

    await run_ranks(3, body)


@pytest.mark.ranks(2)
async def test_in_processes() -> None:
    for backend in ("auto", "gloo"):
        await dist.init_process_group(backend, timeout=LIMIT)
        rank = dist.get_rank()
        tensor = torch.full((3,), rank + 1.0)
        await dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 3
        pair = await dist.new_group([1, 0], backend="gloo")
        work = dist.broadcast(tensor.fill_(rank), 1, pair, async_op=True)
        assert work is not None
        await work
        assert tensor.tolist() == [1.0] * 3
        if rank == 0:
            await dist.send_object_list([{"from": 0}], 1)
        else:
            objects = [None]
            assert await dist.recv_object_list(objects, 0) == 0
            assert objects == [{"from": 0}]
        await dist.monitored_barrier()
        split = await dist.split_group(None, [[0, 1]])
        await dist.barrier(split)
        await dist.destroy_process_group()


async def test_a_barrier_that_fails_leaves_no_comm(fresh: dist.World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    closed: list[str] = []
    close = Comm.aclose

    async def aclose(self: Comm) -> None:
        await close(self)
        closed.append(self.name)

    monkeypatch.setattr(Comm, "aclose", aclose)

    async def fail(*_: Any) -> None:
        raise dist.DistStoreError("nobody came")

    monkeypatch.setattr(init, "store_based_barrier", fail)
    with pytest.raises(dist.DistStoreError, match="nobody came"):
        await dist.init_process_group("loopback", store=MemoryStore(), **ONE)
    assert closed == ["0"]
    assert not fresh.pg_map
    assert not fresh.starting
