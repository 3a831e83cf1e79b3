"""Collectives on objects."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import asynccomm.compat.c10d as dist
from asynccomm import PayloadError
from asynccomm.compat.c10d.process_group import ProcessGroup
from tests.compat.c10d.worlds import alone, run_ranks

ARGUMENTS = {
    "all_gather_object": "object_list obj group weights_only",
    "gather_object": "obj object_gather_list dst group group_dst weights_only",
    "send_object_list": "object_list dst group device group_dst use_batch weights_only",
    "recv_object_list": "object_list src group device group_src use_batch weights_only",
    "broadcast_object_list": "object_list src group device group_src weights_only",
    "scatter_object_list": ("scatter_object_output_list scatter_object_input_list src group group_src weights_only"),
}


class Thing:
    """What only a plain pickle can bring."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    assert list(inspect.signature(getattr(dist, name)).parameters) == ARGUMENTS[name].split()


async def test_all_gather_object() -> None:
    async def body(rank: int) -> None:
        room: list[Any] = [None] * 3
        work = dist.all_gather_object(room, Thing(rank))
        assert await work is None
        assert room == [Thing(0), Thing(1), Thing(2)]
        sizes: list[Any] = [None] * 3
        await dist.all_gather_object(sizes, "x" * 1000 * rank)  # of any sizes
        assert list(map(len, sizes)) == [0, 1000, 2000]
        with pytest.raises(ValueError, match="a place for each of the 3 ranks, got 2"):
            dist.all_gather_object([None] * 2, 1)
        with pytest.raises(TypeError, match="object_list must be a list"):
            dist.all_gather_object((None,) * 3, 1)  # type: ignore[arg-type]

    await run_ranks(3, body)


async def test_gather_object() -> None:
    async def body(rank: int) -> None:
        for where, root in (({}, 0), ({"dst": 1}, 1), ({"group_dst": 1}, 1)):
            room: list[Any] = [None] * 2
            assert await dist.gather_object(Thing(rank), room if rank == root else None, **where) is None
            assert room == ([Thing(0), Thing(1)] if rank == root else [None] * 2)
        with pytest.raises(ValueError, match="object_gather_list must be given"):
            dist.gather_object(1, None if rank == 0 else [None] * 2)

    await run_ranks(2, body)


async def test_broadcast_object_list() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2])
        if rank == 0:
            return
        for where in ({"src": 2}, {"group_src": 1}):
            objects: list[Any] = [Thing(1), "two"] if rank == 2 else [None, None]
            sent = list(objects)
            await dist.broadcast_object_list(objects, group=pg, **where)
            assert objects == [Thing(1), "two"]
            if rank == 2:
                assert objects[0] is sent[0]  # the sender's stay
        with pytest.raises(PayloadError) if rank == 1 else nullcontext():
            await dist.broadcast_object_list([1, 2] if rank == 2 else [None], 2, pg)

    await run_ranks(3, body)


async def test_scatter_object_list() -> None:
    async def body(rank: int) -> None:
        for where, root in (({}, 0), ({"src": 1}, 1), ({"group_src": 1}, 1)):
            room: list[Any] = [None, "kept"]
            given = [Thing(10), Thing(11)] if rank == root else None
            assert await dist.scatter_object_list(room, given, **where) is None
            assert room == [Thing(10 + rank), "kept"]
        for bad in ([], (None,), None):
            with pytest.raises(ValueError, match="list of at least one item"):
                dist.scatter_object_list(bad, [1, 2])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="scatter_object_input_list must be given"):
            dist.scatter_object_list(room, None, rank)

    await run_ranks(2, body)


async def test_object_messages() -> None:
    async def body(rank: int) -> None:
        pg = await dist.new_group([1, 2])
        if rank == 1:
            await dist.send_object_list([Thing(1), {"a": torch.ones(2)}], 2, pg)
            await dist.send_object_list([3], group=pg, group_dst=1, device=torch.device("cpu"), use_batch=True)
            await dist.send_object_list([4], 2, pg)
            await dist.send_object_list([], 2, pg)
        elif rank == 2:
            objects: list[Any] = [None, None]
            assert await dist.recv_object_list(objects, 1, pg) == 1
            assert objects[0] == Thing(1)
            assert objects[1]["a"].tolist() == [1.0, 1.0]
            objects = [None]
            assert await dist.recv_object_list(objects, group=pg, group_src=0, use_batch=True) == 1
            assert objects == [3]
            assert await dist.recv_object_list(objects, group=pg) == 1  # from anybody
            assert objects == [4]
            assert await dist.recv_object_list([], 1, pg) == 1

    await run_ranks(3, body)


async def test_from_anybody() -> None:
    async def body(rank: int) -> None:
        if rank:
            await dist.send_object_list([rank, rank], 0)
        else:
            seen = set()
            for _ in range(2):
                objects: list[Any] = [None, None]
                sender = await dist.recv_object_list(objects)
                assert objects == [sender, sender]
                seen.add(sender)
            assert seen == {1, 2}

    await run_ranks(3, body)


async def test_a_group_of_one() -> None:
    async with alone():
        room: list[Any] = [None]
        await dist.all_gather_object(room, Thing(1))
        await dist.gather_object(Thing(2), room)
        assert room == [Thing(2)]
        await dist.scatter_object_list(room, [Thing(3)])
        await dist.broadcast_object_list(room)
        assert room == [Thing(3)]


# -- objects as tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [None, 3, "x" * 1000, {"a": [1, 2]}, Thing(1)], ids=lambda value: type(value).__name__
)
def test_objects_as_tensors(value: object) -> None:
    content, size = dist._object_to_tensor(value, "cpu")
    assert (content.dtype, size.dtype) == (torch.uint8, torch.int64)
    assert size.item() == content.numel()
    padded = torch.cat([content, torch.full((7,), 255, dtype=torch.uint8)])
    assert dist._tensor_to_object(padded, size) == value
    assert dist._tensor_to_object(padded, int(size)) == value


async def test_devices_of_objects() -> None:
    async with alone("cpu:loopback,cuda:loopback") as pg:
        assert dist._get_object_coll_device() == dist._get_object_coll_device(pg) == "cpu"
        assert dist._device_capability() == ["cpu", "cuda"]
        with pytest.raises(TypeError, match="group must be a ProcessGroup"):
            dist._get_object_coll_device("gloo")
        with pytest.warns(FutureWarning, match="_get_pg_default_device is deprecated"):
            assert dist._get_pg_default_device(pg) == torch.device("cpu")
        empty = ProcessGroup("x", "", [0], 0, "", pg.config, {}, pg.timeout)
        assert dist._get_object_coll_device(empty) == "cpu"
        with pytest.warns(FutureWarning), pytest.raises(RuntimeError, match="no default device"):
            dist._get_pg_default_device(empty)


async def test_safe_objects_on_request() -> None:
    async def body(rank: int) -> None:
        room: list[Any] = [None] * 2
        await dist.all_gather_object(room, {"rank": rank}, weights_only=True)
        assert room == [{"rank": 0}, {"rank": 1}]
        for call in (
            lambda: dist.all_gather_object(room, Thing(rank), weights_only=True),
            lambda: dist.gather_object(Thing(rank), room if rank == 0 else None, weights_only=True),
            lambda: dist.send_object_list([Thing(rank)], 1 - rank, weights_only=True),
        ):
            with pytest.raises(TypeError, match="Thing"):
                await call()
        if rank == 0:
            with pytest.raises(TypeError, match="Thing"):
                await dist.broadcast_object_list([Thing(0)], 0, weights_only=True)
            with pytest.raises(TypeError, match="Thing"):
                await dist.scatter_object_list([None], [Thing(0), Thing(1)], 0, weights_only=True)
            await dist.send_object_list([Thing(0)], 1)
        else:
            with pytest.raises(PayloadError):
                await dist.recv_object_list([None], 0, weights_only=True)

    await run_ranks(2, body)
