"""Publishers and servers find each other in a store that outlives them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asynccomm import MemoryStore, StoreTimeoutError
from asynccomm.weights import meeting as module
from asynccomm.weights.meeting import Meeting


async def place(store: MemoryStore, timeout: float = 10, name: str = "w") -> Meeting:
    return await Meeting.open(store, name, "loopback", torch.device("cpu"), timeout, None)


async def test_a_server_finds_the_newest_publisher() -> None:
    store = MemoryStore()
    server = await place(store)
    finding = asyncio.ensure_future(server.find(1))
    for number in (1, 2):
        trainer = await place(store)
        assert await trainer.register() == number
        await trainer.of(number).accept()
        assert (await finding).publisher == number
        finding = asyncio.ensure_future(server.find(number + 1))
        await asyncio.sleep(0)
        assert not finding.done()
    finding.cancel()
    assert (await server.find(1)).publisher == 2
    assert (await server.find(1)).backend == "loopback"
    assert await (await place(store)).register() == 3  # and is lost before it opens
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "LOOK_SECONDS", 0.01)
        finding = asyncio.ensure_future(server.find(3))
        await asyncio.sleep(0)
        await (await place(store)).of(await (await place(store)).register()).accept()
        assert (await finding).publisher == 4
    with pytest.raises(StoreTimeoutError, match=r"no publisher 'w' came within 0\.01 s"):
        await (await place(MemoryStore(), 0.01)).find(1)


async def test_a_publisher_that_has_closed_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    trainer = await place(MemoryStore())
    await trainer.of(await trainer.register()).accept()
    passed = asyncio.ensure_future((await trainer.find()).passed())
    await asyncio.wait([passed], timeout=0.02)
    assert not passed.done()
    assert not await trainer.of(1).closed()
    await trainer.of(1).close()
    assert await trainer.of(1).closed()
    await asyncio.wait_for(passed, 10)
    finding = asyncio.ensure_future(trainer.find())
    await asyncio.wait([finding], timeout=0.02)
    assert not finding.done()
    await trainer.of(await trainer.register()).accept()
    assert (await finding).publisher == 2


async def test_closing_waits_for_a_store_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    store = MemoryStore()
    trainer = (await place(store)).of(1)

    async def no_answer(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(MemoryStore, "set", no_answer)
    await asyncio.wait_for(trainer.close(), 10)


async def test_a_publisher_is_passed_over_also_after_one_that_was_lost_before_it_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    meeting = await place(MemoryStore())
    await meeting.of(await meeting.register()).accept()
    passed = asyncio.ensure_future((await meeting.find(1)).passed())
    assert await meeting.register() == 2  # and is lost before it opens
    await asyncio.sleep(0)
    assert not passed.done()
    await meeting.of(await meeting.register()).accept()
    await asyncio.wait_for(passed, 10)


async def test_servers_are_met_in_order_also_those_that_have_only_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    store = MemoryStore()
    meeting = (await place(store)).of(1)
    coming = asyncio.ensure_future(meeting.newcomer(1))
    await asyncio.sleep(0.02)
    assert not coming.done()
    assert await meeting.enter() == 1
    await coming
    await store.add("asynccomm/run/weights/w/1/servers", 1)  # a server that has not written its key
    assert await meeting.enter() == 3
    await asyncio.wait_for(meeting.newcomer(2), 10)
    await asyncio.wait_for(meeting.newcomer(3), 10)


async def test_pairs_and_fans() -> None:
    meeting = (await place(MemoryStore(), 7)).of(1)
    pair = await asyncio.gather(meeting.pair(0, 1, 0), meeting.pair(0, 1, 1))
    fan = await asyncio.gather(*(meeting.fan(0, 1, rank, 3, [], "") for rank in range(3)))
    assert [comm.rank for comm in (*pair, *fan)] == [0, 1, 0, 1, 2]
    assert {comm.options.timeout for comm in fan} == {7}
    assert {comm.name for comm in pair} == {"w/1/pair/0/1"}
    await asyncio.gather(*(comm.aclose() for comm in (*pair, *fan)))
    await meeting.aclose()
