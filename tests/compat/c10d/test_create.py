"""How one group is made: stores, backends, devices."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as torch_c10d

import asynccomm.compat.c10d as dist
from asynccomm import BackendError, Comm, CommOptions, MemoryStore, new_comm
from asynccomm.compat.c10d import create
from asynccomm.compat.c10d.create import BackendPlan, make_group, options_of
from asynccomm.store.base import PrefixStore
from tests.compat.c10d.worlds import alone, run_ranks

LIMIT = timedelta(seconds=30)


async def test_keys_are_where_torch_has_them() -> None:
    store = MemoryStore()
    with dist.use_world(dist.World()):
        await dist.init_process_group("loopback", store=store, world_size=1, rank=0)
        await dist.new_group([0])
        await dist.destroy_process_group()
    comms = {key for key in store._values if "asynccomm/" in key}
    starts = {key[: key.index("asynccomm/")] for key in comms}
    assert starts == {"0//cpu//", "0//1//cpu//"}


async def test_stores_by_group() -> None:
    async with alone():
        pg = await dist.new_group([0])
        await dist._get_process_group_store(pg).set("mine", "1")
        await dist._get_default_store().set("all", "2")
        store = dist._get_default_store()
        while isinstance(store, PrefixStore):
            store = store.underlying
        assert await store.get("0//1//mine") == b"1"
        assert await store.get("0//all") == b"2"


async def test_names_in_use() -> None:
    async with alone() as pg:
        plan = BackendPlan(name="0", ranks=[0], rank=0, backend="loopback", store=MemoryStore(), timeout=LIMIT)
        with pytest.raises(ValueError, match="there is a group of the name '0' already"):
            await make_group(plan)
        assert dist._world.pg_names == {pg: "0"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_devices_that_cannot_be_bound(device: str) -> None:
    async with alone():
        with pytest.raises(ValueError, match="device_id must be an accelerator with an index"):
            await dist.new_group([0], device_id=torch.device(device))


@pytest.mark.parametrize("backend", ["mpi", "ucc", "xccl"])
async def test_backends_that_are_not_available(backend: str) -> None:
    async with alone():
        with pytest.raises(RuntimeError, match=f"backend '{backend}' is not available here"):
            await dist.new_group([0], backend=backend)


async def test_gloo_and_nccl_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "is_gloo_available", lambda: False)
    monkeypatch.setattr(create, "is_nccl_available", lambda: False)
    async with alone():
        for backend in ("gloo", "nccl", "cpu:gloo,cuda:nccl"):
            with pytest.raises(RuntimeError, match="is not available here"):
                await dist.new_group([0], backend=backend)


async def test_backends_that_nobody_knows() -> None:
    async with alone():
        with pytest.raises(AssertionError, match="unknown backend type 'unheard'"):
            await dist.new_group([0], backend="cpu:unheard")
        with (
            pytest.warns(UserWarning, match="the devices of backend .* are not known"),
            pytest.raises(AssertionError, match="unknown backend type 'unheard'"),
        ):
            await dist.new_group([0], backend="unheard")


@pytest.mark.usefixtures("tables")
async def test_a_backend_of_ones_own() -> None:
    calls: list[Any] = []

    async def make(store: Any, rank: int, size: int, timeout: timedelta) -> Comm:
        calls.append((rank, size, timeout))
        return await new_comm("loopback", store=store, rank=rank, size=size, name="mine")

    dist.Backend.register_backend("mine", make, devices=["cpu", "cuda"])

    async def body(rank: int) -> None:
        tensor = torch.ones(1)
        await dist.all_reduce(tensor)
        assert tensor.item() == 2
        assert dist.group.WORLD.comm().name == "mine"  # type: ignore[union-attr]
        assert dist.get_backend_config() == "cpu:mine,cuda:mine"

    await run_ranks(2, body, backend="mine", timeout=LIMIT)
    assert sorted(calls) == [(0, 2, LIMIT), (1, 2, LIMIT)]


@pytest.mark.usefixtures("tables")
async def test_a_backend_of_ones_own_that_is_told_more() -> None:
    told: list[Any] = []

    def make(options: Any, own: Any) -> Any:
        told.append((options, own))
        return new_comm(
            "loopback", store=options.store, rank=options.group_rank, size=options.group_size, name=options.group_id
        )

    dist.Backend.register_backend("mine", make, True, devices="cpu")
    async with alone():
        pg = await dist.new_group([0], backend="mine", pg_options="anything", timeout=LIMIT)
        assert isinstance(pg, dist.ProcessGroup)
        assert pg.name() == "mine"
    ((options, own),) = told
    assert own == "anything"
    assert (options.group_rank, options.group_size, options.timeout, options.group_id) == (0, 1, LIMIT, "1")
    assert options.global_ranks_in_group == [0]


@pytest.mark.usefixtures("tables")
async def test_a_backend_may_make_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = Comm.aclose

    async def aclose(self: Comm) -> None:
        await close(self)
        closed.append(self.name)

    class Mine(dist.ProcessGroup):
        pass

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        default = dist._get_default_group()
        return Mine("", "mine", [0], 0, "mine", default.config, {"cpu": default.comm()}, timeout)

    dist.Backend.register_backend("mine", make, devices=["cpu", "cuda"])
    async with alone():
        pg = await dist.new_group([0], backend="cpu:mine,cuda:loopback")
        assert type(pg) is Mine
        assert pg.group_name == dist._get_process_group_name(pg) == "1"
        assert pg.device_types == ["cpu"]  # it is the group, and the other device has none
        with monkeypatch.context() as patch:
            patch.setattr(Comm, "aclose", aclose)
            assert type(await dist.new_group([0], backend="cuda:fake,cpu:mine")) is Mine
        assert closed == ["2"]


@pytest.mark.usefixtures("tables")
async def test_a_backend_that_makes_something_else() -> None:
    dist.Backend.register_backend("mine", lambda *_: "nothing", devices="cpu")
    async with alone() as pg:
        with pytest.raises(TypeError, match="backend 'mine' must make a Comm or a ProcessGroup, got 'nothing'"):
            await dist.new_group([0], backend="mine")
        assert list(dist._world.pg_map) == [pg]


@pytest.mark.usefixtures("tables")
async def test_what_connected_is_closed_if_the_rest_does_not() -> None:
    made: list[Comm] = []

    async def good(store: Any, rank: int, size: int, timeout: timedelta) -> Comm:
        made.append(await new_comm("loopback", store=store, rank=rank, size=size))
        return made[0]

    def bad(*_: object) -> None:
        raise BackendError("no")

    dist.Backend.register_backend("good", good, devices="cpu")
    dist.Backend.register_backend("bad", bad, devices="cuda")
    async with alone():
        with pytest.raises(BackendError, match="no"):
            await dist.new_group([0], backend="cpu:good,cuda:bad")
        assert "broken" in repr(made[0]) or "closed" in repr(made[0])


async def test_one_backend_for_all_devices_connects_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with alone("cpu:loopback,cuda:loopback,xpu:loopback") as pg:
        assert len(pg.comms) == 1
        assert pg.device_types == ["cpu", "cuda", "xpu"]


def test_options() -> None:
    assert options_of("gloo", None, LIMIT) == {}
    ours = CommOptions(high_priority_stream=True, max_ops=3, hints={"control": "off"})
    found = options_of("gloo", ours, LIMIT)
    assert (found["high_priority_stream"], found["max_ops"], found["hints"]) == (True, 3, {"control": "off"})
    assert "timeout" not in found
    with pytest.raises(TypeError, match="pg_options must be CommOptions for backend 'gloo'"):
        options_of("gloo", "x", LIMIT)
    with pytest.raises(AssertionError, match=r"pg_options must be CommOptions or ProcessGroupNCCL.Options"):
        options_of("nccl", "x", LIMIT)


def test_options_of_torch_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        _timeout = LIMIT
        is_high_priority_stream = True

    class Group:
        pass

    Group.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(torch_c10d, "ProcessGroupNCCL", Group, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert options_of("nccl", Options(), LIMIT) == {"high_priority_stream": True}
    with pytest.warns(UserWarning, match="a timeout of its own, which is ignored"):
        assert options_of("nccl", Options(), timedelta(1)) == {"high_priority_stream": True}


async def test_options_reach_the_comm() -> None:
    async with alone(pg_options=CommOptions(max_ops=7), timeout=LIMIT) as pg:
        assert pg.comm().options.max_ops == 7
        assert pg.comm().options.timeout == 30


async def test_where_a_device_is_bound_groups_are_split_off() -> None:
    async def body(rank: int) -> None:
        default = dist._get_default_group()
        assert default.comm().name == "0"
        assert (await dist.new_group([0, 1])).comm().name == "1"  # type: ignore[union-attr]
        default.bound_device_id = torch.device("cuda", 0)
        split = await dist.new_group([2, 1])
        if rank:
            assert split.comm().name == "0/2"  # type: ignore[union-attr]
            tensor = torch.tensor([rank])
            await dist.all_reduce(tensor, group=split)
            assert tensor.item() == 3
        other = await dist.new_group([0, 1, 2], pg_options=CommOptions())
        assert other.comm().name == "3"  # type: ignore[union-attr]

    async def three(rank: int) -> None:
        if rank == 2:
            await dist.new_group([0, 1])
            default = dist._get_default_group()
            default.bound_device_id = torch.device("cuda", 0)
            split = await dist.new_group([2, 1])
            await dist.all_reduce(torch.tensor([rank]), group=split)
            await dist.new_group([0, 1, 2], pg_options=CommOptions())
        else:
            await body(rank)

    await run_ranks(3, three)
