"""The client against torch's two servers, against torch's own client, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed as dist

from asynccomm.errors import ClosedError, RendezvousError, StoreError, StoreProtocolError, StoreTimeoutError
from asynccomm.runner import run
from asynccomm.store import base
from asynccomm.store.client import StoreClient
from asynccomm.store.codec import MAX_KEY, MAX_VALUE
from asynccomm.store.server import StoreServer, listen, serve

StartFake = Callable[[Callable[..., Awaitable[None]]], Awaitable[Any]]
Until = Callable[[Callable[[], object]], Awaitable[None]]


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Greet back as a TCPStore does."""
    greeting = await reader.readexactly(10)
    assert greeting[:6] == b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"\x0d"
    writer.write(greeting[6:])


async def greet_then_hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await hello(reader, writer)
    await reader.read()


async def listen_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def store_that(
    commands: Callable[..., Awaitable[None]], waits: Callable[..., Awaitable[None]] = listen_only
) -> Callable[..., Awaitable[None]]:
    """A fake server that lets a client connect, and then does this on its two connections."""
    count = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        first = count == 1
        await hello(reader, writer)
        if not first:
            await reader.readexactly(1)  # the probe: a GET for a missing key
            (length,) = struct.unpack("=Q", await reader.readexactly(8))
            await reader.readexactly(length)
            writer.write(bytes(8))
        await (commands if first else waits)(reader, writer)

    return handler


# -- torch's servers and clients ---------------------------------------------------------------------------------------


async def test_every_request(client: StoreClient) -> None:
    await client.ping()
    await client.set("k", b"v")
    await client.append("k", b"w")
    assert await client.get("k") == b"vw"
    assert await client.add("n", 2) == 2
    assert await client.compare_set("c", b"", b"x") == b"x"
    assert await client.check(["k", "n", "c"])
    assert await client.num_keys() >= 3
    await client.multi_set({"m1": b"1", "m2": b"2"})
    assert await client.multi_get(["m1", "m2"]) == [b"1", b"2"]
    assert set(await client.list_keys()) >= {"k", "n", "c", "m1", "m2"}
    assert await client.delete("k")
    await client.wait(["m1"])
    with pytest.raises(StoreTimeoutError, match="'k'"):
        await client.get("k", 0.01)


async def test_torchs_client_and_ours_see_the_same(client: StoreClient, server: dist.TCPStore) -> None:
    def theirs() -> None:
        server.set("set", "1")
        server.append("append", "x")
        assert server.add("n", 5) == 5
        server.multi_set(["m1", "m2"], ["a", "b"])
        dist.PrefixStore("in", dist.PrefixStore("out/", server)).set("k", "v")

    await asyncio.to_thread(theirs)
    assert await client.multi_get(["set", "append", "m1", "m2"]) == [b"1", b"x", b"a", b"b"]
    assert await client.add("n", 1) == 6
    assert await client.prefix("out/").prefix("in").get("k") == b"v"
    await client.append("append", b"y")
    await client.prefix("p").set("q", b"ours")
    assert await client.compare_set("c", b"", b"z") == b"z"
    await client.ping()

    def check() -> None:
        assert server.get("append") == b"xy"
        assert server.add("n", 1) == 7
        assert dist.PrefixStore("p", server).get("q") == b"ours"
        assert server.compare_set("c", "z", "y") == b"y"
        assert server.delete_key("c")

    await asyncio.to_thread(check)
    assert not await client.check(["c"])


async def test_torchs_waiter_is_woken_by_us(client: StoreClient, server: dist.TCPStore) -> None:
    thread = asyncio.create_task(asyncio.to_thread(server.get, "late"))
    await client.ping()
    await client.set("late", b"v")
    assert await thread == b"v"


async def test_a_thousand_adds_at_once(client: StoreClient) -> None:
    assert await asyncio.gather(*(client.add("n", 1) for _ in range(1000))) == list(range(1, 1001))


async def test_all_kinds_of_requests_at_once_keep_their_replies(client: StoreClient) -> None:
    async def one(i: int) -> None:
        await client.set(f"k{i}", str(i))
        assert await client.get(f"k{i}") == str(i).encode()
        assert await client.add(f"n{i}", i) == i
        assert await client.check([f"k{i}", f"n{i}"])
        assert await client.delete(f"k{i}")
        assert await client.multi_get([f"n{i}"]) == [str(i).encode()]

    await asyncio.gather(*(one(i) for i in range(100)))


async def test_requests_of_one_turn_leave_in_one_write(proxy: Any, use_libuv: bool) -> None:
    client = await StoreClient.connect("127.0.0.1", proxy.port, timeout=20)
    writes: list[bytes] = []
    transport = client._command._transport
    assert transport is not None
    actual = transport.write

    class Counting:
        def write(self, data: bytes) -> None:
            writes.append(data)
            actual(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(transport, name)

    client._command._transport = Counting()  # type: ignore[assignment]
    await asyncio.gather(*(client.add("n", 1) for _ in range(1000)))
    assert len(writes) == 2  # the first finds the line idle and goes at once
    assert len(writes[0]) * 999 == len(writes[1])
    writes.clear()
    assert await client.get("n") == b"1000"
    assert len(writes) == (1 if use_libuv else 2)
    writes.clear()
    await asyncio.gather(*(client.set(f"k{i}", b"v") for i in range(100)))
    await client.ping()
    assert len(writes) <= 2
    await client.aclose()


async def test_a_lone_get_of_what_is_there_is_one_round_trip(proxy: Any, use_libuv: bool) -> None:
    client = await StoreClient.connect("127.0.0.1", proxy.port, timeout=20)
    await client.set("k", b"v")
    await client.ping()
    proxy.chunks.clear()
    assert await client.get("k") == b"v"
    assert len(proxy.chunks) == (1 if use_libuv else 2)
    await client.aclose()


async def test_a_get_of_a_missing_key_waits_at_once(client: StoreClient, use_libuv: bool) -> None:
    checks = 0
    check = client._command.codec.check

    def counted(keys: Sequence[str]) -> None:
        nonlocal checks
        checks += 1
        check(keys)

    client._command.codec.check = counted  # type: ignore[method-assign]
    getting = asyncio.create_task(client.get("late", 20))
    await client.ping()
    await client.set("late", b"value")
    assert await getting == b"value"
    assert checks == (0 if use_libuv else 2)  # a legacy server drops a client that asks for a missing key
    await client.aclose()


async def test_a_get_of_an_empty_value(client: StoreClient) -> None:
    await client.set("empty", b"")
    for limit in (20, 1e-6, 0):
        assert await client.get("empty", limit) == b"", limit
    for limit in (0.01, 1e-6, 0):
        with pytest.raises(StoreTimeoutError, match=rf"\['missing'\] did not all appear within {limit:g} s"):
            await client.get("missing", limit)
    await client.aclose()


async def test_cancelled_requests_keep_their_place(client: StoreClient) -> None:
    tasks = [client.add("n", 1) for _ in range(50)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[1::2] == list(range(2, 51, 2))
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert await client.get("n") == b"50"


async def test_cancelling_a_get_anywhere_leaves_the_client_usable(client: StoreClient) -> None:
    await client.set("k", b"v")
    for turns in range(12):
        task = asyncio.create_task(client.get("k"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await client.get("k") == b"v"


async def test_large_values_and_many_sets_do_not_pile_up(client: StoreClient) -> None:
    value = bytes(1 << 20)
    most = 0
    for i in range(16):
        await client.set(f"k{i % 2}", value)
        transport = client._command._transport
        assert transport is not None
        most = max(most, client._command._codec.unsent + transport.get_write_buffer_size())
    assert most < 4 << 20
    assert await client.get("k0") == value


async def test_the_largest_key_and_value_pass(client: StoreClient) -> None:
    await client.set("k" * MAX_KEY, b"v")
    assert await client.get("k" * MAX_KEY) == b"v"
    await client.set("large", bytes(MAX_VALUE))
    assert len(await client.get("large")) == MAX_VALUE


async def test_what_is_too_large_is_refused_before_it_is_sent(client: StoreClient) -> None:
    with pytest.raises(StoreError, match=f"limit of {MAX_VALUE}"):
        await client.set("k", bytes(MAX_VALUE + 1))
    with pytest.raises(StoreError, match=f"limit of {MAX_KEY}"):
        await client.get("k" * (MAX_KEY + 1))
    with pytest.raises(TypeError, match="value of 'k'"):
        await client.multi_set({"k": 3})  # type: ignore[dict-item]
    await client.ping()


async def test_use_after_close(client: StoreClient) -> None:
    waiting = asyncio.create_task(client.get("never"))
    await client.ping()
    pending = client.add("n", 1)
    await asyncio.sleep(0)
    await client.aclose()
    await client.aclose()
    with pytest.raises(ClosedError, match="closed"):  # in the middle of a request, or before its next
        await waiting
    assert isinstance((await asyncio.gather(pending, return_exceptions=True))[0], (int, ClosedError))
    for call in (client.get("k"), client.set("k", b""), client.ping(), client.wait(["k"]), client.multi_get(["k"])):
        with pytest.raises(ClosedError, match=r"store at 127\.0\.0\.1:\d+ is closed"):
            await call


async def test_what_was_set_before_the_close_arrives(client: StoreClient, server: dist.TCPStore) -> None:
    await client.set("last", b"words")
    await client.aclose()
    assert await asyncio.to_thread(server.get, "last") == b"words"


# -- servers that die or misbehave -------------------------------------------------------------------------------------


async def test_a_lost_connection_fails_all_that_is_pending(fake: StartFake) -> None:
    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.transport.abort()

    server = await fake(store_that(drop))
    client = await StoreClient.connect("127.0.0.1", server.port, timeout=20)
    results = await asyncio.gather(*(client.add("n", 1) for _ in range(100)), return_exceptions=True)
    assert all(isinstance(result, StoreError) and "was lost" in str(result) for result in results)
    with pytest.raises(StoreError, match="was lost"):  # no reconnect: a lost reply to ADD cannot be asked for again
        await client.add("n", 1)
    assert server.connections == 2
    await client.aclose()


async def test_garbage_fails_all_that_is_pending(fake: StartFake) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.write(b"\xff" * 8)
        await reader.read()

    server = await fake(store_that(babble))
    client = await StoreClient.connect("127.0.0.1", server.port, timeout=20)
    results = await asyncio.gather(*(client.check(["k"]) for _ in range(10)), return_exceptions=True)
    assert all(isinstance(result, StoreProtocolError) for result in results)
    with pytest.raises(StoreProtocolError, match=f"127.0.0.1:{server.port}: a status byte"):
        await client.check(["k"])
    await client.aclose()


async def test_a_wait_line_that_babbles(fake: StartFake) -> None:
    async def missing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)  # a GET
        writer.write(bytes(8))
        await reader.read()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.write(b"\x01")  # cancelled, which nobody asked for
        await reader.read()

    server = await fake(store_that(missing, babble))
    client = await StoreClient.connect("127.0.0.1", server.port, timeout=20)
    with pytest.raises(StoreProtocolError, match="nobody cancelled"):
        await client.get("k")
    await client.aclose()


async def test_a_proxy_cuts_the_connection(proxy: Any, until: Until, use_libuv: bool) -> None:
    client = await StoreClient.connect("127.0.0.1", proxy.port, timeout=20)
    await client.ping()
    proxy.cut()
    # how soon it is noticed is the kernel's affair
    await until(lambda: client._command.lost.done() and all(line.lost for line in client._waits._lines))
    with pytest.raises(StoreError, match="was lost"):
        await client.ping()
    with pytest.raises(StoreError, match="was lost"):
        await client.set("k", b"v")
    assert proxy.connections == (2 if use_libuv else 3)  # nobody connected again
    await client.aclose()


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_a_reply_that_comes_while_the_loop_is_blocked_counts(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, use_uvloop: bool
) -> None:
    monkeypatch.setattr(base, "REPLY_SECONDS", 0.05)
    server.set("k", "v")

    async def main() -> list[Any]:
        client = await StoreClient.connect("127.0.0.1", server.port, timeout=20)
        found = []
        calls: list[Callable[[], Awaitable[Any]]] = [lambda: client.get("k", 0), lambda: client.get("k", 0.01)]
        try:
            for call in [*calls, lambda: client.wait(["k"], 0), lambda: client.multi_get(["k"], 0.01)]:
                task = asyncio.ensure_future(call())
                await asyncio.sleep(0)
                time.sleep(0.2)  # of the loop, as a program that compiles a model blocks it
                found.append(await task)
        finally:
            await client.aclose()
        return found

    assert run(main(), use_uvloop=use_uvloop) == [b"v", b"v", None, [b"v"]]


async def test_a_stopped_server_is_not_waited_for_beyond_the_limit(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "REPLY_SECONDS", 0.05)
    async with asyncio.timeout(20):
        client = await StoreClient.connect("127.0.0.1", proxy.port, timeout=20)
        await client.multi_set({"a": b"1", "b": b"2"})
        other = asyncio.create_task(client.get("later", 20))  # the client is shared
        await client.ping()
        proxy.flowing.clear()
        calls: list[Awaitable[Any]] = [client.get("a", 0), client.get("none", 0.01), client.wait(["a"], 0.01)]
        for call in [*calls, client.multi_get(["a", "b"], 0.01), client.prefix("p").get("a", 0.01)]:
            with pytest.raises(
                StoreTimeoutError, match=rf"the store at 127\.0\.0\.1:{proxy.port} did not answer in time"
            ):
                await call
        proxy.flowing.set()
        # the late replies of the calls above are nobody else's
        monkeypatch.undo()
        assert await asyncio.gather(client.add("n", 7), client.get("b"), client.check(["none"])) == [7, b"2", False]
        await client.set("later", b"3")
        assert await other == b"3"
        await client.aclose()


async def test_a_set_held_up_by_a_full_line_learns_of_its_end(fake: StartFake, until: Until) -> None:
    async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        await cut.wait()
        writer.transport.abort()

    cut = asyncio.Event()
    server = await fake(store_that(never_read))
    client = await StoreClient.connect("127.0.0.1", server.port, timeout=20)

    async def fill() -> None:
        while True:
            await client.set("k", bytes(MAX_VALUE))

    task = asyncio.create_task(fill())
    await until(lambda: not client._command._writable.is_set())
    cut.set()
    with pytest.raises(StoreError, match="was lost"):
        await task
    await client.aclose()


# -- connecting --------------------------------------------------------------------------------------------------------


async def test_connecting_tries_again_until_the_server_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    loop = asyncio.get_running_loop()
    attempts = 0
    enough = asyncio.Event()
    actual = loop.create_connection

    async def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts > 2:
            enough.set()
        return await actual(*args, **kwargs)

    monkeypatch.setattr(loop, "create_connection", counted)
    connecting = asyncio.create_task(StoreClient.connect("127.0.0.1", port, timeout=20))
    await enough.wait()
    assert not connecting.done()
    hosted: StoreServer = await asyncio.to_thread(serve, "127.0.0.1", listen("127.0.0.1", port))
    client = await connecting
    assert await client.add("n", 1) == 1
    await client.aclose()
    hosted.release()


async def test_nobody_there() -> None:
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    async with asyncio.timeout(10):
        with pytest.raises(RendezvousError, match=rf"no store at 127\.0\.0\.1:{port} within 0\.1 s: .*refused"):
            await StoreClient.connect("127.0.0.1", port, connect_timeout=0.1)


async def test_an_unknown_host() -> None:
    with pytest.raises(RendezvousError, match=r"no store at no\.such\.host\.invalid:1 within 0\.1 s"):
        await StoreClient.connect("no.such.host.invalid", 1, connect_timeout=0.1)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("timeout", math.nan, "must be positive, got nan"),
        ("timeout", -1, "must be positive, got -1"),
        ("timeout", 0, "must be positive, got 0"),
        ("timeout", True, "must be seconds or a timedelta, got True"),
        ("timeout", "3", "must be seconds or a timedelta, got '3'"),
        ("timeout", None, "must be seconds or a timedelta, got None"),
        ("connect_timeout", 0, "must be positive, got 0"),
        ("port", 99999, "must be an integer from 1 to 65535, got 99999"),
        ("port", -1, "must be an integer from 1 to 65535, got -1"),
        ("port", 1.5, "must be an integer from 1 to 65535, got 1.5"),
        ("port", "29500", "must be an integer from 1 to 65535, got '29500'"),
        ("host", None, "must be the name or address of a host, got None"),
        ("host", "", "must be the name or address of a host, got ''"),
        ("host", "a..b", "must be the name or address of a host, got 'a..b'"),
        ("host", "a" * 70, "must be the name or address of a host, got 'aaa"),
    ],
)
async def test_wrong_arguments_are_named_with_their_values(name: str, value: object, text: str) -> None:
    arguments: dict[str, Any] = {"host": "127.0.0.1", "port": 1, name: value}
    with pytest.raises((TypeError, ValueError)) as caught:
        await StoreClient.connect(**arguments)
    assert str(caught.value).startswith(f"{name} {text}")


async def test_a_time_limit_may_be_a_timedelta(server: dist.TCPStore) -> None:
    client = await StoreClient.connect("127.0.0.1", server.port, timeout=timedelta(milliseconds=10), connect_timeout=10)
    with pytest.raises(StoreTimeoutError, match=r"within 0\.01 s"):
        await client.get("missing")
    await client.aclose()


async def test_a_silent_server_is_not_waited_for_beyond_the_limit(fake: StartFake) -> None:
    server = await fake(listen_only)
    with pytest.raises(RendezvousError, match=rf"127\.0\.0\.1:{server.port} within 0\.1 s: .*is it a TCPStore"):
        await StoreClient.connect("127.0.0.1", server.port, connect_timeout=0.1)


async def test_a_server_that_stops_after_the_greeting(fake: StartFake) -> None:
    server = await fake(greet_then_hang)
    with pytest.raises(RendezvousError, match="within 1 s: the server stopped answering"):
        await StoreClient.connect("127.0.0.1", server.port, connect_timeout=1)


async def test_something_else_is_on_that_port(fake: StartFake) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    server = await fake(http)
    with pytest.raises(StoreProtocolError, match=rf"127\.0\.0\.1:{server.port}: .*no TCPStore\?"):
        await StoreClient.connect("127.0.0.1", server.port)


async def test_something_that_hangs_up_is_tried_until_the_limit(fake: StartFake) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        return

    server = await fake(hang_up)
    with pytest.raises(RendezvousError, match=r"within 0\.2 s: .*was lost"):
        await StoreClient.connect("127.0.0.1", server.port, connect_timeout=0.2)
    assert server.connections > 1


async def test_connecting_can_be_cancelled_anywhere(server: dist.TCPStore) -> None:
    finished = False
    turns = 0
    while not finished:  # one turn of the loop later each time, until it gets through
        task = asyncio.create_task(StoreClient.connect("127.0.0.1", server.port, timeout=20))
        for _ in range(turns):
            await asyncio.sleep(0)
        turns += 1 + turns // 8
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            client = await task
            finished = True
            await client.aclose()


async def test_connecting_obeys_a_timeout_from_outside(fake: StartFake) -> None:
    server = await fake(greet_then_hang)
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.05):
            await StoreClient.connect("127.0.0.1", server.port, connect_timeout=math.inf)
    assert not isinstance(caught.value, StoreError)


async def test_cancelling_between_attempts() -> None:
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await StoreClient.connect("127.0.0.1", port)


async def test_nothing_stays_open(server: dist.TCPStore, until: Until, sockets: Callable[[], int]) -> None:
    first = await StoreClient.connect("127.0.0.1", server.port)
    await first.aclose()
    before = sockets()
    clients = [await StoreClient.connect("127.0.0.1", server.port) for _ in range(5)]
    assert sockets() >= before + 10
    for client in clients:
        await client.aclose()
    await until(lambda: sockets() <= before)  # the server's ends close a little later


async def test_options_of_the_sockets(client: StoreClient) -> None:
    transport = client._command._transport
    assert transport is not None
    sock = transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_a_get_is_not_fooled_by_a_wake_up_for_nothing(client: StoreClient, use_libuv: bool) -> None:
    getting = asyncio.create_task(client.get("woken", 20))
    await client.ping()
    for _ in range(10):
        await client.compare_set("woken", b"expected", b"nothing")  # stores nothing; libuv's server wakes the waiter
        await client.check([])
    assert not getting.done()
    await client.set("woken", b"")  # an empty value is one
    assert await getting == b""
    assert await client.get("woken", 0) == b""
