"""The orders of the first trainer, carried out by all."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asynccomm.errors import ClosedError
from asynccomm.testing import loopback_world
from asynccomm.weights.crew import PushRequest, PushResult
from tests.waiting import until

from .scenes import Gate, Served, content, fill, publishers, state


async def test_a_request_is_settled_once() -> None:
    request = PushRequest(None, None, asyncio.get_running_loop().create_future())
    result = PushResult(1, (), {}, 0, 0.1)
    request.settle(result)
    request.settle(ClosedError("too late"))
    assert request.result.result() is result
    assert request.released.is_set()


async def test_a_request_that_nobody_sends_releases_the_state_at_once() -> None:
    request = PushRequest(None, None, asyncio.get_running_loop().create_future())
    request.stop()
    assert request.stopped
    assert request.released.is_set()


async def test_deliveries_and_pushes_take_turns() -> None:
    """Servers that come while pushes run get each version once, and end at the last."""
    async with loopback_world(2) as comms:
        states = [state(0), state(0)]
        async with publishers(comms, states) as made:
            served = []
            for version in range(1, 6):
                for each in states:
                    fill(each, version)
                served.append(Served(comms[0], state()))
                results = await asyncio.gather(*(publisher.push() for publisher in made))
                assert {result.version for result in results} == {version}
                assert not any(result.lost for result in results)
            for each in served:
                await each.reached(5)
                assert content(each.tensors) == 5
                assert each.versions == sorted({*each.versions})


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("stays", [True, False])
async def test_a_server_that_comes_while_a_push_is_queued(
    monkeypatch: pytest.MonkeyPatch, trainers: int, stays: bool
) -> None:
    """It connects with the first trainer alone, before the others hear of it."""
    async with loopback_world(trainers) as comms:
        states = [state(1, dtype=torch.float64), {}][:trainers]  # conversion needs a copy
        first = Served(comms[0], state(), label="first")
        async with publishers(comms, states, servers=1) as made:
            gate = Gate(monkeypatch, 0)
            pushes = [asyncio.gather(*(publisher.push() for publisher in made)) for _ in range(2)]
            await gate.blocked(1)
            late = Served(comms[0], state(), label="late")
            await until(lambda: made[0].servers == ("first", "late"))
            if not stays:
                await late.leave()
                await until(lambda: made[0].servers == ("first",))
            gate.open.set()
            for version, push in enumerate(pushes, 1):
                assert {(result.version, result.servers) for result in await push} == {(version, ("first",))}
            if stays:
                await late.reached(2)
                assert late.versions == [2]
            last = await asyncio.gather(*(publisher.push() for publisher in made))
            assert {(result.servers, len(result.lost)) for result in last} == {(made[0].servers, 0)}
            await first.reached(3)


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_push_that_some_trainer_began_to_send_leaves_no_copy_for_late_servers(failing: int) -> None:
    async with loopback_world(2) as comms:
        states = [state(1), state(1)]
        async with publishers(comms, states) as made:
            await asyncio.gather(*(publisher.push() for publisher in made))
            for each in states:
                fill(each, 2)
            kept, states[failing]["t0"] = states[failing]["t0"], torch.ones(1)
            await asyncio.gather(*(publisher.push() for publisher in made), return_exceptions=True)
            late = Served(comms[0], state())
            await until(lambda: made[0].servers)
            states[failing]["t0"] = kept
            await asyncio.gather(*(publisher.push() for publisher in made))
            await late.reached(2)
            assert late.versions == [2]


async def test_a_push_that_no_trainer_began_to_send_leaves_the_copy_for_late_servers() -> None:
    async with loopback_world(2) as comms:
        states = [state(1), state(1)]
        async with publishers(comms, states) as made:
            await asyncio.gather(*(publisher.push() for publisher in made))
            for each in states:
                each["t0"] = torch.ones(1)
            await asyncio.gather(*(publisher.push() for publisher in made), return_exceptions=True)
            late = Served(comms[0], state())
            await late.reached(1)
            assert content(late.tensors) == 1


async def test_info_is_a_json_value() -> None:
    async with loopback_world(1) as comms:
        served = Served(comms[0], state())
        async with publishers(comms, [state(1)], servers=1) as (publisher,):
            with pytest.raises(TypeError, match="info must be a JSON value, got <function"):
                await publisher.push(info=lambda: None)
            await publisher.push(info=[1, {"a": 0.5}, None])
            await served.reached(1)
            assert served.infos == [[1, {"a": 0.5}, None]]
