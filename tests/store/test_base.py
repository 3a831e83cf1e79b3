"""One behaviour, whatever the store: our client on torch's two servers, memory, torch's stores, and under a prefix."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from asynccomm.errors import StoreError, StoreTimeoutError
from asynccomm.store.base import PrefixStore, Store, path_of, within
from asynccomm.store.client import StoreClient
from asynccomm.store.memory import MemoryStore
from asynccomm.store.server import listen
from asynccomm.store.torch_store import TorchStore

KINDS = ["client-libuv", "client-legacy", "memory", "hash", "file", "tcp", "prefix", "torch-prefix"]


def tcp_server(use_libuv: bool) -> dist.TCPStore:
    # an IPv4 socket: on torch's own the server looks up the names of its peers, which may take the resolver seconds
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        use_libuv=use_libuv,
        master_listen_fd=listening.detach(),
    )


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Store]:
    if kind.startswith("client"):
        server = tcp_server(use_libuv=kind == "client-libuv")
        client = await StoreClient.connect("127.0.0.1", server.port, timeout=20, connect_timeout=10)
        try:
            yield client
        finally:
            await client.aclose()
    elif kind == "memory":
        yield MemoryStore(timeout=20)
    elif kind == "prefix":
        yield MemoryStore(timeout=20).prefix("a").prefix("b")
    elif kind == "hash":
        yield TorchStore(dist.HashStore(), timeout=20)
    elif kind == "file":
        yield TorchStore(dist.FileStore(str(folder / "store"), 1), timeout=20)
    elif kind == "tcp":
        yield TorchStore(tcp_server(use_libuv=True), timeout=20)
    else:
        yield TorchStore(dist.PrefixStore("p", dist.HashStore()), timeout=20)


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(request.param, tmp_path) as store:
        yield store
        await store.aclose()


async def until_waiting(task: asyncio.Task[object]) -> None:
    """Let ``task`` get to where it waits: it has answered nothing after it had every chance to."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()


async def test_set_get_and_overwrite(store: Store) -> None:
    await store.set("k", b"\x00\xff")
    assert await store.get("k") == b"\x00\xff"
    await store.set("k", "é")
    assert await store.get("k") == "é".encode()
    await store.set("empty", b"")
    assert await store.get("empty") == b""
    await store.set("big", bytes(range(256)) * 4096)
    assert await store.get("big") == bytes(range(256)) * 4096


async def test_add_counts_and_zero_creates(store: Store) -> None:
    assert await store.add("n", 5) == 5
    assert await store.add("n", -7) == -2
    assert await store.get("n") == b"-2"
    assert await store.add("zero", 0) == 0
    assert await store.check(["zero"])
    await store.set("n", "40")
    assert await store.add("n", 2) == 42


async def test_add_refuses_what_is_no_number(store: Store) -> None:
    for amount in (2**63, -(2**63) - 1, 1.5, True, "1"):
        with pytest.raises(ValueError, match="64-bit"):
            await store.add("n", amount)
    assert not await store.check(["n"])


async def test_compare_set_has_torchs_ways(store: Store) -> None:
    assert await store.compare_set("k", b"expected", b"new") == b"expected"  # looks like success, stored nothing
    assert not await store.check(["k"])
    assert await store.compare_set("k", b"", b"one") == b"one"
    assert await store.compare_set("k", b"other", b"two") == b"one"
    assert await store.compare_set("k", "one", "two") == b"two"
    assert await store.get("k") == b"two"


async def test_check_delete_append_and_count(store: Store) -> None:
    before = await store.num_keys()
    await store.set("a", b"1")
    await store.append("a", b"2")
    await store.append("b", "3")
    assert await store.get("a") == b"12"
    assert await store.get("b") == b"3"
    assert await store.check(["a", "b"])
    assert not await store.check(["a", "missing"])
    assert await store.check([])
    assert await store.num_keys() == before + 2
    assert await store.delete("a")
    assert not await store.check(["a"])


async def test_deleting_what_is_not_there_says_so(tmp_path: Path) -> None:
    for kind in KINDS:
        if kind != "file":  # torch's FileStore says True whenever it knew the key once
            async with opened(kind, tmp_path) as store:
                await store.set("k", b"")
                assert [await store.delete("k"), await store.delete("k"), await store.delete("never")] == [
                    True,
                    False,
                    False,
                ]


async def test_many_at_once(store: Store) -> None:
    await store.multi_set({f"k{i}": str(i) for i in range(20)})
    assert await store.multi_get([f"k{i}" for i in range(20)]) == [str(i).encode() for i in range(20)]
    assert await store.multi_get([]) == []
    await store.multi_set({})
    await store.multi_set({"large0": bytes(300 << 10), "large1": b"x"})
    assert await store.multi_get(["large1", "large0"]) == [b"x", bytes(300 << 10)]


async def test_get_and_wait_return_when_the_key_comes(store: Store) -> None:
    getting = asyncio.create_task(store.get("late"))
    waiting = asyncio.create_task(store.wait(["late", "later"], math.inf))
    await until_waiting(getting)
    await store.set("late", b"v")
    assert await getting == b"v"
    await until_waiting(waiting)
    await store.set("later", b"")
    await waiting
    await store.wait(["late"])
    await store.wait([])


async def test_timeouts_name_the_key(store: Store) -> None:
    with pytest.raises(StoreTimeoutError, match=r"nobody/sets/this.* within 0\.02 s"):
        await store.get("nobody/sets/this", 0.02)
    with pytest.raises(TimeoutError, match="nor/this"):
        await store.wait(["nor/this"], 0)
    await store.set("there", b"v")
    assert await store.get("there", 0) == b"v"  # what is there needs no time
    await store.wait(["there"], 0)


async def test_a_cancelled_wait_leaves_the_store_usable(store: Store) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await store.get("never")
    await store.set("k", b"v")
    assert await store.get("k") == b"v"


async def test_arguments_of_the_wrong_type_are_named(store: Store) -> None:
    with pytest.raises(TypeError, match="value must be bytes or str"):
        await store.set("k", 3)
    for call in (store.check, store.wait):
        with pytest.raises(TypeError, match="list of keys"):
            await call("abc")


async def test_keys_that_are_no_text_are_refused(store: Store) -> None:
    five: Any = 5
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.set(five, b""),
        lambda: store.get(five),
        lambda: store.add(five, 1),
        lambda: store.compare_set(five, b"", b"x"),
        lambda: store.check(["a", five]),
        lambda: store.wait([five]),
        lambda: store.delete(five),
        lambda: store.append(five, b""),
        lambda: store.multi_get([five]),
        lambda: store.multi_set({five: b""}),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="key must be a str, got 5"):
            await call()
    assert not await store.check(["5"])


async def test_text_that_utf8_cannot_encode_is_named(store: Store) -> None:
    text = "\ud800"
    calls: list[tuple[str, Awaitable[Any]]] = [
        ("key", store.set(text, b"")),
        ("key", store.get(text, 0)),
        ("key", store.wait([text], 0)),
        ("value", store.set("k", text)),
        ("value", store.append("k", text)),
        ("value( of 'k')?", store.multi_set({"k": text})),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=rf"^{name} must be .*that UTF-8 can encode, got '\\ud800'"):
            await call
    with pytest.raises(ValueError, match=r"^desired must be .*that UTF-8 can encode, got '\\ud800'"):
        await store.compare_set("k", b"", text)


async def test_a_timeout_may_be_a_timedelta(store: Store) -> None:
    await store.set("here", b"x")
    assert await store.get("here", timedelta(seconds=20)) == b"x"
    await store.wait(["here"], timedelta(seconds=20))
    with pytest.raises(StoreTimeoutError, match=r"within 0\.01 s"):
        await store.get("missing", timedelta(seconds=0.01))
    wrong: Any
    for wrong in ("3", True):
        for call in (store.get("here", wrong), store.wait(["here"], wrong), store.multi_get(["here"], wrong)):
            with pytest.raises(TypeError, match=f"timeout must be seconds or a timedelta, got {wrong!r}"):
                await call


async def test_nan_is_no_timeout(store: Store) -> None:
    await store.set("here", b"x")
    for key in ("here", "missing"):
        for call in (store.get(key, math.nan), store.wait([key], math.nan), store.multi_get([key], math.nan)):
            with pytest.raises(ValueError, match="timeout must be a number of seconds, got nan"):
                await asyncio.wait_for(call, 10)


async def test_a_prefix_names_keys_as_torch_does() -> None:
    raw = dist.HashStore()
    store = TorchStore(raw)
    await store.prefix("a").prefix("b/").set("k", b"ours")
    assert dist.PrefixStore("b/", dist.PrefixStore("a", raw)).get("k") == b"ours"
    dist.PrefixStore("in", dist.PrefixStore("out", raw)).set("k", "theirs")
    assert await store.get("out/in/k") == b"theirs"
    assert await store.prefix("out").prefix("in").get("k") == b"theirs"


def test_a_prefix_of_a_prefix_is_one_view() -> None:
    store = MemoryStore()
    view = store.prefix("a").prefix("b/c")
    assert (view.name, view.underlying) == ("a/b/c", store)
    assert path_of(view) == path_of(PrefixStore("b/c", PrefixStore("a", store))) == "a/b/c"
    assert path_of(store) == ""


async def test_a_prefix_covers_every_method() -> None:
    store = MemoryStore()
    view = store.prefix("p")
    await view.set("set", b"")
    await view.add("add", 1)
    await view.append("append", b"x")
    await view.compare_set("compare_set", b"", b"x")
    await view.multi_set({"multi_set": b"y"})
    names = ["set", "add", "append", "compare_set", "multi_set"]
    assert await store.check([f"p/{name}" for name in names])
    assert not await store.check(["set"])
    assert await view.multi_get(["add", "multi_set"]) == [b"1", b"y"]
    assert await view.num_keys() == 5
    assert await view.delete("set")
    await view.aclose()  # the other store stays open
    assert await store.num_keys() == 4
    with pytest.raises(TypeError, match="list of keys"):
        await view.multi_get("abc")


async def test_timeouts_of_the_prefix_name_the_whole_key() -> None:
    with pytest.raises(StoreTimeoutError, match="p/k"):
        await MemoryStore().prefix("p").get("k", 0)


async def test_within_takes_infinity() -> None:
    async with within(math.inf) as scope:
        assert scope.when() is None
    with pytest.raises(TimeoutError):
        async with within(0):
            await asyncio.Event().wait()


async def test_adding_to_text_is_an_error(tmp_path: Path) -> None:
    for kind in ("memory", "hash"):
        async with opened(kind, tmp_path) as store:
            await store.set("k", "hello")
            with pytest.raises(StoreError):
                await store.add("k", 1)


@pytest.mark.parametrize("kind", [*KINDS, "torch-prefix-tcp"])
async def test_the_way_to_a_server_tells_the_address_of_this_host(kind: str, tmp_path: Path) -> None:
    if kind == "torch-prefix-tcp":
        found: Store = TorchStore(dist.PrefixStore("p", dist.PrefixStore("q", tcp_server(use_libuv=True))))
        assert found.local_address() == "127.0.0.1"
        return
    async with opened(kind, tmp_path) as store:
        address = "127.0.0.1" if kind in ("client-libuv", "client-legacy", "tcp") else None
        assert store.local_address() == store.prefix("a").prefix("b").local_address() == address
