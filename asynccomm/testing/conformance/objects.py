"""Checks of Python objects: collectives, point to point, and streams."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable
from typing import Any

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.errors import PayloadError
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import DTYPES, everyones, expect_equal, negated, reduced, sample, strided

LARGE = 3 << 20  # bytes; larger than any transport's chunk


@dataclasses.dataclass
class CustomObject:
    """An object that can only be received with ``weights_only=False``."""

    rank: int


def _objects(rank: int) -> list[Any]:
    """Objects of one rank: plain, nested, with tensors, large, tiny. On the CPU, the device of all received objects."""
    with torch.device("cpu"):
        return _made_objects(rank)


def _made_objects(rank: int) -> list[Any]:
    tensor = sample(rank, (3, 4))
    return [
        None,
        rank,
        -(10**30) - rank,
        "",
        f"rank {rank} \N{SNOWMAN}",
        (rank + 0.5, float("inf"), True, 1 - 2j),
        b"\x00" * (rank + 1),
        {"rank": rank, 1: [rank] * rank, None: {"deep": [({"er": {rank}},)]}, (1, 2): {rank}},
        tensor,
        [sample(rank, (2,), dtype) for dtype in DTYPES],
        {"strided": strided(tensor), "negated": negated(tensor), "conj": sample(rank, (2,), torch.complex64).conj()},
        {"dtype": torch.float16, "size": torch.Size([rank])},
        [torch.zeros(0), torch.zeros(2, 0, 3), torch.tensor(rank), sample(rank, (50_000,))],
    ]


def expect_same(actual: object, expected: object, what: str) -> None:
    """Compare objects, including their types and the tensors in them."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{what}: got {actual!r}, expected a tensor"
        assert actual.device == expected.device, f"{what}: a tensor arrived on {actual.device}"
        expect_equal(actual, expected, what)
        return
    assert type(actual) is type(expected), f"{what}: got {actual!r}, expected {expected!r}"
    if isinstance(expected, (list, tuple)):
        assert isinstance(actual, (list, tuple))
        assert len(actual) == len(expected), f"{what}: got {len(actual)} items, expected {len(expected)}"
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            expect_same(one, other, f"{what}[{i}]")
    elif isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert list(actual) == list(expected), f"{what}: got keys {list(actual)}, expected {list(expected)}"
        for key, value in expected.items():
            expect_same(actual[key], value, f"{what}[{key!r}]")
    else:
        assert actual == expected, f"{what}: got {str(actual)[:100]}, expected {str(expected)[:100]}"


async def objects_of_every_kind_to_all(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    everyone = [_objects(r) for r in range(size)]
    works = [comm.all_gather_object(obj) for obj in everyone[rank]]
    for i, work in enumerate(works):
        expect_same(await work, [objects[i] for objects in everyone], f"all_gather_object {i}")
    expect_same(await comm.all_gather_object(everyone[rank]), everyone, "all_gather_object of all")


async def objects_to_and_from_every_root(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for root in range(size):
        at_root = rank == root
        everyone = [_objects(r + root) for r in range(size)]
        obj = everyone[root]
        gathered = await comm.gather_object(everyone[rank], root)
        expect_same(gathered, everyone if at_root else None, f"gather_object to {root}")
        got = await comm.broadcast_object(obj if at_root else "not looked at", root)
        assert not at_root or got is obj, "broadcast_object gives the root its own object"
        expect_same(got, obj, f"broadcast_object from {root}")
        mine = list(obj) if at_root else [None] * len(obj)
        assert await comm.broadcast_object_list(mine, root) is mine
        expect_same(mine, obj, f"broadcast_object_list from {root}")
        scattered = await comm.scatter_object_list(everyone if at_root else None, root)
        expect_same(scattered, everyone[rank], f"scatter_object_list from {root}")


async def objects_that_differ_in_size_between_ranks(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    for late in (0, size - 1):  # the rank with the largest object
        everyone: list[Any] = [bytes([r % 256]) * (LARGE // 2) if r == late else "x" * r for r in range(size)]
        expect_same(await comm.all_gather_object(everyone[rank]), everyone, "all_gather_object of various sizes")
        gathered = await comm.gather_object(everyone[rank], 0)
        expect_same(gathered, everyone if rank == 0 else None, "gather_object of various sizes")
        scattered = await comm.scatter_object_list(everyone if rank == 0 else None, 0)
        expect_same(scattered, everyone[rank], "scatter_object_list of various sizes")


async def large_objects(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size

    def large(owner: int) -> Any:
        with torch.device("cpu"):
            tensor = sample(owner, (LARGE // 8,))
        return {"bytes": bytes([owner]) * LARGE, "tensor": tensor, "list": list(range(9999))}

    expect_same(await comm.broadcast_object(large(0) if rank == 0 else None, 0), large(0), "a large broadcast_object")
    received, sent = comm.recv_object(previous, 1), comm.send_object(large(rank), following, 1)
    expect_same(await received, large(previous), "a large object")
    await sent


async def objects_from_rank_to_rank(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    for early in (True, False):  # whether the receives are posted first
        expected = _objects(previous)
        receives = [comm.recv_object(previous, 2) for _ in expected] if early else []
        sends = [comm.send_object(obj, following, 2) for obj in _objects(rank)]
        if not early:
            await comm.barrier()
            receives = [comm.recv_object(previous, 2) for _ in expected]
        for i, (work, obj) in enumerate(zip(receives, expected, strict=True)):
            expect_same(await work, obj, f"object {i} from {previous}")
            assert work.source == previous, f"source is {work.source}, not {previous}"
        await asyncio.gather(*sends)
    items: list[Any] = [None] * len(_objects(0))
    filled, sent = comm.recv_object_list(items, previous, 2), comm.send_object_list(_objects(rank), following, 2)
    assert await filled is items
    expect_same(items, _objects(previous), "recv_object_list")
    await sent
    to_myself = comm.send_object({"me": rank}, rank, 5)
    expect_same(await comm.recv_object(rank, 5), {"me": rank}, "an object to oneself")
    await to_myself


async def objects_keep_their_order_and_tags_beside_tensors(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    tags = [3, 0, 7]
    works: list[Awaitable[Any]] = []
    for i in range(4):
        for tag in tags:  # tensors and objects of the same tag do not match
            works.append(comm.send_object((rank, tag, i), following, tag))
            works.append(comm.send(sample(rank, (4,), salt=10 * tag + i), following, tag))
    for tag in sorted(tags):  # not in the order of sending
        for i in range(4):
            received = torch.zeros(4)
            works.append(comm.recv(received, previous, tag))
            expect_same(await comm.recv_object(previous, tag), (previous, tag, i), f"object {i} under tag {tag}")
            await works[-1]
            expect_equal(received, sample(previous, (4,), salt=10 * tag + i), f"tensor {i} under tag {tag}")
    await asyncio.gather(*works)


async def objects_beside_collectives_in_flight(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    tensors = [sample(rank, (30 * (i + 1),), salt=i) for i in range(8)]
    works: list[tuple[Any, Any]] = []
    for i, tensor in enumerate(tensors):
        comm.all_reduce(tensor)
        works.append((comm.all_gather_object((rank, i)), [(r, i) for r in range(size)]))
        works.append((comm.broadcast_object([i] * i, i % size), [i] * i))
    for work, expected in works:
        expect_same(await work, expected, "an object beside collectives")
    await comm.barrier()
    for i, tensor in enumerate(tensors):
        expected = reduced(everyones(size, (30 * (i + 1),), salt=i), ReduceOp.SUM)
        expect_equal(tensor, expected, "all_reduce beside objects")


async def objects_from_any_source(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    try:
        receives = [comm.recv_object(None, 11)]
    except ValueError as exc:  # a backend may lack this, but must raise at the call
        assert "any source" in str(exc), f"recv_object(src=None) was refused for another reason: {exc}"
        return
    receives += [comm.recv_object(tag=11) for _ in range(2 * size - 1)]
    objects = [[f"{r}-{i}" * (1 + 2000 * r) for i in range(2)] for r in range(size)]
    sends = [comm.send_object(obj, peer, 11) for peer in range(size) for obj in objects[rank]]
    left = [list(mine) for mine in objects]
    for work in receives:
        obj = await work
        assert work.source is not None, "a receive must say whose object it got"
        expect_same(obj, left[work.source].pop(0), f"object from any source, of {work.source}")
    assert not any(left), "a rank's object was not taken"
    await asyncio.gather(*sends)


async def refused_objects_leave_the_comm_usable(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    custom = CustomObject(rank)
    got = await comm.all_gather_object(custom, weights_only=False)
    assert got == [CustomObject(r) for r in range(size)], f"all_gather_object without weights_only: {got}"
    trusting = rank == 0  # of a class that is not known to be safe: refused by the ranks that do not trust rank 0
    gathered = comm.all_gather_object(custom if trusting else rank, weights_only=not trusting)
    scattered = comm.scatter_object_list([custom] * size if trusting else None, 0, weights_only=not trusting)
    if rank:
        await _refused(gathered)
        await _refused(scattered)
        await _refused(comm.broadcast_object(None, 0))
        await _refused(comm.broadcast_object(None, 0, max_bytes=1000))
        mine = [1, 2]
        await _refused(comm.broadcast_object_list(mine, 0))  # the root's list is longer
        assert mine == [1, 2], "a list was filled with what was refused"
    else:
        expect_same(await gathered, [custom, *range(1, size)], "objects that other ranks refuse")
        expect_same(await scattered, custom, "an object that other ranks refuse")
        await comm.broadcast_object(custom, 0, weights_only=False)
        await comm.broadcast_object(bytes(LARGE), 0)
        await comm.broadcast_object_list([1, 2, 3], 0)
    sends = [comm.send_object(obj, following, weights_only=False) for obj in (custom, bytes(LARGE), "good")]
    await _refused(comm.recv_object(previous))
    await _refused(comm.recv_object(previous, max_bytes=1000))
    expect_same(await comm.recv_object(previous), "good", "an object after two that were refused")
    await asyncio.gather(*sends)
    for obj, text in ((lambda: None, "what cannot be pickled"), (custom, "what receivers refuse")):
        try:
            comm.all_gather_object(obj)
        except TypeError:
            pass
        else:
            raise AssertionError(f"{text} was sent")
    expect_same(await comm.all_gather_object(rank), list(range(size)), "objects after some that were refused")


async def _refused(awaitable: Awaitable[Any]) -> None:
    try:
        got = await awaitable
    except PayloadError:
        return
    raise AssertionError(f"what must be refused was taken: {str(got)[:200]}")


async def streams_to_the_next_rank(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size

    async def put() -> None:
        async with comm.sink(following, 2) as sink:
            for obj in [*_objects(rank), *range(50)]:
                await sink.put(obj)

    putting = asyncio.ensure_future(put())
    expected = [*_objects(previous), *range(50)]
    got = []
    stream = comm.stream(previous, 2)
    async for obj in stream:
        got.append(obj)
        if len(got) == 3:
            break  # loses no object
    await comm.barrier()
    got += [obj async for obj in stream]
    expect_same(got, expected, f"stream from {previous}")
    await putting
    try:
        async with comm.sink(following, 2) as sink:
            sink.put("before")
            raise KeyError("my own problem")
    except KeyError:
        pass
    broken = comm.stream(previous, 2)
    assert await anext(broken) == "before"
    try:
        await anext(broken)
    except PayloadError as exc:
        assert "my own problem" in str(exc), f"a stream whose sender failed must say why: {exc}"
    else:
        raise AssertionError("a stream whose sender failed went on")
    sink = comm.sink(following, 2)  # reuse of the tag
    closing = [sink.put(rank), sink.close()]
    assert [obj async for obj in comm.stream(previous, 2)] == [previous]
    await asyncio.gather(*closing)
