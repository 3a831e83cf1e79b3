"""Many waiters, one connection: nobody is forgotten, nobody is woken for nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from torch import distributed as dist

from asynccomm.errors import ClosedError, StoreError, StoreTimeoutError
from asynccomm.store.client import StoreClient
from asynccomm.store.codec import Codec
from asynccomm.store.wait_line import WaitLine


class Wire:
    """A connection whose server is the test: it answers the WAITs, and knows which keys there are."""

    def __init__(self) -> None:
        self.codec = Codec()
        self.answer: asyncio.Future[Any] | None = None
        self.keys: set[str] = set()
        self.asked = 0
        self.waited = asyncio.Event()
        self.closed: BaseException | None = None

    def reply(self) -> asyncio.Future[Any]:
        assert self.answer is None or self.answer.done(), "two WAITs on one connection"
        assert self.codec.data_to_send()[0] == 6
        self.answer = asyncio.get_running_loop().create_future()
        self.waited.set()
        return self.answer

    def flush(self) -> None:
        assert self.codec.data_to_send() == b"\x0c"
        self.feed(b"\x01")

    def feed(self, data: bytes) -> None:
        assert self.answer is not None
        self.waited.clear()
        for reply in self.codec.receive_data(data):
            self.answer.set_result(reply)

    def present(self, keys: Sequence[str]) -> asyncio.Future[bool]:
        self.asked += 1
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        future.set_result(self.keys.issuperset(keys))
        return future

    async def close(self, error: StoreError | ClosedError) -> None:
        self.closed = error


async def test_one_waiter_costs_nothing_while_it_waits() -> None:
    wire = Wire()
    line = WaitLine(wire, wire.present)
    task = asyncio.create_task(line.wait(["k"], 10))
    await wire.waited.wait()
    assert wire.asked == 0
    wire.keys.add("k")
    wire.feed(b"\x00")
    await task
    assert wire.asked == 1
    await line.aclose(ClosedError("end"))


async def test_a_wake_up_is_believed_only_after_a_check() -> None:
    wire = Wire()
    line = WaitLine(wire, wire.present)
    task = asyncio.create_task(line.wait(["k"], 10))
    for _ in range(5):
        await wire.waited.wait()
        wire.feed(b"\x00")  # libuv's server does so when a COMPARE_SET stored nothing
    await wire.waited.wait()
    assert not task.done()
    wire.keys.add("k")
    wire.feed(b"\x00")
    await task
    await line.aclose(ClosedError("end"))


async def test_newcomers_do_not_keep_the_others_from_being_served() -> None:
    wire = Wire()
    line = WaitLine(wire, wire.present)
    first = asyncio.create_task(line.wait(["first"], 10))
    await wire.waited.wait()
    wire.keys.add("first")
    crowd = []
    while not first.done():  # somebody new in every turn of the loop
        crowd.append(asyncio.create_task(line.wait(["never"], 10)))
        await asyncio.sleep(0)
    await first
    for task in crowd:
        task.cancel()
    await asyncio.wait(crowd)
    await line.aclose(ClosedError("end"))


async def test_closing_fails_all_waiters_and_refuses_new_ones() -> None:
    wire = Wire()
    line = WaitLine(wire, wire.present)
    tasks = [asyncio.create_task(line.wait([f"k{i}"], 10)) for i in range(3)]
    await wire.waited.wait()
    error = ClosedError("the end")
    await line.aclose(error)
    assert await asyncio.gather(*tasks, return_exceptions=True) == [error] * 3
    assert wire.closed is error
    with pytest.raises(ClosedError, match="the end"):
        await line.wait(["k"], 10)


async def test_a_lost_line_fails_all_waiters() -> None:
    wire = Wire()
    line = WaitLine(wire, wire.present)
    tasks = [asyncio.create_task(line.wait([f"k{i}"], 10)) for i in range(3)]
    await wire.waited.wait()
    assert wire.answer is not None
    wire.answer.set_exception(StoreError("lost"))
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, StoreError)
    await line.aclose(ClosedError("end"))


# -- against torch's servers ------------------------------------------------------------------------------------------


async def test_many_waiters_on_many_keys(client: StoreClient) -> None:
    keys = [f"k{i}" for i in range(200)]
    tasks = [asyncio.create_task(client.get(key)) for key in keys for _ in range(3)]
    await client.ping()
    for key in random.sample(keys, len(keys)):
        await client.set(key, key)
    assert await asyncio.gather(*tasks) == [key.encode() for key in keys for _ in range(3)]


async def test_cancelling_some_waiters_leaves_the_others_theirs(client: StoreClient) -> None:
    tasks = {key: asyncio.create_task(client.get(key)) for key in "abcdef"}
    await client.ping()
    for key in "afc":  # the first, the newest, one between
        tasks[key].cancel()
        assert (await asyncio.gather(tasks[key], return_exceptions=True))[0].__class__ is asyncio.CancelledError
    for key in "bde":
        await client.set(key, key)
        assert await tasks[key] == key.encode()
    assert await client.add("n", 1) == 1
    await client.set("z", b"")
    await client.wait(["z", "b"])


async def test_cancelling_at_any_moment_leaves_the_line_usable(client: StoreClient) -> None:
    for turns in range(30):
        key = f"k{turns}"
        task = asyncio.create_task(client.wait([key]))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await client.set(key, b"")  # races the CANCEL_WAIT
        await asyncio.gather(task, return_exceptions=True)
    late = asyncio.create_task(client.get("late"))
    await client.set("late", b"v")
    assert await late == b"v"


async def test_timeouts_of_waiters_are_their_own(client: StoreClient) -> None:
    patient = asyncio.create_task(client.get("patient"))
    with pytest.raises(StoreTimeoutError, match="hasty"):
        await client.get("hasty", 0.02)
    await client.set("patient", b"v")
    assert await patient == b"v"


async def test_compare_set_wakes_nobody_for_nothing(client: StoreClient, use_libuv: bool) -> None:
    task = asyncio.create_task(client.wait(["k"]))
    await client.ping()
    for _ in range(10):
        assert await client.compare_set("k", b"expected", b"new") == b"expected"
    for _ in range(10):
        await client.ping()
    assert not task.done()
    await client.set("k", b"v")
    await task


async def test_all_keys_must_exist_at_once(client: StoreClient) -> None:
    await client.set("d1", b"")
    task = asyncio.create_task(client.wait(["d1", "d2"]))
    await client.ping()
    await client.delete("d1")
    await client.set("d2", b"")  # the server answers the WAIT now
    for _ in range(10):
        await client.ping()
    assert not task.done()
    await client.set("d1", b"")
    await task


async def test_a_key_that_comes_and_goes(client: StoreClient) -> None:
    task = asyncio.create_task(client.get("k"))
    await client.ping()
    await asyncio.gather(client.set("k", b"old"), client.delete("k"))
    await client.ping()
    await client.set("k", b"new")
    assert await task in (b"old", b"new")


async def test_others_may_set_the_key(client: StoreClient, server: dist.TCPStore) -> None:
    task = asyncio.create_task(client.get("k"))
    await client.ping()
    await asyncio.to_thread(server.set, "k", "theirs")
    assert await task == b"theirs"


async def test_the_connection_is_cut_while_tasks_wait(proxy: Any) -> None:
    client = await StoreClient.connect("127.0.0.1", proxy.port, timeout=20)
    tasks = [asyncio.create_task(client.get(f"k{i}")) for i in range(5)]
    await client.ping()
    proxy.cut()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, StoreError)
    await client.aclose()
