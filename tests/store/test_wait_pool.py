"""Many waiters, few connections: nobody is forgotten, nobody is woken for nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from torch import distributed as dist

from asynccomm.errors import ClosedError, StoreError, StoreTimeoutError
from asynccomm.store import wait_pool
from asynccomm.store.client import StoreClient
from asynccomm.store.codec import Codec
from asynccomm.store.wait_pool import MOST_LINES, WaitConnection, WaitPool

Until = Callable[[Callable[[], object]], Awaitable[None]]


class Wire:
    """A connection whose server is the test: it answers the WAITs, and knows which keys there are."""

    def __init__(self) -> None:
        self._codec = Codec()
        self.answer: asyncio.Future[Any] | None = None
        self.keys: set[str] = set()
        self.asked = 0
        self.waited = asyncio.Event()
        self.closed: BaseException | None = None
        self.error: StoreError | ClosedError | None = None

    @property
    def codec(self) -> Codec:
        if self.error is not None:
            raise self.error
        return self._codec

    def reply(self) -> asyncio.Future[Any]:
        assert self.answer is None or self.answer.done(), "two WAITs on one connection"
        data = self._codec.data_to_send()
        assert data[0] == 6
        self.answer = asyncio.get_running_loop().create_future()
        self.waited.set()
        if any(data.endswith(b"/" + key.encode()) for key in self.keys):  # there already, as far as the tests go
            asyncio.get_running_loop().call_soon(self.wake)
        return self.answer

    def wake(self) -> None:
        if self.waited.is_set():
            self.feed(b"\x00")

    def flush(self) -> None:
        assert self._codec.data_to_send() == b"\x0c"
        self.feed(b"\x01")

    def feed(self, data: bytes) -> None:
        assert self.answer is not None
        self.waited.clear()
        for reply in self._codec.receive_data(data):
            self.answer.set_result(reply)

    def lose(self) -> None:
        assert self.answer is not None
        self.waited.clear()
        self.error = StoreError("lost")
        self.answer.set_exception(self.error)

    def present(self, keys: Sequence[str]) -> asyncio.Future[bool]:
        self.asked += 1
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        future.set_result(self.keys.issuperset(keys))
        return future

    async def close(self, error: StoreError | ClosedError) -> None:
        self.closed = self.error = error


async def test_one_waiter_costs_nothing_while_it_waits() -> None:
    wire = Wire()
    line = WaitConnection(wire, wire.present)
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
    line = WaitConnection(wire, wire.present)
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


async def test_who_reads_the_key_at_once_needs_no_check() -> None:
    wire = Wire()
    line = WaitConnection(wire, wire.present)
    task = asyncio.create_task(line.wait(["k"], 10, verify=False))
    await wire.waited.wait()
    wire.feed(b"\x00")
    await task
    assert wire.asked == 0
    await line.aclose(ClosedError("end"))


async def test_newcomers_do_not_keep_the_others_from_being_served() -> None:
    wire = Wire()
    line = WaitConnection(wire, wire.present)
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
    line = WaitConnection(wire, wire.present)
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
    line = WaitConnection(wire, wire.present)
    tasks = [asyncio.create_task(line.wait([f"k{i}"], 10)) for i in range(3)]
    await wire.waited.wait()
    assert wire.answer is not None
    wire.answer.set_exception(StoreError("lost"))
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, StoreError)
    await line.aclose(ClosedError("end"))


# -- several lines -----------------------------------------------------------------------------------------------------


class Wires:
    """The connections of WaitPool, all to the same server: the test."""

    def __init__(self) -> None:
        self.all = [Wire()]
        self.attempts = 0
        self.refused = False
        self.reachable = asyncio.Event()
        self.reachable.set()
        self.lines = WaitPool(self.all[0], self.connect, self.all[0].present)

    async def connect(self) -> Wire:
        self.attempts += 1
        await self.reachable.wait()
        if self.refused:
            raise StoreError("refused")
        wire = Wire()
        wire.keys = self.all[0].keys
        self.all.append(wire)
        return wire

    def wait(self, *keys: str) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.lines.wait([key], 10)) for key in keys]

    @property
    def asked(self) -> int:
        return self.all[0].asked

    @property
    def waiting(self) -> list[int]:
        """How many wait on each line."""
        return [line.waiting for line in self.lines._lines]

    def set(self, key: str) -> None:
        """The key appears; wakes all owners, who must look themselves whether it was theirs."""
        self.all[0].keys.add(key)
        for wire in self.all:
            wire.wake()

    async def quiet(self) -> None:
        """Return once nobody is polled for."""
        while True:
            before = self.asked
            for _ in range(50):
                await asyncio.sleep(0)
            if self.asked == before and all(wire.waited.is_set() for wire in self.all):
                return

    async def aclose(self) -> None:
        await self.lines.aclose(ClosedError("end"))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll in every turn of the loop, and open lines in the next."""
    for name in ("FIRST_POLL", "LAST_POLL", "OPEN_AFTER"):
        monkeypatch.setattr(wait_pool, name, 0.0)


@pytest.mark.usefixtures("at_once")
async def test_waiters_get_lines_of_their_own_and_cost_nothing() -> None:
    wires = Wires()
    keys = [f"k{i}" for i in range(MOST_LINES)]
    tasks = dict(zip(keys, wires.wait(*keys), strict=True))
    await wires.quiet()
    assert wires.waiting == [1] * MOST_LINES
    for key in random.sample(keys, len(keys)):
        wires.set(key)
        await tasks.pop(key)
        assert not any(task.done() for task in tasks.values())
    await wires.aclose()
    assert all(wire.closed for wire in wires.all)


@pytest.mark.usefixtures("at_once")
async def test_a_line_is_kept_for_the_next() -> None:
    wires = Wires()
    for turn in range(10):
        keys = [f"{turn}a", f"{turn}b"]
        tasks = wires.wait(*keys)
        await wires.quiet()
        for key in keys:
            wires.set(key)
        await asyncio.gather(*tasks)
    assert wires.attempts == 1
    await wires.aclose()


@pytest.mark.usefixtures("at_once")
async def test_no_line_is_opened_for_a_moment() -> None:
    wires = Wires()
    (long,) = wires.wait("long")
    for _ in range(5):
        (short,) = wires.wait("short")
        await asyncio.sleep(0)
        short.cancel()
        await wires.quiet()
    assert not long.done()
    assert wires.attempts == 0
    await wires.aclose()
    await asyncio.gather(long, return_exceptions=True)


@pytest.mark.usefixtures("at_once")
async def test_while_a_line_is_being_opened_all_are_served() -> None:
    wires = Wires()
    wires.reachable.clear()
    tasks = dict(zip("abc", wires.wait(*"abc"), strict=True))
    await wires.all[0].waited.wait()
    for key in "bac":
        wires.set(key)
        await tasks[key]
    assert wires.attempts == 1
    wires.reachable.set()
    tasks = dict(zip("de", wires.wait(*"de"), strict=True))
    await wires.quiet()
    assert wires.waiting == [1, 1]
    await wires.aclose()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


@pytest.mark.usefixtures("at_once")
async def test_whoever_shares_gets_the_line_that_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_pool, "MOST_LINES", 2)
    wires = Wires()
    tasks = dict(zip("abcde", wires.wait(*"abcde"), strict=True))
    while sum(wires.waiting) < 5 or len(wires.waiting) < 2:
        await asyncio.sleep(0)
    assert min(wires.waiting) > 0
    for key in "bed":
        wires.set(key)
        await tasks.pop(key)
    await wires.quiet()
    assert wires.waiting == [1, 1]
    assert wires.attempts == 1
    for key in "ca":
        wires.set(key)
        await tasks.pop(key)
    await wires.aclose()


@pytest.mark.usefixtures("at_once")
async def test_a_line_that_cannot_be_opened_is_tried_again_while_they_share() -> None:
    wires = Wires()
    wires.refused = True
    tasks = wires.wait("a", "b", "c")
    while wires.attempts < 5:
        await asyncio.sleep(0)
    wires.set("a")
    await tasks[0]
    wires.refused = False
    await wires.quiet()
    assert wires.waiting == [1, 1]
    await wires.aclose()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_lost_line_fails_its_own_waiters_and_is_used_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_pool, "MOST_LINES", 2)
    monkeypatch.setattr(wait_pool, "OPEN_AFTER", 0.0)
    wires = Wires()
    tasks = wires.wait("a", "b")
    await wires.quiet()
    wires.all[0].lose()
    done, (other,) = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert [str(task.exception()) for task in done] == ["lost"]
    (newcomer,) = wires.wait("c")  # shares the line that is left
    while wires.waiting != [0, 2]:
        await asyncio.sleep(0)
    wires.set("c")
    await newcomer
    await wires.all[1].waited.wait()
    wires.all[1].lose()
    for wait in (other, wires.lines.wait(["d"], 10)):
        with pytest.raises(StoreError, match="lost"):
            await wait
    assert wires.attempts == 1
    await wires.aclose()


@pytest.mark.usefixtures("at_once")
async def test_closing_while_a_line_is_being_opened() -> None:
    wires = Wires()
    wires.reachable.clear()
    tasks = wires.wait("a", "b", "c")
    while not wires.attempts:
        await asyncio.sleep(0)
    error = ClosedError("the end")
    await wires.lines.aclose(error)
    assert await asyncio.gather(*tasks, return_exceptions=True) == [error] * 3
    with pytest.raises(ClosedError, match="the end"):
        await wires.lines.wait(["k"], 10)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert len(wires.all) == 1


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


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("count", [2, MOST_LINES])
async def test_waiters_that_last_send_nothing(client: StoreClient, proxy: Any, count: int, use_libuv: bool) -> None:
    waiting = await StoreClient.connect("127.0.0.1", proxy.port, timeout=60)
    tasks = {f"k{i}": asyncio.create_task(waiting.get(f"k{i}")) for i in range(count)}

    async def sends_nothing() -> bool:
        proxy.chunks.clear()
        for _ in range(20):  # many times what a poll would take
            await waiting.ping()
        return sum(len(chunk) for chunk in proxy.chunks) == 20 * 5

    while not await sends_nothing():
        pass
    assert proxy.connections == 1 + count + (not use_libuv)
    for key in random.sample(list(tasks), count):
        await client.set(key, key)
        assert await tasks.pop(key) == key.encode()
        assert not any(task.done() for task in tasks.values())
    await waiting.aclose()


@pytest.mark.usefixtures("at_once")
async def test_more_waiters_than_lines(client: StoreClient, proxy: Any, until: Until, use_libuv: bool) -> None:
    waiting = await StoreClient.connect("127.0.0.1", proxy.port, timeout=60)
    keys = [f"k{i}" for i in range(2 * MOST_LINES + 3)]
    tasks = {key: asyncio.create_task(waiting.get(key)) for key in keys}
    await until(lambda: len(waiting._waits._lines) == MOST_LINES)
    for key in random.sample(keys, len(keys)):
        await client.set(key, key)
        assert await tasks.pop(key) == key.encode()
        assert not any(task.done() for task in tasks.values())
    assert proxy.connections == 1 + MOST_LINES + (not use_libuv)
    await waiting.aclose()


@pytest.mark.usefixtures("at_once")
async def test_waiters_come_and_go_over_many_lines(client: StoreClient) -> None:
    async def one(number: int) -> None:
        for i in range(20):
            task = asyncio.create_task(client.get(f"{number}/{i}"))
            for _ in range(random.randrange(30)):
                await asyncio.sleep(0)
            if random.random() < 0.3:
                task.cancel()
            await client.set(f"{number}/{i}", b"v")
            assert (await asyncio.gather(task, return_exceptions=True))[0] == b"v" or task.cancelled()

    await asyncio.gather(*(one(number) for number in range(2 * MOST_LINES)))
    assert len(client._waits._lines) <= MOST_LINES
    assert not any(line.waiting for line in client._waits._lines)


@pytest.mark.usefixtures("at_once")
async def test_the_server_goes_while_tasks_wait_on_many_lines(proxy: Any, until: Until) -> None:
    client = await StoreClient.connect("127.0.0.1", proxy.port, timeout=20)
    tasks = [asyncio.create_task(client.get(f"k{i}")) for i in range(5)]
    await until(lambda: [line.waiting for line in client._waits._lines] == [1] * 5)
    connections = proxy.connections
    proxy.cut()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, StoreError)
    with pytest.raises(StoreError, match="was lost"):
        await client.get("k0")
    assert proxy.connections == connections
    await client.aclose()


@pytest.mark.usefixtures("at_once")
async def test_closing_at_any_moment_leaves_nothing_open(
    server: dist.TCPStore, until: Until, sockets: Callable[[], int]
) -> None:
    before = sockets()
    lines = turns = 0
    while lines < 3:  # one turn of the loop later each time, until two more lines are there
        client = await StoreClient.connect("127.0.0.1", server.port, timeout=20)
        tasks = [asyncio.create_task(client.get(f"k{i}")) for i in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        turns += 1 + turns // 8
        lines = len(client._waits._lines)
        await client.aclose()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, ClosedError)
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    await until(lambda: sockets() <= before)  # the server's ends close a little later
