"""Pushing versions: to servers of other shardings, late servers; cancelled, refused, and after losses."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import nn

from asynccomm import AbortedError, BrokenError, ClosedError, Comm, MemoryStore, RendezvousError
from asynccomm.testing import loopback_world
from asynccomm.weights import LayoutError, Publisher, PushAbandonedError, PushResult, Server, Shard, reception
from asynccomm.weights.meeting import Meeting
from tests.waiting import until

from .scenes import LIMIT, Gate, Served, content, fill, publishers, state


async def together(made: list[Publisher], **options: Any) -> list[PushResult]:
    async with asyncio.timeout(LIMIT):
        return await asyncio.gather(*(publisher.push(**options) for publisher in made))


@pytest.mark.parametrize("broadcast", [True, False])
async def test_servers_of_other_shardings_get_every_version(broadcast: bool) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    async with loopback_world(2) as comms:
        states = [{"w": whole.chunk(2)[rank].clone(), "b": torch.tensor(0.5)} for rank in range(2)]
        made = [
            Publisher(comm, each, servers=4, shards={"w": Shard(0, rank, 2)}, bucket_mb=2e-5, broadcast=broadcast)
            for rank, (comm, each) in enumerate(zip(comms, states, strict=True))
        ]
        columns = [
            {"w": torch.zeros(6, 2, dtype=torch.bfloat16), "b": torch.tensor(0.0, dtype=torch.float64)}
            for _ in range(2)
        ]
        copies = [{"w": torch.zeros(6, 4), "b": torch.tensor(0.0)} for _ in range(2)]
        served = [Served(comms[0], each, shards={"w": Shard(1, i, 2)}) for i, each in enumerate(columns)]
        served += [Served(comms[0], each, label=f"copy {i}") for i, each in enumerate(copies)]
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(publisher.__aenter__() for publisher in made))
        for version in (1, 2, 3):
            for each in states:
                each["w"].add_(100)
                each["b"].add_(1)
            first, second = await together(made, info={"loss": version})
            assert first.servers == second.servers
            assert {"copy 0", "copy 1"} < set(first.servers)
            assert first.version == made[0].version == made[1].version == version
            copied = 24 * 4 + 4
            assert first.nbytes == second.nbytes == 24 * 2 + 2 * 8 + (copied if broadcast else 2 * copied)
            for each in served:
                await each.reached(version)
            for i, tensors in enumerate(columns):
                assert torch.equal(tensors["w"], (whole + 100 * version).bfloat16()[:, 2 * i : 2 * i + 2])
            for tensors in copies:
                assert torch.equal(tensors["w"], whole + 100 * version)
                assert tensors["b"] == 0.5 + version
        await asyncio.gather(*(publisher.__aexit__(None, None, None) for publisher in made))
        for each in served:
            await each.end()
            assert each.error is None
            assert each.versions == [1, 2, 3]
            assert each.infos == [{"loss": version} for version in (1, 2, 3)]


@pytest.mark.parametrize(
    "info", [b"ab", {1: 2}, {None: 1}, {"a": [{1, 2}]}, Decimal("1.5"), date(2024, 1, 1), torch.tensor(1)]
)
async def test_information_that_json_would_change_is_refused(info: Any) -> None:
    async with loopback_world(1) as (comm,), Publisher(comm, state(), servers=0) as publisher:
        with pytest.raises(TypeError, match=f"info must be a JSON value.*got {re.escape(repr(info))}"):
            await publisher.push(info=info)
        assert publisher.version == 0
        assert (await publisher.push(info={"a": [1, 2.5, None, True, (math.nan, "text")]})).version == 1


async def test_version_numbers_rise_and_are_the_same_on_all_trainers() -> None:
    async with loopback_world(2) as comms:
        served = Served(comms[0], state())
        async with publishers(comms, [state(1), state(1)], servers=1) as made:
            await together(made, version=7)
            await together(made)
            with pytest.raises(TypeError, match="version must be an integer, got '9'"):
                await made[0].push("9")  # type: ignore[arg-type]
            first, second = await asyncio.gather(made[0].push(10), made[1].push(11), return_exceptions=True)
            assert isinstance(second, ValueError)
            assert "version must be the same on all trainers, got 11, and 10 on trainer 0" in str(second)
            assert isinstance(first, PushAbandonedError)
            assert str(first).startswith("the push of version 10 was abandoned: trainer 1 could not take part")
            async with asyncio.timeout(LIMIT):
                old = await asyncio.gather(*(each.push(8) for each in made), return_exceptions=True)
                mixed = await asyncio.gather(made[0].push(4), made[1].push(70), return_exceptions=True)
                other = await asyncio.gather(made[0].push(70), made[1].push(4), return_exceptions=True)
            assert [repr(error) for error in old] == ["ValueError('version must be above 8, got 8')"] * 2
            assert repr(mixed[0]) == "ValueError('version must be above 8, got 4')"
            assert "version must be the same on all trainers, got 70, and 4 on trainer 0" in str(mixed[1])
            assert isinstance(other[0], PushAbandonedError)
            assert "version must be the same on all trainers, got 4, and 70 on trainer 0" in str(other[1])
            assert (await together(made))[0].version == 9
            await served.reached(9)
            assert served.versions == [7, 8, 9]


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("broadcast", [True, False])
async def test_a_cancelled_push_leaves_servers_at_the_version_before(
    monkeypatch: pytest.MonkeyPatch, retain: bool, broadcast: bool
) -> None:
    async with loopback_world(2) as comms:
        states = [state(1, dtype=torch.float64), state(1, dtype=torch.float64)]  # conversion needs a copy
        served = [Served(comms[0], state()) for _ in range(2)]
        options = {"servers": 2, "bucket_mb": 2e-5, "retain": retain, "broadcast": broadcast}
        async with publishers(comms, states, **options) as made:
            await together(made)
            gate = Gate(monkeypatch, 1)
            for each in states:
                fill(each, 2)
            pushing = [asyncio.ensure_future(publisher.push()) for publisher in made]
            await gate.blocked(2 if broadcast else 4)
            pushing[1].cancel()
            await asyncio.wait([pushing[1]])
            assert pushing[1].cancelled()
            fill(states[1], 3)
            gate.open.set()
            with pytest.raises(PushAbandonedError, match="version 2 was abandoned: trainer 1 cancelled it"):
                await pushing[0]
            assert [content(each.tensors) for each in served] == [1, 1]
            assert made[0].version == made[1].version == 1
            fill(states[0], 3)
            result, _ = await together(made)
            assert result.version == 2
            assert not result.lost
            for each in served:
                await each.reached(2)
                assert content(each.tensors) == 3
                assert each.versions == [1, 2]


async def test_a_push_is_cancelled_before_any_trainer_sends() -> None:
    async with loopback_world(2) as comms:
        served = Served(comms[0], state())
        async with publishers(comms, [state(1), state(1)], servers=1) as made:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await made[0].push()  # the other trainer does not call
            with pytest.raises(PushAbandonedError, match="trainer 0 cancelled it"):
                await made[1].push()
            await together(made)
            await served.reached(1)
            assert served.versions == [1]


async def test_a_late_server_gets_the_newest_version() -> None:
    async with loopback_world(2) as comms:
        states = [state(1), state(1)]
        first = Served(comms[0], state())
        async with publishers(comms, states, servers=1) as made:
            await together(made, info=(info := {"step": 1}))
            fill(states[0], 5)  # the trainers go on
            info["step"] = 2
            late = Served(comms[0], state())
            await late.reached(1)
            assert content(late.tensors) == 1
            assert late.infos == [{"step": 1}]
            assert first.versions == [1]
            await together(made, version=2)
            assert len(made[0].servers) == 2
            await late.reached(2)
            await first.leave()
            await until(lambda: len(made[0].servers) == 1)
            assert len((await together(made))[0].servers) == 1


async def test_without_a_copy_a_late_server_waits_for_the_next_version() -> None:
    async with loopback_world(1) as comms, publishers(comms, [state(1)], retain=False) as made:
        await together(made)
        late = Served(comms[0], state())
        await until(lambda: made[0].servers)
        await together(made)
        await late.reached(2)
        assert late.versions == [2]


async def test_a_server_whose_weights_do_not_fit_is_refused_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async with loopback_world(2) as comms:
        wrong = Served(comms[0], {**state(tensors=1), "extra": torch.ones(1)}, label="wrong")
        made = [Publisher(comm, state(), servers=1, timeout=10) for comm in comms]
        results = await asyncio.gather(*(publisher.__aenter__() for publisher in made), return_exceptions=True)
        assert isinstance(results[0], LayoutError)
        assert isinstance(results[1], AbortedError)
        for text in (str(results[0]), str(results[1])):
            assert "server 'wrong'" in text
            assert "missing at the trainers: extra" in text
            assert "missing at the server: t1, t2, t3" in text
        await wrong.end()
        assert isinstance(wrong.error, LayoutError)
        assert str(wrong.error) == str(results[0])
        caplog.clear()
        async with publishers(comms, [state(1), state(1)], name="again") as again:
            late = Served(comms[0], state(tensors=5), name="again", label="late")
            await late.end()
            assert isinstance(late.error, LayoutError)
            await until(lambda: "late" in again[0].refused)
            assert (await together(again))[0].servers == ()
        assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_names_differ_between_frameworks() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.probe = nn.Linear(1, 1)

    def strip(name: str) -> str | None:
        return name.removeprefix("inner.") if name.startswith("inner.") else None

    async with loopback_world(1) as comms:
        model, target = Wrapped(), nn.Linear(2, 2)
        served = Served(comms[0], target)
        async with publishers(comms, [model], servers=1, rename=strip) as made:
            await together(made)
            await served.reached(1)
        assert torch.equal(target.weight, model.inner.weight)


async def test_other_tensors_than_at_the_start() -> None:
    async with loopback_world(2) as comms:
        states = [state(1), state(1)]
        served = Served(comms[0], state())
        async with publishers(comms, states, servers=1) as made:
            states[1]["t1"] = torch.ones(3)
            results = await asyncio.gather(*(publisher.push() for publisher in made), return_exceptions=True)
            assert isinstance(results[0], PushAbandonedError)
            assert isinstance(results[1], ValueError)
            assert "these are others: ['t1']" in str(results[1])
            states[1]["t1"] = torch.ones(2, 3)
            await together(made)
            await served.reached(1)


async def test_other_names_than_at_the_start() -> None:
    async with loopback_world(1) as comms:
        prefix = ""
        served = Served(comms[0], state())
        publisher = Publisher(comms[0], state(1), servers=1, timeout=10, rename=lambda name: prefix + name)
        prefix = "b."
        async with publisher:
            with pytest.raises(ValueError, match=r"these are others: \['b\.t0', .*, 't3'\]"):
                await publisher.push()
            prefix = ""
            await publisher.push()
            await served.reached(1)
        await served.end()


async def test_servers_that_do_not_come() -> None:
    async with loopback_world(1) as comms:
        with pytest.raises(RendezvousError, match=r"publisher 'weights': 0 of 2 servers came within 0.1 s"):
            async with Publisher(comms[0], state(), servers=2, timeout=0.1):
                pass


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("late", "RendezvousError: publisher 'weights': 1 of 2 servers came within 2 s"),
        ("misfit", "LayoutError: the weights of server 'wrong' do not fit"),
        ("cancelled", "CancelledError"),
    ],
)
async def test_a_publisher_that_does_not_open_is_an_error_for_its_servers(failure: str, reason: str) -> None:
    async with loopback_world(1) as comms:
        served = Served(comms[0], state())
        publisher = Publisher(comms[0], state(), servers=2, timeout=2 if failure == "late" else 10)
        entering = asyncio.ensure_future(publisher.__aenter__())
        await until(lambda: publisher.servers)
        if failure == "misfit":
            wrong = Served(comms[0], state(tensors=1), label="wrong")
            await wrong.end()
        if failure == "cancelled":
            entering.cancel()
        await asyncio.wait([entering])
        await served.end()
        assert isinstance(served.error, AbortedError)
        assert reason in str(served.error)


async def test_a_publisher_that_is_cancelled_as_it_opens_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    store, opened, accept = MemoryStore(), asyncio.Event(), Meeting.accept

    async def accept_late(meeting: Meeting) -> None:
        await accept(meeting)
        opened.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Meeting, "accept", accept_late)
    async with asyncio.timeout(LIMIT), loopback_world(1) as comms:
        opening = asyncio.ensure_future(Publisher(comms[0], state(), store=store).__aenter__())
        await opened.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    meeting = await Meeting.open(store, "weights", "loopback", torch.device("cpu"), 10, None)
    assert await meeting.of(1).closed()


async def test_a_publisher_that_is_cancelled_as_it_closes_ends_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, go, result = asyncio.Event(), asyncio.Event(), reception._result

    async def slow_result(task: Any) -> Any:
        ends.set()
        await go.wait()
        return await result(task)

    monkeypatch.setattr(reception, "_result", slow_result)
    async with asyncio.timeout(LIMIT), loopback_world(1) as comms:
        publisher = await Publisher(comms[0], state(1), timeout=10).__aenter__()
        served = Served(comms[0], state())
        await until(lambda: publisher.servers)
        closing = asyncio.ensure_future(publisher.__aexit__(None, None, None))
        await ends.wait()
        closing.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await served.end()
        assert served.error is None


async def test_a_trainer_that_fails_ends_the_others_and_the_servers() -> None:
    async with loopback_world(2) as comms:
        served = Served(comms[0], state())

        async def train(comm: Comm) -> None:
            async with Publisher(comm, state(1), servers=1) as publisher:
                await publisher.push()
                if comm.rank == 1:
                    raise RuntimeError("out of ideas")
                await publisher.push()

        first, second = await asyncio.gather(*map(train, comms), return_exceptions=True)
        assert isinstance(first, AbortedError)
        assert str(first) == "aborted by rank 1: RuntimeError: out of ideas"
        assert isinstance(second, RuntimeError)
        await served.end()
        assert isinstance(served.error, BrokenError)
        assert served.versions == [1]


async def test_a_publisher_is_used_within_its_block() -> None:
    async with loopback_world(1) as comms:
        publisher = Publisher(comms[0], state())
        with pytest.raises(ClosedError, match="not open"):
            await publisher.push()
        assert (publisher.version, publisher.servers, publisher.refused) == (0, (), {})
        async with publisher:
            assert (await publisher.push()).servers == ()
        with pytest.raises(ClosedError, match="closed"):
            await publisher.push()
        with pytest.raises(RuntimeError, match="entered before"):
            await publisher.__aenter__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": -1}, "servers must be a number of servers, 0 or more, got -1"),
        ({"bucket_mb": 0}, "bucket_mb must be a positive number up to 1048576, got 0"),
        ({"bucket_mb": 1 << 21}, "bucket_mb must be a positive number up to 1048576, got 2097152"),
        ({"bucket_mb": "8"}, "bucket_mb must be a positive number up to 1048576, got '8'"),
        ({"timeout": 0}, "timeout must be positive, got 0"),
        ({"name": ""}, "name must be a non-empty str, got ''"),
        ({"shards": {"x": Shard(0, 0, 1)}}, "shards must have names of tensors in state"),
        ({"shards": 3}, "shards must be a mapping of names to Shard or Region, got 3"),
        ({"retain": "no"}, "retain must be True or False, got 'no'"),
        ({"broadcast": "no"}, "broadcast must be True or False, got 'no'"),
        ({"store": 3}, "store must be a Store"),
        ({"backend": "mpi"}, "backend 'mpi' is unknown"),
        ({"backend": ""}, "backend '' is unknown"),
        ({"backend": 3}, "backend must be a name, got 3"),
        ({"hints": 3}, "hints must be a mapping of strings to strings, got 3"),
        ({"hints": {"recorder": "0"}}, "hint 'recorder' must be an integer"),
    ],
)
async def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    async with loopback_world(1) as comms:
        with pytest.raises((TypeError, ValueError), match=message):
            Publisher(comms[0], state(), **options)
        with pytest.raises(TypeError, match="comm must be a Comm, got 3"):
            Publisher(3, state())  # type: ignore[arg-type]


async def test_two_publishers_share_a_store() -> None:
    async with loopback_world(1) as comms:
        a, b = (Served(comms[0], state(), name=name) for name in "ab")
        made = [publishers(comms, [state(i)], servers=1, name=name) for i, name in enumerate("ab", 1)]
        async with made[0] as first, made[1] as second:
            await together(first)
            await together(second)
            await a.reached(1)
            await b.reached(1)
            assert (content(a.tensors), content(b.tensors)) == (1, 2)


async def test_servers_need_no_comm() -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        async with Server(state()).updates():
            pass
