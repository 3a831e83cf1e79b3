"""What torch knows of groups that it has not made."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from asynccomm.interop import torch_registry
from asynccomm.interop.torch_backend import group_over
from asynccomm.interop.torch_registry import NoStore, store_of
from asynccomm.testing import loopback_world


async def test_added_and_dropped() -> None:
    async with loopback_world(1) as (comm,):
        group = group_over(comm, name="mine")
        torch_registry.add(group, "mine", [3])
        try:
            assert torch_registry.group_called("mine") is group
            assert torch_registry.group_called("other") is None
            assert c10d._resolve_process_group("mine") is group
            assert dist.get_process_group_ranks(group) == [3]
            assert dist.get_group_rank(group, 3) == 0
            assert dist.get_backend(group) == "asynccomm"
            assert store_of(group) is None
        finally:
            torch_registry.drop(group)
        assert torch_registry.group_called("mine") is None
        with pytest.raises(RuntimeError):
            c10d._resolve_process_group("mine")
        await comm.all_reduce(torch.ones(1))  # the comm stays


async def test_the_default() -> None:
    async with loopback_world(1) as (comm,):
        group = group_over(comm, name="all")
        assert torch_registry.default() is None
        torch_registry.add(group, "all", [0])
        torch_registry.make_default(group)
        try:
            assert torch_registry.default() is group
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        finally:
            dist.destroy_process_group()
        assert torch_registry.default() is None
        assert not dist.is_initialized()


async def test_stores() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = store_of(dist.group.WORLD)
        assert found is not None
        found.set("key", "value")
        assert found.get("key") == b"value"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.set("key", "value"),
        lambda store: store.get("key"),
        lambda store: store.add("key", 1),
        lambda store: store.check(["key"]),
        lambda store: store.wait(["key"]),
        lambda store: store.delete_key("key"),
        lambda store: store.compare_set("key", "", "value"),
        lambda store: store.num_keys(),
        lambda store: dist.PrefixStore("room", store).get("key"),
    ],
)
def test_no_store(call: object) -> None:
    assert callable(call)
    with pytest.raises(RuntimeError, match="group 'mesh' was made over comms and has no store"):
        call(NoStore("mesh"))
