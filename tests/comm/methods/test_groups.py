"""Comms of some ranks of another: who they are, how they are told apart, how they end."""

import asyncio
import gc
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asynccomm import (
    AbortedError,
    BackendError,
    BrokenError,
    ClosedError,
    CollectiveTimeoutError,
    Comm,
    MemoryStore,
    new_comm,
)
from asynccomm.backends.base import Backend, BackendContext
from asynccomm.backends.loopback import LoopbackBackend
from asynccomm.comm import connecting as connecting_module
from asynccomm.rendezvous.job import LEAVE_SECONDS
from asynccomm.testing.local import loopback_world
from tests.forking import fork
from tests.pretended_hosts import HINTS, comm_on
from tests.waiting import until


async def on_all(comms: Sequence[Comm], part: Callable[[Comm], Coroutine[Any, Any, Any]]) -> list[Any]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*(part(comm) for comm in comms))


async def total(comm: Comm, value: float) -> float:
    return float(await comm.all_reduce(torch.tensor([value])))


# -- arguments --------------------------------------------------------------------------------------------------------

BAD_SPLITS: list[tuple[object, object, str]] = [
    (3, "x", "ranks must be a list of ranks, got 3"),
    ("01", "x", "ranks must be a list of ranks, got '01'"),
    ({0, 1}, "x", "ranks must be a list of ranks, got {0, 1}"),
    ([0, 1.0], "x", r"ranks must be integers, got 1.0 in \[0, 1.0\]"),
    ([0, True], "x", "ranks must be integers, got True"),
    ([0, 3], "x", r"ranks must be in \[0, 3\), got 3"),
    ([0, -1], "x", r"ranks must be in \[0, 3\), got -1"),
    ([0, 1, 0], "x", "ranks must be different, got 0 twice"),
    ([1, 2], "x", r"ranks must include this rank, 0, or be empty, got \[1, 2\]"),
    ([0], "", "name must be a non-empty str, got ''"),
    ([0], 5, "name must be a non-empty str, got 5"),
    ([0], "\ud800", r"name must be a str that UTF-8 can encode, got '\\ud800'"),
    ([], None, "name must be a non-empty str, got None"),
]


@pytest.mark.parametrize(("ranks", "name", "message"), BAD_SPLITS)
async def test_bad_arguments_raise_at_the_call(ranks: Any, name: Any, message: str) -> None:
    async with loopback_world(3) as comms:
        with pytest.raises(ValueError, match=message):
            comms[0].split(ranks, name)


async def test_bad_options_raise_at_the_call() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(ValueError, match="timeout must be positive, got 0"):
            comm.split([0], "x", timeout=0)
        with pytest.raises(TypeError, match="hints must be a mapping"):
            comm.split([], "x", hints=["fast"])  # type: ignore[arg-type]


async def test_hints_of_a_split_are_checked_by_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopbackBackend, "hints", {"speed": ""})

    def refuse(hints: dict[str, str]) -> None:
        if hints.get("speed") == "too much":
            raise ValueError("hint 'speed' is too much")

    monkeypatch.setattr(LoopbackBackend, "check_hints", refuse)
    async with loopback_world(1) as (comm,):
        with pytest.raises(ValueError, match="'speed' is too much"):
            comm.split([0], "x", hints={"speed": "too much"})


async def test_options_come_from_the_parent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(LoopbackBackend, "hints", {"speed": "", "size": ""})
    seen: list[dict[str, str]] = []
    connect = LoopbackBackend.connect.__func__  # type: ignore[attr-defined]

    async def watched(cls: type[Backend], context: BackendContext) -> Backend:
        seen.append(dict(context.hints))
        return await connect(cls, context)  # type: ignore[no-any-return]

    monkeypatch.setattr(LoopbackBackend, "connect", classmethod(watched))
    async with (
        loopback_world(1, timeout=33, max_ops=7, hints={"speed": "1"}) as (comm,),
        comm.dup("same") as same,
        comm.dup("other", hints={"size": "2", "x": ""}, timeout=5) as other,
        other.dup(timeout=timedelta(seconds=4)) as third,
    ):
        assert same.options == comm.options
        assert (other.options.hints, other.options.timeout, other.options.max_ops) == ({"size": "2"}, 5, 7)
        assert (third.options.hints, third.options.timeout) == ({"size": "2"}, 4)
    assert seen == [{"speed": "1"}, {"speed": "1"}, {"size": "2"}, {"size": "2"}]
    assert "hint 'x' is unknown to backend 'loopback'" in caplog.text


async def test_a_comm_that_has_ended_cannot_be_split() -> None:
    async with loopback_world(2) as (a, b):
        b.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            b.split([1], "x")
        await until(lambda: "broken" in repr(a))
        with pytest.raises(AbortedError, match="enough"):
            a.split([], "x")
        await a.aclose()
        with pytest.raises(ClosedError, match="'test' is closed"):
            a.dup()


async def test_subgroups_need_a_divisor() -> None:
    async with loopback_world(4) as (comm, *_):
        for bad in (0, -1, 3, 8, True, 2.0, None):
            with pytest.raises(ValueError, match=f"group_size must be .* divides the 4 ranks, got {bad}"):
                comm.subgroups(bad)  # type: ignore[arg-type]


BAD_ENUMERATIONS: list[tuple[object, str]] = [
    ([], r"groups must be a list of at least one list of ranks, got \[\]"),
    (None, "groups must be a list of at least one list of ranks, got None"),
    ("01", "groups must be a list"),
    ([0, 1], r"groups\[0\] must be a list of ranks, got 0"),
    ([[0], []], r"groups\[1\] must have at least one rank, got \[\]"),
    ([[0, 1], [2, 1]], r"groups must not overlap, but groups\[0\] and groups\[1\] have rank 1"),
    ([[0], [1, 4]], r"groups\[1\] must be in \[0, 4\), got 4"),
    ([[0, 0], [1]], r"groups\[0\] must be different, got 0 twice"),
    ([[0], ["1"]], r"groups\[1\] must be integers, got '1'"),
]


@pytest.mark.parametrize(("groups", "message"), BAD_ENUMERATIONS)
async def test_enumerations_are_checked_as_a_whole_before_anything_is_made(groups: Any, message: str) -> None:
    async with loopback_world(4) as comms:
        for comm in comms:
            with pytest.raises(ValueError, match=message):
                comm.subgroups_by_enumeration(groups)


# -- who they are -----------------------------------------------------------------------------------------------------


async def test_the_order_of_the_list_is_that_of_the_ranks() -> None:
    async with loopback_world(4) as comms:

        async def part(comm: Comm) -> None:
            assert comm.parent_ranks == (0, 1, 2, 3)
            async with comm.split([np.int64(3), 1, 0], "some") as child:
                assert child is not None
                assert (child.rank, child.size, child.name) == ([2, 1, None, 0][comm.rank], 3, "test/some")
                assert child.parent_ranks == (3, 1, 0)
                assert (child.backend, child.device, child.loop) == ("loopback", comm.device, comm.loop)
                assert [member.rank for member in child._session.identity.members] == [0, 1, 2]
                gathered = await child.all_gather(None, torch.tensor(comm.rank))
                assert [int(t) for t in gathered] == [3, 1, 0]

        await on_all([comms[0], comms[1], comms[3]], part)  # rank 2 does nothing at all


async def test_members_keep_their_processes() -> None:
    async with loopback_world(2) as comms:
        members = [replace_pid(comms[0]._session.identity.members[rank], 100 + rank) for rank in range(2)]
        for comm in comms:
            comm._session.identity.members = tuple(members)

        async def part(comm: Comm) -> None:
            async with comm.split([1, 0], "turned") as child:
                assert child is not None
                assert [member.pid for member in child._session.identity.members] == [101, 100]

        await on_all(comms, part)


def replace_pid(member: Any, pid: int) -> Any:
    return type(member)(member.rank, member.host, pid)


async def test_no_ranks_no_comm() -> None:
    async with loopback_world(2) as (a, _):
        assert await a.split([], "none") is None
        async with a.split((), "none") as nothing:
            assert nothing is None
        with pytest.raises(ZeroDivisionError):
            async with a.split([], "none"):
                raise ZeroDivisionError


async def test_subgroups_are_consecutive_ranks() -> None:
    async with loopback_world(6) as comms:

        async def part(comm: Comm) -> None:
            first = comm.rank // 2 * 2
            async with comm.subgroups(2) as pair, comm.subgroups(3, "threes", timeout=9) as three:
                assert (pair.name, pair.parent_ranks, pair.rank) == (
                    "test/subgroups",
                    (first, first + 1),
                    comm.rank % 2,
                )
                assert (three.name, three.size, three.options.timeout) == ("test/threes", 3, 9)
                assert await total(pair, comm.rank) == 2 * first + 1
                assert await total(three, comm.rank) == (3 if comm.rank < 3 else 12)

        await on_all(comms, part)


async def test_subgroups_by_enumeration() -> None:
    async with loopback_world(5) as comms:

        async def part(comm: Comm) -> None:
            async with comm.subgroups_by_enumeration([[4, 0], [2], [3]]) as mine:
                if comm.rank == 1:
                    assert mine is None
                    return
                assert mine is not None
                assert mine.parent_ranks == {0: (4, 0), 2: (2,), 3: (3,), 4: (4, 0)}[comm.rank]
                assert await total(mine, comm.rank) == {0: 4, 2: 2, 3: 3, 4: 4}[comm.rank]

        await on_all(comms, part)


NODES = "abbacb"  # by rank: as many ranks on a node as there happen to be, and in no order


async def test_comms_within_nodes_and_between_them() -> None:
    async with loopback_world(len(NODES)) as comms:
        for comm in comms:
            comm._session.identity.members = tuple(
                type(member)(member.rank, f"node-{node}", member.pid)
                for member, node in zip(comm._session.identity.members, NODES, strict=True)
            )

        async def part(comm: Comm) -> None:
            mine = tuple(rank for rank, node in enumerate(NODES) if node == NODES[comm.rank])
            async with comm.intra_node() as intra, comm.inter_node(timeout=9) as inter:
                assert (intra.name, intra.parent_ranks) == ("test/intra_node", mine)
                assert await total(intra, comm.rank) == sum(mine)
                assert (inter is None) == (comm.rank in (2, 3, 5))
                if inter is not None:
                    assert (inter.name, inter.parent_ranks) == ("test/inter_node", (0, 1, 4))
                    assert inter.options.timeout == 9
                    assert intra.rank == 0
                # the sum over all, by way of one rank of each node
                tensor = torch.tensor([float(comm.rank)])
                await intra.reduce(tensor, 0)
                if inter is not None:
                    await inter.all_reduce(tensor)
                assert (await intra.broadcast(tensor, 0)).item() == sum(range(len(NODES)))

        await on_all(comms, part)


async def test_comms_within_nodes_and_between_them_may_be_made_several_times() -> None:
    async with loopback_world(2) as comms:

        async def part(comm: Comm) -> None:
            async with comm.intra_node() as one, comm.intra_node() as two, comm.intra_node("three") as three:
                assert [each.name for each in (one, two, three)] == [
                    "test/intra_node",
                    "test/intra_node 2",
                    "test/three",
                ]
            async with comm.intra_node() as another, comm.inter_node() as first, comm.inter_node() as second:
                assert another.name == "test/intra_node 3"
                assert comm.rank or first.name == "test/inter_node"
                assert comm.rank or second.name == "test/inter_node 2"

        await on_all(comms, part)


async def test_refused_comms_within_nodes_and_between_them_use_no_name() -> None:
    async with loopback_world(2) as comms:
        for make in (comms[0].intra_node, comms[0].inter_node):
            with pytest.raises(ValueError, match="timeout must be"):
                make(timeout=-1)

        async def part(comm: Comm) -> None:
            async with comm.intra_node() as intra, comm.inter_node() as inter:
                assert intra.name == "test/intra_node"
                assert comm.rank or inter.name == "test/inter_node"

        await on_all(comms, part)


async def backends_of(comm: Comm) -> dict[str, str]:
    """The backends of comms that are split off."""
    found = {}
    for name, pending in {
        "intra_node": comm.intra_node(),
        "inter_node": comm.inter_node(),
        "here": comm.split([0, 3] if comm.rank in (0, 3) else [1, 2], "here", hints={**HINTS, "spin_us": "0"}),
        "across": comm.split([0, 1] if comm.rank < 2 else [2, 3], "across"),
        "all": comm.dup(),
    }.items():
        async with pending as child:
            if child is not None:
                tensor = torch.ones(1)
                await child.all_reduce(tensor)
                assert tensor.item() == child.size
                found[name] = child.backend
    return found


@pytest.mark.parametrize("backend", ["gloo", "hierarchical"])
@pytest.mark.ranks(4)
async def test_ranks_of_one_host_share_memory_in_a_split(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    async with comm_on(monkeypatch, "abba", backend) as comm:
        found = await backends_of(comm)
        assert found.pop("inter_node", "gloo") == "gloo"
        assert found == {"intra_node": "shm", "here": "shm", "across": "gloo", "all": backend}


@pytest.mark.ranks(4)
async def test_a_split_on_one_host_keeps_the_backend_of_the_caller_s_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, "aaaa", "gloo") as comm:
        found = await backends_of(comm)
        assert found.pop("inter_node", "gloo") == "gloo"
        assert found == {"intra_node": "shm", "here": "gloo", "across": "gloo", "all": "gloo"}


async def test_nodes_are_those_of_the_ranks_of_a_comm() -> None:
    """Also if the first rank of a node is not in it."""
    async with loopback_world(3) as comms:

        async def part(comm: Comm) -> None:
            async with comm.split([2, 1], "turned") as turned:
                assert turned is not None
                async with turned.intra_node("here", hints={}) as here, turned.inter_node("there") as there:
                    assert here.parent_ranks == (0, 1)
                    assert (there is None) == (comm.rank == 1)

        await on_all(comms[1:], part)


async def test_a_split_of_a_split() -> None:
    async with loopback_world(4) as comms:

        async def part(comm: Comm) -> None:
            async with comm.split([3, 2, 1], "outer") as outer:
                assert outer is not None
                if comm.rank == 2:
                    assert await outer.split([], "inner") is None
                    return
                async with outer.split([2, 0], "inner") as inner:
                    assert inner is not None
                    assert inner.name == "test/outer/inner"
                    assert inner.parent_ranks == (2, 0)
                    assert inner.rank == {1: 0, 3: 1}[comm.rank]
                    assert await total(inner, comm.rank) == 4

        await on_all(comms[1:], part)


# -- how they are told apart ------------------------------------------------------------------------------------------


async def test_a_name_is_in_use_until_its_comm_is_closed() -> None:
    async with loopback_world(2) as comms:

        async def part(comm: Comm) -> None:
            async with comm.split([0, 1], "x"):
                for ranks in ([0, 1], [comm.rank]):
                    with pytest.raises(ValueError, match="name 'test/x' is in use by an open comm of this process"):
                        comm.split(ranks, "x")
                with pytest.raises(ValueError, match="name 'test/x' is in use"):
                    await new_comm("loopback", name="test/x", store=store, rank=comm.rank, size=2)
                assert await comm.split([], "x") is None
            async with comm.split([comm.rank], "x") as alone:
                assert alone is not None
                assert alone.size == 1

        store = comms[0]._session.identity.job._meeting.store
        await on_all(comms, part)


async def test_a_name_is_free_after_a_split_that_was_not_awaited() -> None:
    async with loopback_world(1) as (comm,):
        connecting = comm.split([0], "x")
        with pytest.raises(ValueError, match="in use"):
            comm.split([0], "x")
        del connecting
        async with comm.split([0], "x") as child:
            assert child is not None


async def test_a_name_is_free_after_a_child_was_dropped() -> None:
    async with loopback_world(1) as (comm,):
        child = await comm.dup()
        with pytest.warns(ResourceWarning, match="never closed"):
            del child
            gc.collect()
        async with comm.dup() as again:  # before the loop has got to ending the first
            await again.barrier()
            await asyncio.sleep(0.01)
            with pytest.raises(ValueError, match="in use"):
                comm.dup()


async def test_a_split_is_awaited_once() -> None:
    async with loopback_world(1) as (comm,):
        connecting = comm.dup()
        await (await connecting).aclose()
        with pytest.raises(RuntimeError, match="this split of 'test/dup' was awaited before"):
            await connecting


async def test_one_name_for_disjoint_and_overlapping_groups() -> None:
    """Rank 1 is in a group of its own name; ranks 0 and 2 meet others under the same name at the same time."""
    async with loopback_world(4) as comms:

        async def pair(comm: Comm, ranks: list[int], times: int) -> None:
            for _ in range(times):
                async with comm.split(ranks, "g") as child:
                    assert child is not None
                    assert await total(child, comm.rank) == sum(ranks)

        async def part(comm: Comm) -> None:
            if comm.rank in (0, 1):
                await pair(comm, [0, 1], 2)
            if comm.rank in (1, 2):  # while 0 has gone on to other things
                await pair(comm, [2, 1], 1)
            if comm.rank in (0, 3):
                await pair(comm, [0, 3], 3)
            await pair(comm, [0, 1, 2, 3], 2)

        await on_all(comms, part)


async def test_many_splits_at_once_in_another_order_on_each_rank() -> None:
    async with loopback_world(3) as comms:
        groups = [([0, 1, 2], f"all {i}") for i in range(5)] + [([2, 0], f"two {i}") for i in range(5)]

        async def one(comm: Comm, ranks: list[int], name: str) -> None:
            async with comm.split(ranks if comm.rank in ranks else [], name) as child:
                if child is not None:
                    assert await total(child, comm.rank) == sum(ranks)

        async def part(comm: Comm) -> None:
            turned = groups[comm.rank :] + groups[: comm.rank]
            await asyncio.gather(*(one(comm, *group) for group in turned))

        await on_all(comms, part)


async def test_counters_agree_again_after_a_rank_gave_up() -> None:
    async with loopback_world(2) as (a, b):
        with pytest.raises(TimeoutError):  # rank 0 goes away before rank 1 has come
            async with asyncio.timeout(0.02):
                async with a.dup() as child:
                    await child.barrier()
        with pytest.raises(AbortedError, match=r"TimeoutError|CancelledError"):
            async with b.dup() as child:
                await child.barrier()

        async def part(comm: Comm) -> None:
            async with comm.dup() as child:
                assert await total(child, 1) == 2

        await on_all([a, b], part)


def waiting_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting takes all ranks, as with real transports; loopback's does not."""
    connect = LoopbackBackend.connect.__func__  # type: ignore[attr-defined]

    async def patient(cls: type[Backend], context: BackendContext) -> Backend:
        await context.store.set(f"at {context.group.rank}", b"1")
        await context.store.wait([f"at {rank}" for rank in range(context.group.size)], 3600)
        return await connect(cls, context)  # type: ignore[no-any-return]

    monkeypatch.setattr(LoopbackBackend, "connect", classmethod(patient))


async def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(4) as comms:
        waiting_at(monkeypatch)
        results = await asyncio.gather(
            *(comms[rank].split([3, 2, 1, 0], "x", timeout=0.1)._connect() for rank in (0, 2)), return_exceptions=True
        )
        first, second = sorted(results, key=lambda error: isinstance(error, AbortedError))
        assert isinstance(first, BackendError)
        assert "loopback did not connect rank" in str(first)
        assert "of comm 'test/x' within 0.1 s; ranks [0, 2] did not come" in str(first)
        assert "ranks [0, 2] did not come" in str(second)


async def test_lists_in_other_orders_are_a_possible_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2) as (a, b):
        waiting_at(monkeypatch)
        made = a.split([0, 1], "x", timeout=0.1), b.split([1, 0], "x", timeout=0.1)
        for error in await asyncio.gather(*(each._connect() for each in made), return_exceptions=True):
            assert isinstance(error, BackendError)
            assert str(error).endswith("; ranks [1] did not come, or pass another list of ranks")


async def test_counters_agree_again_after_a_rank_did_not_await(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2) as (a, b):
        waiting_at(monkeypatch)
        a.dup()
        with pytest.raises(BackendError, match=r"ranks \[0\] did not come"):
            await b.dup(timeout=0.1)

        async def part(comm: Comm) -> None:
            async with comm.dup() as child:
                assert await total(child, 1) == 2

        await on_all([a, b], part)


async def test_connecting_ends_when_another_rank_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(3) as comms:
        waiting_at(monkeypatch)
        tasks = [asyncio.ensure_future(comm.dup()._connect()) for comm in comms[:2]]
        await asyncio.sleep(0.02)
        tasks[1].cancel()
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert str(results[0]).startswith("aborted by rank 1: could not connect: CancelledError")


async def test_connecting_ends_when_the_parent_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(3) as comms:
        waiting_at(monkeypatch)
        tasks = [asyncio.ensure_future(comm.split([0, 1, 2], "x")._connect()) for comm in comms[:2]]
        await asyncio.sleep(0.02)
        comms[2].abort("rank 2 will not come")
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for error in results:
            assert isinstance(error, AbortedError)
            assert "rank 2 will not come" in str(error)


@pytest.mark.parametrize(("members", "lost"), [([1, 2, 3], 3), ([3, 2, 1], 1), ([1, 2, 0], 3)])
async def test_connecting_ends_when_the_parent_loses_a_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, members: list[int], lost: int
) -> None:
    async with loopback_world(4) as comms:
        waiting_at(monkeypatch)
        here = [comms[rank] for rank in members if rank not in (0, lost)]
        tasks = [asyncio.ensure_future(comm.split(members, "x")._connect()) for comm in here]
        await until(lambda: all(comm._session.children for comm in here))
        channel = comms[lost]._session.identity.job.channel
        assert channel is not None
        channel.call(channel._begin_closing)  # as if it was killed
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for error in results:
            assert isinstance(error, BrokenError)
            found = re.search(r"rank (\d) was lost: .*\(comm '(.*)', process", str(error))
            assert found is not None, error
            number, name = found.groups()
            assert (members[int(number)] if name == "test/x" else int(number)) == lost
    assert "could not handle" not in caplog.text


@pytest.mark.parametrize("dies", [True, False])
async def test_a_rank_that_has_connected_gets_the_parent_s_error_that_ends_connecting_elsewhere(
    monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    connect = LoopbackBackend.connect.__func__  # type: ignore[attr-defined]

    async def slow(cls: type[Backend], context: BackendContext) -> Backend:
        """Rank 0 goes on connecting after the other ranks have connected."""
        backend: Backend = await connect(cls, context)
        if context.group.rank == 0:
            try:
                await asyncio.Event().wait()
            except BaseException:
                await backend.aclose()
                raise
        return backend

    async with loopback_world(4) as comms:
        monkeypatch.setattr(LoopbackBackend, "connect", classmethod(slow))
        waiting = asyncio.ensure_future(comms[1].split([1, 2], "x")._connect())
        async with comms[2].split([1, 2], "x") as child:
            assert child is not None
            receiving = child.recv(torch.ones(1), 0)
            channel = comms[3]._session.identity.job.channel
            assert channel is not None
            if dies:
                channel.call(channel._begin_closing)
            else:
                comms[3].abort("enough")
            error = r"PeerLostError: rank 3 was lost: .* \(comm 'test'" if dies else "AbortedError: .* rank 3: enough"
            async with asyncio.timeout(5):
                with pytest.raises(AbortedError, match=f"aborted by rank 0: could not connect: {error}"):
                    await receiving
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], BrokenError)


async def test_a_split_called_before_the_parent_ended_fails_when_it_is_awaited() -> None:
    store = MemoryStore()
    comm = await new_comm("loopback", store=store, rank=0, size=1)
    async with comm.dup():
        connecting = comm.split([0], "x")
        await comm.aclose()
        with pytest.raises(ClosedError, match="'main' is closed"):
            await connecting
    comm = await new_comm("loopback", store=store, rank=0, size=1)
    connecting = comm.split([0], "x")
    await comm.aclose()
    with pytest.raises(ClosedError, match="'main' and all that were split off it are closed"):
        await connecting


async def test_a_split_belongs_to_the_loop_of_its_parent() -> None:
    async with loopback_world(1) as (comm,):
        connecting = comm.dup()

        async def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                await connecting
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                comm.dup("other")

        await asyncio.to_thread(asyncio.run, elsewhere())
        await (await connecting).aclose()


# -- how they end -----------------------------------------------------------------------------------------------------


async def test_traffic_is_independent() -> None:
    async with loopback_world(2) as (a, b):
        children = await asyncio.gather(a.dup(), b.dup())
        first = a.all_reduce(torch.ones(1))  # rank 1 is not there yet
        assert [float(t) for t in await asyncio.gather(*(c.all_reduce(torch.ones(1)) for c in children))] == [2, 2]
        assert not first.done()
        assert children[0].barrier().seq == 1
        children[1].barrier()
        b.all_reduce(torch.ones(1))
        assert await first == 2
        assert a.statistics().submitted == 1
        await asyncio.gather(*(child.aclose() for child in children))


@pytest.mark.parametrize("victim", ["parent", "child"])
async def test_failures_are_independent(victim: str) -> None:
    async with loopback_world(2) as comms:
        children = await asyncio.gather(*(comm.dup() for comm in comms))
        broken, whole = (comms, children) if victim == "parent" else (children, comms)
        broken[0].abort("just this one")
        await until(lambda: "broken" in repr(broken[1]))
        with pytest.raises(AbortedError, match="just this one"):
            broken[1].barrier()
        await asyncio.gather(*(comm.barrier() for comm in whole))
        await asyncio.gather(*(comm.aclose() for comm in broken))
        await asyncio.gather(*(comm.barrier() for comm in whole))
        await asyncio.gather(*(child.aclose() for child in children))


async def test_deadlines_are_independent() -> None:
    async with loopback_world(2) as comms:
        children = await asyncio.gather(*(comm.dup(timeout=0.5) for comm in comms))
        with pytest.raises(CollectiveTimeoutError) as caught:
            await children[0].barrier()
        assert (caught.value.comm, caught.value.missing) == ("test/dup", (1,))
        await until(lambda: "broken" in repr(children[1]))
        await on_all(comms, lambda comm: total(comm, 1))
        await asyncio.gather(*(child.aclose() for child in children))


async def test_leaving_the_parent_does_not_end_the_child() -> None:
    store = MemoryStore()
    children: list[Comm] = []

    async def one(rank: int) -> None:
        async with new_comm("loopback", store=store, rank=rank, size=2) as comm:
            child = await comm.dup()
            children.append(child)
        assert "closed" in repr(comm)
        assert await total(child, 1) == 2
        async with child.dup() as grandchild:
            await child.aclose()
            assert await total(grandchild, 1) == 2

    async with asyncio.timeout(20):
        await asyncio.gather(one(0), one(1))


async def test_an_exception_in_the_child_aborts_only_the_child() -> None:
    async with loopback_world(2) as comms:

        async def part(comm: Comm) -> None:
            with pytest.raises(ZeroDivisionError if comm.rank else AbortedError):
                async with comm.dup() as child:
                    if comm.rank:
                        raise ZeroDivisionError
                    await child.barrier()
            await comm.barrier()

        await on_all(comms, part)


async def test_a_dropped_child_warns_and_leaves_its_family() -> None:
    store = MemoryStore()
    comm = await new_comm("loopback", store=store, rank=0, size=1)
    child = await comm.dup()
    job = comm._session.identity.job
    await comm.aclose()
    assert not job._over
    with pytest.warns(ResourceWarning, match="test/dup|main/dup"):
        del child
        gc.collect()
    await until(lambda: job._over)


async def test_calls_that_make_comms_raise_in_a_forked_child() -> None:
    async with loopback_world(1) as (comm,), comm.dup() as child:
        calls: list[Callable[[], object]] = [child.barrier, comm.dup, child.dup, child.monitored_barrier]
        calls += [comm.shrink, lambda: comm.reconfigure([0])]
        pid = fork()
        if pid == 0:
            told = 0
            for call in calls:
                try:
                    call()
                except ClosedError as exc:
                    told += "before this process was forked" in str(exc)
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(calls)
        await child.barrier()


# -- on processes -----------------------------------------------------------------------------------------------------

BACKENDS = ["shm", "gloo"]


@pytest.mark.ranks(4, backend=BACKENDS)
async def test_groups_on_processes(comm: Comm) -> None:
    rank = comm.rank
    pending = comm.all_reduce(torch.ones(1 << 16))  # in flight while the groups come together
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(comm.subgroups(2))
        assert pair.backend == comm.backend
        assert (await pending)[0] == 4
        if rank != 1:
            odd = await stack.enter_async_context(comm.split([3, 0, 2], "odd"))
            assert odd is not None
            assert await total(odd, rank) == 5
            ring = (
                odd.send(torch.tensor([rank]), (odd.rank + 1) % 3),
                odd.recv(left := torch.tensor([-1]), (odd.rank - 1) % 3),
            )
            await asyncio.gather(*ring)
            assert int(left) == odd.parent_ranks[(odd.rank - 1) % 3]
        works = [c.all_reduce(torch.full((100,), float(rank))) for c in (comm, pair) for _ in range(10)]
        sums = [6.0] * 10 + [2.0 * (rank // 2 * 2) + 1] * 10
        assert [float(t[0]) for t in await asyncio.gather(*works)] == sums
        alone = await stack.enter_async_context(comm.split([rank], "alone"))
        assert alone is not None
        assert await total(alone, rank) == rank
    await comm.barrier()


@pytest.mark.ranks(3, backend=BACKENDS)
async def test_one_name_again_and_again(comm: Comm) -> None:
    for turn in range(3):
        async with comm.dup() as child:
            assert await total(child, turn) == 3 * turn
    if comm.rank < 2:
        async with comm.split([1, 0], "dup") as child:
            assert child is not None
            await child.barrier()
    async with comm.dup() as child:
        await child.barrier()


@pytest.mark.ranks(3, backend=BACKENDS)
async def test_many_at_once(comm: Comm) -> None:
    async def one(ranks: list[int], name: str) -> None:
        async with comm.split(ranks if comm.rank in ranks else [], name) as child:
            if child is not None:
                assert await total(child, comm.rank) == sum(ranks)

    groups = [(ranks, f"{ranks} {i}") for ranks in ([0, 1, 2], [2, 0], [1, 2]) for i in range(2)]
    await asyncio.gather(*(one(*group) for group in groups[comm.rank :] + groups[: comm.rank]))


@pytest.mark.ranks(2, backend=BACKENDS)
async def test_failures_are_independent_on_processes(comm: Comm) -> None:
    for turn in range(2):
        child = await comm.dup()
        await comm.barrier()  # the other has it, too
        if comm.rank == turn:
            child.abort("just this one")
        with pytest.raises(AbortedError, match=f"aborted by rank {turn}: just this one"):
            await child.barrier()
        await child.aclose()
        await comm.barrier()
    parent = await new_comm(comm.backend, name="second")
    child = await parent.dup()
    await comm.barrier()
    if comm.rank == 1:
        parent.abort("the elder")
    with pytest.raises(AbortedError, match="the elder"):
        await parent.barrier()
    await parent.aclose()
    assert await total(child, 1) == 2
    await child.aclose()


@pytest.mark.ranks(2, backend=BACKENDS)
@pytest.mark.parametrize("order", ["parent first", "child first", "another order each"])
async def test_any_order_of_closing_where_rank_0_hosts_the_store(comm: Comm, tmp_path: Path, order: str) -> None:
    rank = comm.rank
    chosen = tmp_path / "port"
    if rank == 0:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            chosen.write_text(str(sock.getsockname()[1]))
    await comm.barrier()
    store = f"tcp://127.0.0.1:{chosen.read_text()}"
    parent = await new_comm(comm.backend, name="host", store=store, rank=rank, size=2, timeout=30)
    child = await parent.dup()
    grandchild = await child.split([1, 0], "turned")
    assert grandchild is not None
    comms = [parent, child, grandchild]
    if order == "child first" or (order == "another order each" and rank == 1):
        comms.reverse()
    start = time.monotonic()
    for number, one in enumerate(comms):  # rank 0, which has the store, is ahead
        await asyncio.sleep(0.1 * rank)
        await one._session.identity.room.set("the store", "is still there")
        await one._session.identity.room.check([])
        await one.aclose()
        if order != "another order each":
            assert [await total(other, 1) for other in comms[number + 1 :]] == [2] * (2 - number)
    assert time.monotonic() - start < LEAVE_SECONDS / 2, "the host has waited for somebody in vain"


@pytest.mark.ranks(3, backend=BACKENDS)
async def test_a_rank_that_takes_no_part_may_leave_before(comm: Comm) -> None:
    parent = await new_comm(comm.backend, name="wide")
    if comm.rank == 1:
        await parent.aclose()
        return
    async with parent.split([0, 2], "narrow") as child:
        assert child is not None
        await parent.aclose()
        assert await total(child, comm.rank) == 2


@pytest.mark.ranks(3, backend=BACKENDS)
async def test_a_rank_that_does_not_come_is_named_on_processes(comm: Comm) -> None:
    if comm.rank < 2:
        with pytest.raises(BrokenError, match=r"did not connect .*; ranks \[2\] did not come"):
            await comm.dup(timeout=0.5)
    await comm.barrier()
    async with comm.split([2, 1, 0], "x") as child:
        assert child is not None
        await child.barrier()


@pytest.mark.ranks(3, backend=BACKENDS)
async def test_a_member_that_has_closed_the_parent_is_named_before_the_time_limit(comm: Comm) -> None:
    async with new_comm(comm.backend, name="wide") as parent:
        if comm.rank == 2:
            await parent.aclose()
        else:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(connecting_module, "CLOSED_SECONDS", 0.2)
                error = r"rank 2 has closed comm 'wide', and takes no part in splitting it"
                with pytest.raises(BrokenError, match=error):
                    await parent.split([2, 0, 1], "x", timeout=100)
        await comm.barrier()


LEAVES_ALL_OPEN = """
import asyncio, asynccomm, torch
async def main():
    global left
    left = []
    for backend, close in LEFT:
        parent = await asynccomm.new_comm(backend, name=backend, store=STORE, timeout=30)
        child = await parent.split([1, 0], "turned")
        await child.all_reduce(torch.ones(1))
        if close:
            await parent.aclose()
        await child.barrier()
        left += [parent, child]
asyncio.run(main())
"""


OPEN = [(backend, close) for backend in BACKENDS for close in (True, False)]  # the backend, and whether the parent ends


@pytest.mark.parametrize(
    "left", [[OPEN[0], OPEN[3]], *(pytest.param([each], marks=pytest.mark.exhaustive) for each in OPEN)]
)
@pytest.mark.real_end
def test_a_process_that_leaves_with_children_open_exits_cleanly(tmp_path: Path, left: list[tuple[str, bool]]) -> None:
    code = LEAVES_ALL_OPEN.replace("STORE", repr(f"file://{tmp_path}/store")).replace("LEFT", repr(left))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    assert not any("Traceback" in error for error in errors), errors
