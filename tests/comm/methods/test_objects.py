"""Python objects between ranks."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from asynccomm import CollectiveMismatchError, Comm, PayloadError, ReduceOp, Work, register_safe
from asynccomm.testing.local import loopback_world


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class Opener:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def nothing_sent(*comms: Comm) -> None:
    assert [comm.statistics().submitted for comm in comms] == [0] * len(comms)


# -- collectives ------------------------------------------------------------------------------------------------------


async def test_all_gather_object() -> None:
    async with loopback_world(3) as comms:
        objects = [{"rank": 0}, [1, torch.ones(2)], None]
        works = [comm.all_gather_object(obj) for comm, obj in zip(comms, objects, strict=True)]
        for rank, work in enumerate(works):
            got: Any = await work
            assert got[0] == {"rank": 0}
            assert got[1][1].tolist() == [1, 1]
            assert got[2] is None
            assert got[rank] is not objects[rank] or rank == 2, "a copy"
            assert await work is got, "decoded once"
        assert (await works[1])[1] is not (await works[0])[1]


async def test_all_gather_object_alone_copies_too() -> None:
    async with loopback_world(1) as (comm,):
        obj = {"t": torch.zeros(2)}
        work = comm.all_gather_object(obj)
        obj["t"].fill_(1)
        (got,) = await work
        assert got["t"].tolist() == [0, 0]  # type: ignore[index]


async def test_gather_object() -> None:
    async with loopback_world(3) as comms:
        mine = [1]
        works = [comm.gather_object(mine if comm.rank == 1 else comm.rank * 10, 1) for comm in comms]
        assert await works[0] is None
        assert await works[2] is None
        got = await works[1]
        assert got == [0, [1], 20]
        assert got[1] is not mine


async def test_broadcast_object() -> None:
    async with loopback_world(3) as comms:
        obj = {"a": torch.arange(3)}
        works = [comm.broadcast_object(obj if comm.rank == 2 else (lambda: "not looked at"), 2) for comm in comms]
        assert await works[2] is obj
        for work in works[:2]:
            got: Any = await work
            assert got["a"].tolist() == [0, 1, 2]
            assert got["a"].data_ptr() != obj["a"].data_ptr()


async def test_broadcast_object_list() -> None:
    async with loopback_world(2) as (a, b):
        source, target = [1, {"x": 2}], [None, "old"]
        item = source[1]
        root, other = a.broadcast_object_list(source, 0), b.broadcast_object_list(target, 0)
        assert await root is source
        assert source[1] is item
        assert await other is target
        assert target == [1, {"x": 2}]
        a.broadcast_object_list([], 0)
        assert await b.broadcast_object_list([], 0) == []


async def test_a_list_of_another_length_stays_as_it_is() -> None:
    async with loopback_world(2) as (a, b):
        target = [7, 8, 9]
        a.broadcast_object_list([1, 2], 0)
        work = b.broadcast_object_list(target, 0)
        for _ in range(2):
            with pytest.raises(PayloadError, match="rank 0 sent 2 objects, but object_list has 3"):
                await work
        a.send_object_list([1], 1)
        with pytest.raises(PayloadError, match="rank 0 sent 1 objects, but object_list has 3"):
            await b.recv_object_list(target, 0)
        assert target == [7, 8, 9]
        a.barrier()
        await b.barrier()


async def test_scatter_object_list() -> None:
    async with loopback_world(3) as comms:
        mine = ["one"]
        inputs = ["zero", mine, torch.ones(2)]
        works = [
            comms[0].scatter_object_list(None, 1),
            comms[1].scatter_object_list(inputs, 1),
            comms[2].scatter_object_list([], 1),
        ]
        assert await works[0] == "zero"
        assert await works[1] == ["one"]
        assert await works[1] is not mine
        assert (await works[2]).tolist() == [1, 1]  # type: ignore[attr-defined]


async def test_the_roots_own_object_of_a_scatter_is_not_sent() -> None:
    async with loopback_world(2) as (a, b):
        a.scatter_object_list([torch.ones(1000), 1], 0)
        assert a.statistics().bytes_in_flight == 0
        assert await b.scatter_object_list(None, 0) == 1


async def test_the_roots_own_object_of_a_scatter_is_unpickled() -> None:
    async with loopback_world(1) as (comm,):
        tensor = torch.ones(2)
        with pytest.raises(ValueError, match="shares memory with"):
            async with comm.coalesce():
                comm.scatter_object_list([tensor], 0)
                comm.recv(tensor, 0)
        async with comm.coalesce():
            comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(3.0))
            kept = comm.scatter_object_list([tensor], 0)
        assert (await kept).tolist() == [3, 3]  # type: ignore[attr-defined]


async def test_different_methods_do_not_meet() -> None:
    async with loopback_world(2) as (a, b):
        a.broadcast_object(1, 0)
        with pytest.raises(CollectiveMismatchError, match=r"broadcast_object.*gather_object"):
            await b.gather_object(1, 0)


async def test_one_rank_alone_may_refuse_the_object_of_a_collective() -> None:
    async with loopback_world(3, timeout=10) as comms:
        works = [comm.all_gather_object(comm.rank, max_bytes=0 if comm.rank == 1 else 1000) for comm in comms]
        with pytest.raises(PayloadError, match="max_bytes is 0"):
            await works[1]
        assert await works[0] == [0, 1, 2]
        first, *others = comms
        works = [first.all_gather_object(Point(5), weights_only=False), *(c.all_gather_object(1) for c in others)]
        point, *rest = await works[0]
        assert point.x == 5  # type: ignore[attr-defined]
        assert rest == [1, 1]
        with pytest.raises(PayloadError, match="from rank 0 is refused"):
            await works[2]
        with pytest.raises(PayloadError):
            await works[1]


# -- point to point ---------------------------------------------------------------------------------------------------


async def test_send_and_receive() -> None:
    async with loopback_world(2) as (a, b):
        tensor = torch.arange(5)
        sent = a.send_object({"t": tensor}, 1)
        work = b.recv_object(0)
        got: Any = await work
        assert got["t"].tolist() == [0, 1, 2, 3, 4]
        assert work.source == 0
        assert await sent is None
        assert await work is got


async def test_to_oneself() -> None:
    async with loopback_world(1) as (comm,):
        comm.send_object([1], 0)
        assert await comm.recv_object(0) == [1]
        work = comm.recv_object()
        comm.send_object([2], 0)
        assert await work == [2]


async def test_tags_and_order() -> None:
    async with loopback_world(2) as (a, b):
        receives = [b.recv_object(0, tag) for tag in (3, 1, 3, 2)]
        for tag, obj in ((1, "one"), (2, "two"), (3, "three"), (3, "again")):
            a.send_object(obj, 1, tag)
        assert await asyncio.gather(*receives) == ["three", "one", "again", "two"]


async def test_any_source_gets_each_object_whole() -> None:
    async with loopback_world(4) as comms:
        receives = [comms[0].recv_object() for _ in range(6)]
        for i in range(2):
            for comm in comms[1:]:
                comm.send_object({"from": comm.rank, "i": i, "t": torch.full((10,), comm.rank)}, 0)
        seen = []
        for work in receives:
            got: Any = await work
            assert got["from"] == work.source
            assert got["t"].tolist() == [work.source] * 10
            seen.append((got["from"], got["i"]))
        assert sorted(seen) == [(r, i) for r in (1, 2, 3) for i in (0, 1)]


async def test_objects_and_tensors_under_one_tag_never_meet() -> None:
    async with loopback_world(2) as (a, b):
        obj = b.recv_object(0)
        tensor = torch.zeros(2)
        recv = b.recv(tensor, 0)
        a.send(torch.ones(2), 1)
        a.send_object("object", 1)
        assert await obj == "object"
        assert (await recv).tolist() == [1, 1]


async def test_lists() -> None:
    async with loopback_world(2) as (a, b):
        target: list[Any] = [None, None]
        a.send_object_list(("x", torch.ones(1)), 1, 4)
        work = b.recv_object_list(target, None, 4)
        assert await work is target
        assert work.source == 0
        assert target[0] == "x"
        assert target[1].tolist() == [1]


async def test_kinds_that_do_not_belong_together() -> None:
    async with loopback_world(2) as (a, b):
        a.send_object_list([1], 1)
        with pytest.raises(
            PayloadError, match=r"recv_object\(\) of rank 1 received .* rank 0 sent by send_object_list\(\)"
        ):
            await b.recv_object(0)
        a.send_object([1], 1)
        with pytest.raises(PayloadError, match=r"recv_object_list\(\) of rank 1 received .* sent by send_object\(\)"):
            await b.recv_object_list([None], 0)
        a.send_object("next", 1)
        assert await b.recv_object(0) == "next"


async def test_code_of_the_sender_runs_only_when_trusted(tmp_path: Path) -> None:
    async with loopback_world(2) as (a, b):
        receives = {
            "recv": lambda: b.recv_object(0),
            "list": lambda: b.recv_object_list([None], 0),
            "all_gather": lambda: b.all_gather_object(1),
            "gather": lambda: b.gather_object(1, 1),
            "broadcast": lambda: b.broadcast_object(None, 0),
            "broadcast_list": lambda: b.broadcast_object_list([None], 0),
            "scatter": lambda: b.scatter_object_list(None, 0),
        }
        evil = {name: Opener(tmp_path / name) for name in receives}
        sends = {
            "recv": lambda e, **trust: a.send_object(e, 1, **trust),
            "list": lambda e, **trust: a.send_object_list([e], 1, **trust),
            "all_gather": lambda e, **trust: a.all_gather_object(e, **trust),
            "gather": lambda e, **trust: a.gather_object(e, 1, **trust),
            "broadcast": lambda e, **trust: a.broadcast_object(e, 0, **trust),
            "broadcast_list": lambda e, **trust: a.broadcast_object_list([e], 0, **trust),
            "scatter": lambda e, **trust: a.scatter_object_list([e, e], 0, **trust),
        }
        for name, receive in receives.items():
            with pytest.raises(TypeError, match=r"cannot be sent, because receivers refuse posix.mkdir"):
                sends[name](evil[name])
            sends[name](evil[name], weights_only=False)
            with pytest.raises(PayloadError, match=r"unsupported GLOBAL posix.mkdir.*weights_only=False"):
                await receive()
        assert list(tmp_path.iterdir()) == []
        a.send_object(Opener(tmp_path / "trusted"), 1, weights_only=False)
        await b.recv_object(0, weights_only=False)
        assert [path.name for path in tmp_path.iterdir()] == ["trusted"]


async def test_trust_on_every_receiving_method() -> None:
    async with loopback_world(2) as (a, b):
        p = Point(4)
        a.send_object_list([p], 1, weights_only=False)
        assert (await b.recv_object_list([None], 0, weights_only=False))[0].x == 4
        a.gather_object(p, 1, weights_only=False)
        assert (await b.gather_object(1, 1, weights_only=False))[0].x == 4  # type: ignore[index]
        a.broadcast_object(p, 0, weights_only=False)
        assert (await b.broadcast_object(None, 0, weights_only=False)).x == 4  # type: ignore[attr-defined]
        a.broadcast_object_list([p], 0, weights_only=False)
        assert (await b.broadcast_object_list([None], 0, weights_only=False))[0].x == 4
        a.scatter_object_list([1, p], 0, weights_only=False)
        assert (await b.scatter_object_list(None, 0, weights_only=False)).x == 4  # type: ignore[attr-defined]


async def test_more_than_is_wanted_is_thrown_away() -> None:
    async with loopback_world(2) as (a, b):
        big = torch.ones(1000)
        a.send_object(big, 1)
        with pytest.raises(PayloadError, match=r"rank 0 sent 40\d\d bytes, but max_bytes is 4000"):
            await b.recv_object(0, max_bytes=4000)
        a.send_object_list([big], 1)
        with pytest.raises(PayloadError, match="max_bytes"):
            await b.recv_object_list([None], 0, max_bytes=4000)
        for give, take in (
            (lambda: a.gather_object(big, 1), lambda: b.gather_object(1, 1, max_bytes=4000)),
            (lambda: a.broadcast_object(big, 0), lambda: b.broadcast_object(1, 0, max_bytes=4000)),
            (lambda: a.broadcast_object_list([big], 0), lambda: b.broadcast_object_list([1], 0, max_bytes=4000)),
            (lambda: a.scatter_object_list([1, big], 0), lambda: b.scatter_object_list(None, 0, max_bytes=4000)),
        ):
            give()
            with pytest.raises(PayloadError, match="max_bytes"):
                await take()
        a.send_object("small", 1)
        assert await b.recv_object(0, max_bytes=4000) == "small"


async def test_cancelling_the_await_keeps_the_object() -> None:
    async with loopback_world(2) as (a, b):
        work = b.recv_object(0)
        task = asyncio.ensure_future(_awaited(work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        a.send_object("here", 1)
        assert await work == "here"


async def _awaited(work: Any) -> Any:
    return await work


async def test_mixed_with_everything_else_in_flight() -> None:
    async with loopback_world(2) as comms:

        async def rank(comm: Comm) -> list[Any]:
            peer = 1 - comm.rank
            works: list[Any] = [
                comm.all_reduce(torch.ones(2)),
                comm.recv_object(peer, 1),
                comm.all_gather_object(comm.rank),
                comm.send_object("hello", peer, 1),
                comm.broadcast(torch.full((2,), float(comm.rank)), 1),
                comm.broadcast_object(comm.rank, 1),
                comm.gather_object("g", 0),
            ]
            return [await work for work in works]

        for rank_, got in enumerate(await asyncio.gather(*map(rank, comms))):
            assert got[0].tolist() == [2, 2]
            assert got[1:4] == ["hello", [0, 1], None]
            assert got[4].tolist() == [1, 1]
            assert got[5:] == [1, ["g", "g"] if rank_ == 0 else None]


# -- mistakes ---------------------------------------------------------------------------------------------------------


async def test_an_object_that_cannot_be_pickled_is_refused_at_the_call() -> None:
    async with loopback_world(2) as (a, b):
        for call in (
            lambda: a.all_gather_object(lambda: 0),
            lambda: a.gather_object(lambda: 0, 1),
            lambda: a.broadcast_object(lambda: 0, 0),
            lambda: a.send_object(lambda: 0, 1),
        ):
            with pytest.raises(TypeError, match=r"^obj cannot be sent"):
                call()
        for call in (
            lambda: a.broadcast_object_list([lambda: 0], 0),
            lambda: a.send_object_list([lambda: 0], 1),
        ):
            with pytest.raises(TypeError, match=r"^object_list cannot be sent"):
                call()
        with pytest.raises(TypeError, match=r"^input_list\[1\] cannot be sent"):
            a.scatter_object_list([1, lambda: 0], 0)
        nothing_sent(a, b)


async def test_ranks_tags_and_terms_are_checked() -> None:
    async with loopback_world(2) as (a, b):
        calls: dict[str, Any] = {
            "gather": lambda **kw: a.gather_object(1, **{"root": 0, **kw}),
            "broadcast": lambda **kw: a.broadcast_object(1, **{"root": 1, **kw}),
            "broadcast_list": lambda **kw: a.broadcast_object_list([1], **{"root": 1, **kw}),
            "scatter": lambda **kw: a.scatter_object_list(None, **{"root": 1, **kw}),
        }
        messages: dict[str, Any] = {
            "recv": lambda **kw: a.recv_object(**kw),
            "recv_list": lambda **kw: a.recv_object_list([1], **kw),
        }
        for call in calls.values():
            with pytest.raises(ValueError, match=r"root must be in \[0, 2\), got 2"):
                call(root=2)
            with pytest.raises(TypeError, match="root must be a rank"):
                call(root="0")
        for call in (*calls.values(), *messages.values(), lambda **kw: a.all_gather_object(1, **kw)):
            with pytest.raises(TypeError, match="weights_only must be True or False, got None"):
                call(weights_only=None)
            with pytest.raises(ValueError, match="max_bytes must not be negative, got -1"):
                call(max_bytes=-1)
            with pytest.raises(TypeError, match="hints must be a mapping"):
                call(hints=[])
            with pytest.raises(ValueError, match="timeout"):
                call(timeout=-1)
        for call in messages.values():
            with pytest.raises(ValueError, match="src must be in"):
                call(src=2)
            with pytest.raises(ValueError, match="tag must be in"):
                call(tag=-1)
        for call in (lambda **kw: a.send_object(1, **kw), lambda **kw: a.send_object_list([1], **kw)):
            with pytest.raises(ValueError, match="dst must be in"):
                call(dst=2)
            with pytest.raises(TypeError, match="tag must be an integer"):
                call(dst=1, tag="x")
        nothing_sent(a, b)


async def test_lists_are_checked() -> None:
    async with loopback_world(2) as (a, b):
        for wrong in ((1, 2), "ab", None, {1: 2}):
            with pytest.raises(TypeError, match="object_list must be a list"):
                a.broadcast_object_list(wrong, 0)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="object_list must be a list"):
                a.recv_object_list(wrong, 1)  # type: ignore[arg-type]
        for wrong in ("ab", 3, None, {1: 2}):
            with pytest.raises(TypeError, match="object_list must be a list or tuple"):
                a.send_object_list(wrong, 1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="input_list must be given on the root"):
            a.scatter_object_list(None, 0)
        with pytest.raises(TypeError, match="input_list must be a list or tuple of objects, got str"):
            a.scatter_object_list("ab", 0)
        with pytest.raises(ValueError, match="one object for each of the 2 ranks, got 3"):
            a.scatter_object_list([1, 2, 3], 0)
        for wrong in ([1, 2], "ab", 5):
            with pytest.raises(ValueError, match=r"input_list must be None or empty except on the root \(rank 1\)"):
                a.scatter_object_list(wrong, 1)  # type: ignore[arg-type]
        nothing_sent(a, b)


# -- expected classes -------------------------------------------------------------------------------------------------


@register_safe
@dataclass
class Settings:
    steps: int
    out: Path = Path("out")
    mask: Any = None


async def test_received_objects_have_the_expected_class() -> None:
    async with loopback_world(2) as (a, b):
        a.send_object(Settings(1), 1)
        settings = await b.recv_object(0, expect=Settings)
        assert settings.steps == 1
        works = [comm.all_gather_object(Settings(comm.rank), expect=Settings) for comm in (a, b)]
        assert [each.steps for each in await works[1]] == [0, 1]
        a.gather_object(Settings(5), 1, expect=Settings)
        gathered = await b.gather_object(Settings(6), 1, expect=Settings)
        assert gathered is not None
        assert [each.steps for each in gathered] == [5, 6]
        a.broadcast_object(Settings(7), 0, expect=Settings)
        assert (await b.broadcast_object(None, 0, expect=Settings)).steps == 7
        a.scatter_object_list([Settings(8), Settings(9)], 0, expect=Settings)
        assert (await b.scatter_object_list(None, 0, expect=Settings)).steps == 9


async def test_an_object_of_another_class() -> None:
    async with loopback_world(2) as (a, b):
        sends: list[Callable[[], object]] = [
            lambda: a.send_object({"steps": 1}, 1),
            lambda: a.all_gather_object({"steps": 1}),
            lambda: a.gather_object({"steps": 1}, 1),
            lambda: a.broadcast_object({"steps": 1}, 0),
            lambda: a.scatter_object_list([1, {"steps": 1}], 0),
        ]
        receives: list[Callable[[], Work[Any]]] = [
            lambda: b.recv_object(0, expect=Settings),
            lambda: b.all_gather_object(Settings(1), expect=Settings),
            lambda: b.gather_object(Settings(1), 1, expect=Settings),
            lambda: b.broadcast_object(None, 0, expect=Settings),
            lambda: b.scatter_object_list(None, 0, expect=Settings),
        ]
        for send, receive in zip(sends, receives, strict=True):
            send()
            work = receive()
            for error in (TypeError, PayloadError):
                with pytest.raises(error, match=r"\(\) of rank 1 expected a Settings, but rank 0 sent a dict$"):
                    await work
        nothing_sent_before = [comm.statistics().submitted for comm in (a, b)]
        for call in (
            lambda: a.all_gather_object(1, expect=Settings),
            lambda: a.gather_object(1, 1, expect=Settings),
            lambda: a.broadcast_object(1, 0, expect=Settings),
        ):
            with pytest.raises(TypeError, match=r"^obj must be a Settings, as expect says, got a int$"):
                call()
        with pytest.raises(TypeError, match=r"^input_list\[1\] must be a Settings, as expect says, got a str$"):
            a.scatter_object_list([Settings(1), "x"], 0, expect=Settings)
        assert [comm.statistics().submitted for comm in (a, b)] == nothing_sent_before
        a.send_object("next", 1)
        assert await b.recv_object(0) == "next", "the comm goes on"


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_everyday_values_on_real_ranks(comm: Comm) -> None:
    for size in (3, 100_000):
        mask = numpy.arange(size * 2.0).reshape(2, size, order="F")
        mine = Settings(comm.rank, Path("x"), mask)
        for settings in await comm.all_gather_object(mine, expect=Settings):
            assert settings.out == Path("x")
            assert numpy.array_equal(settings.mask, mask)
        work = comm.send_tensor_dict({"t": torch.ones(2), "mask": mask, "at": date(2024, 1, 1)}, 1 - comm.rank)
        got = await comm.recv_tensor_dict(1 - comm.rank)
        assert got["at"] == date(2024, 1, 1)
        assert numpy.array_equal(got["mask"], mask)
        await work
