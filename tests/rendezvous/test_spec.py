"""From an URL, the environment or a store to a place, and from a place to a meeting."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
from torch import distributed as dist

from asynccomm.errors import RendezvousError
from asynccomm.rendezvous.spec import RendezvousSpec, connect_store, rehost, resolve_spec
from asynccomm.store.base import PrefixStore
from asynccomm.store.client import StoreClient
from asynccomm.store.memory import MemoryStore
from asynccomm.store.server import listen
from asynccomm.store.torch_store import TorchStore
from tests.cases import cases

ENV = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
SCOPE = "asynccomm/run/0"


def free_port() -> int:
    with listen("127.0.0.1", 0) as sock:
        port: int = sock.getsockname()[1]
        return port


def tcp(rank: int, size: int, port: int) -> RendezvousSpec:
    return resolve_spec(f"tcp://127.0.0.1:{port}?rank={rank}&world_size={size}", None, None, {})


# -- places ------------------------------------------------------------------------------------------------------------


@cases("url", [None, "env://"])
def test_the_environment(url: str | None) -> None:
    assert resolve_spec(url, None, None, ENV) == RendezvousSpec(1, 4, SCOPE, host="head", port=29500)
    assert resolve_spec(url, None, None, ENV | {"RANK": "0"}).hosting
    assert resolve_spec(url, 0, 2, ENV) == RendezvousSpec(0, 2, SCOPE, host="head", port=29500, hosting=True)
    assert resolve_spec("env://?rank=3", None, None, ENV).rank == 3


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert resolve_spec(None, None, None) == RendezvousSpec(1, 4, SCOPE, host="head", port=29500)


def test_loopback_addresses_are_spelled_in_one_way() -> None:
    assert resolve_spec(None, None, None, ENV | {"MASTER_ADDR": "Localhost"}).host == "127.0.0.1"
    assert resolve_spec("tcp://[0:0:0:0:0:0:0:1]:1", 0, 1, {}).host == "::1"


def test_urls_with_addresses() -> None:
    assert tcp(0, 2, 1234) == RendezvousSpec(0, 2, SCOPE, host="127.0.0.1", port=1234, hosting=True)
    assert resolve_spec("tcp://head:1?rank=1", 1, 2, {}) == RendezvousSpec(1, 2, SCOPE, host="head", port=1)
    assert resolve_spec("tcp://[::1]:1", 1, 2, {}).host == "::1"
    assert resolve_spec("tcp://head:1", None, None, ENV).rank == 1
    assert resolve_spec("file:///a/b?world_size=2", 1, None, {}) == RendezvousSpec(1, 2, SCOPE, path="/a/b")
    assert resolve_spec(" FILE:///a/b#1", 0, 2, {}).path == "/a/b#1"
    assert resolve_spec("file:///a/b#1?rank=0", None, 2, {}) == RendezvousSpec(0, 2, SCOPE, path="/a/b#1")


def test_given_stores() -> None:
    ours = MemoryStore()
    assert resolve_spec(ours, 0, 1, {}) == RendezvousSpec(0, 1, SCOPE, store=ours)
    assert isinstance(resolve_spec(dist.HashStore(), 0, 1, {}).store, TorchStore)
    assert resolve_spec(ours, None, None, ENV).size == 4


@cases("agent", ["True", "1", "true"])
def test_rank_0_is_a_client_where_the_launcher_hosts(agent: str) -> None:
    env = ENV | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": agent}
    assert not resolve_spec(None, None, None, env).hosting
    assert resolve_spec(None, None, None, env | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).hosting


def test_runs_and_restarts_do_not_see_each_others_keys() -> None:
    env = ENV | {"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert resolve_spec(None, None, None, env).scope == "asynccomm/job7/2"
    assert resolve_spec(MemoryStore(), 0, 1, env).scope == "asynccomm/job7/2"


@pytest.mark.parametrize(("run_id", "name"), [("job7", "job7"), ("exp/1", "exp/1"), ("a/", "a/"), ("run", "")])
def test_a_run_keeps_its_whole_name(run_id: str, name: str) -> None:
    assert resolve_spec(None, None, None, ENV | {"TORCHELASTIC_RUN_ID": run_id}).run == name


def test_worlds_are_told_apart() -> None:
    store = MemoryStore()
    assert resolve_spec(store, 0, 2, {}).world == resolve_spec(store, 1, 2, {}).world
    assert resolve_spec(store, 0, 2, {}).world != resolve_spec(MemoryStore(), 0, 2, {}).world
    assert tcp(0, 2, 1).world == tcp(1, 2, 1).world != tcp(0, 2, 2).world
    assert resolve_spec("file:///a", 0, 2, {}).world != resolve_spec("file:///b", 0, 2, {}).world


@cases("name, value", product(["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"], [None, ""]))
def test_each_missing_variable_is_named(name: str, value: str | None) -> None:
    env = {key: text for key, text in ENV.items() if key != name} | ({} if value is None else {name: value})
    with pytest.raises(ValueError, match=f"environment variable {name} is not set; start the script with"):
        resolve_spec(None, None, None, env)


@cases(
    "change, message",
    [
        ({"RANK": "x"}, "environment variable RANK must be an integer, got 'x'"),
        ({"RANK": "4"}, r"environment variable RANK must be in \[0, 4\), got 4"),
        ({"RANK": "-1"}, r"environment variable RANK must be in \[0, 4\), got -1"),
        ({"WORLD_SIZE": "2.0"}, "environment variable WORLD_SIZE must be an integer, got '2.0'"),
        ({"WORLD_SIZE": "0"}, "environment variable WORLD_SIZE must be at least 1, got 0"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a port from 1 to 65535, got 'http'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be a port from 1 to 65535, got '0'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be a port from 1 to 65535, got '65536'"),
        ({"MASTER_PORT": "1" * 5000}, "environment variable MASTER_PORT must be a port from 1 to 65535, got '111"),
        ({"MASTER_PORT": "\u0661"}, "environment variable MASTER_PORT must be a port from 1 to 65535, got '\u0661'"),
        (
            {"MASTER_ADDR": "[::1]"},
            r"environment variable MASTER_ADDR must be .* address of a host, without brackets, got '\[::1\]'",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "a\nb\udcff"},
            r"TORCHELASTIC_RUN_ID must be a str that UTF-8 can encode, got 'a\\nb\\udcff'",
        ),
        (
            {"TORCHELASTIC_RESTART_COUNT": "\udcff"},
            r"TORCHELASTIC_RESTART_COUNT must be a str that UTF-8 can encode, got '\\udcff'",
        ),
    ],
)
def test_wrong_variables_are_named_with_their_values(change: Mapping[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_spec(None, None, None, {**ENV, **change})


@cases(
    "url, rank, size, message",
    [
        ("tcp://h:1?rank=0", 1, 2, "rank=1 contradicts rank in the store's URL: 0"),
        ("file:///f?world_size=3", 1, 2, "size=2 contradicts world_size in the store's URL: 3"),
        ("tcp://h:1?rank=x", None, 2, "rank in the store's URL must be an integer, got 'x'"),
        ("tcp://h:1?rank=", 1, 2, "rank in the store's URL must be an integer, got ''"),
        ("tcp://h:1?rank=2&world_size=2", None, None, r"rank in the store's URL must be in \[0, 2\), got 2"),
        ("tcp://h:1?size=2", 1, 2, "may say rank and world_size, not size"),
        ("tcp://h:1", 2, 2, r"rank must be in \[0, 2\), got 2"),
        ("tcp://h:1", 0, 0, "size must be at least 1, got 0"),
        ("tcp://h", 0, 1, "must be tcp://host:port"),
        ("tcp://:1", 0, 1, "must be tcp://host:port"),
        ("tcp://h:1/path", 0, 1, "must be tcp://host:port"),
        ("tcp://h:1#part", 0, 1, "must be tcp://host:port"),
        ("tcp://me@h:1", 0, 1, "must be tcp://host:port"),
        ("tcp://a\0b:1", 0, 1, r"must be the name or address of a host, got 'a\\x00b'"),
        ("tcp://[::1", 0, 1, r"^store 'tcp://\[::1' is no valid URL"),
        ("tcp://h:99999", 0, 1, "has no valid port"),
        ("file://relative", 0, 1, "must name an absolute path"),
        ("file:///a\0b", 0, 1, r"store 'file:///a\\x00b' must name an absolute path"),
        ("http://h:1", 0, 1, "must be env://, tcp://host:port or file:///path"),
        ("h:1", 0, 1, "must be env://"),
    ],
)
def test_wrong_urls_and_arguments_are_named(url: str, rank: int | None, size: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_spec(url, rank, size, {})


def test_the_url_and_an_equal_argument_agree() -> None:
    assert resolve_spec("tcp://h:1?rank=01&world_size=2", 1, 2, {}).rank == 1


@cases("store, rank", [(3, 0), (b"env://", 0), ("tcp://h:1", 1.0), ("tcp://h:1", True)])
def test_wrong_types_are_named(store: object, rank: object) -> None:
    with pytest.raises(TypeError, match=r"store must be a Store|rank must be an integer"):
        resolve_spec(store, rank, 2, {})  # type: ignore[arg-type]


# -- meetings ----------------------------------------------------------------------------------------------------------


async def test_ranks_meet_over_tcp() -> None:
    port = free_port()
    one, zero = await asyncio.gather(connect_store(tcp(1, 2, port), 20), connect_store(tcp(0, 2, port), 20))
    assert zero.hosted is not None
    assert one.hosted is None
    await one.store.set("k", b"v")
    assert await zero.store.get("k") == b"v"
    await one.aclose()
    await zero.aclose()
    await zero.aclose()


async def test_ranks_meet_by_the_environment() -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    places = [resolve_spec(None, None, None, env | {"RANK": str(rank)}) for rank in range(2)]
    zero, one = await asyncio.gather(*(connect_store(place, 20) for place in places))
    assert await one.store.add("n", 1) + await zero.store.add("n", 1) == 3
    await one.aclose()
    await zero.aclose()


async def test_with_the_launchers_store_all_are_clients() -> None:
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "1", "RANK": "0"}
    meeting = await connect_store(resolve_spec(None, None, None, env | {"TORCHELASTIC_USE_AGENT_STORE": "True"}), 20)
    assert meeting.hosted is None
    await meeting.store.set("k", b"v")
    await meeting.aclose()
    assert await asyncio.to_thread(agent.get, "k") == b"v"


async def test_ranks_meet_in_a_file(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?world_size=2"
    zero, one = await asyncio.gather(*(connect_store(resolve_spec(url, rank, None, {}), 20) for rank in range(2)))
    await one.store.set("k", b"v")
    assert await zero.store.get("k") == b"v"
    await zero.aclose()
    await one.aclose()


@pytest.mark.parametrize("name", ["none/store", "dangling", "folder", "pipe"])
async def test_a_path_that_can_be_no_store_is_an_error_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("none/store")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / name
    with pytest.raises(RendezvousError, match=f"cannot use the file {path}: "):
        await connect_store(resolve_spec(f"file://{path}", 0, 1, {}), 20)


async def test_a_file_that_does_not_open_is_an_error_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = threading.Event()
    monkeypatch.setattr("asynccomm.rendezvous.spec._file_store", lambda *_: opens.wait())
    with pytest.raises(RendezvousError, match=r"the file /a did not open within 0.01 s"):
        await connect_store(resolve_spec("file:///a", 0, 1, {}), 0.01)
    opens.set()


async def test_a_given_store_stays_open() -> None:
    port = free_port()
    host = await connect_store(tcp(0, 1, port), 20)
    client = await StoreClient.connect("127.0.0.1", port, timeout=20)
    meeting = await connect_store(resolve_spec(client, 0, 1, {}), 20)
    assert meeting.store is client
    await meeting.aclose()
    await client.ping()
    await client.aclose()
    await host.aclose()


def torch_store() -> dist.TCPStore:
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach(), use_libuv=True
    )


async def test_the_server_of_torchs_store_is_used_without_threads() -> None:
    given = torch_store()
    meeting = await connect_store(resolve_spec(given, 0, 1, {}), 20)
    assert isinstance(meeting.store, StoreClient)
    await meeting.store.set("key", b"value")
    await meeting.store.check([])
    assert given.get("key") == b"value", "the keys are the same, for ranks that have a URL"
    again = await connect_store(resolve_spec(f"tcp://127.0.0.1:{given.port}", 1, 2, {}), 20)
    assert await again.store.get("key") == b"value"
    await meeting.aclose()
    await again.aclose()


async def test_ranks_with_one_prefix_meet_and_others_do_not() -> None:
    given = torch_store()
    stores = [dist.PrefixStore("a", dist.PrefixStore("b", given)) for _ in range(2)]
    other = dist.PrefixStore("b", dist.PrefixStore("a", given))
    meetings = [await connect_store(resolve_spec(store, 0, 1, {}), 20) for store in (*stores, other)]
    assert all(isinstance(meeting.store, PrefixStore) for meeting in meetings)
    await meetings[0].store.set("key", b"value")
    assert await meetings[1].store.get("key", 20) == b"value"
    assert not await meetings[2].store.check(["key"])
    for meeting in meetings:
        await meeting.aclose()


async def test_ranks_agree_on_a_namespace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dist.PrefixStore("a", torch_store())
    meeting = await connect_store(resolve_spec(given, 0, 1, {}), 20)
    await meeting.store.set("key", b"value")
    await meeting.aclose()
    monkeypatch.setattr(TorchStore, "compare_set", None)
    again = await connect_store(resolve_spec(given, 0, 1, {}), 20)
    assert await again.store.get("key", 20) == b"value"
    await again.aclose()
    with pytest.raises(TypeError):  # another store of the same server
        await connect_store(resolve_spec(dist.PrefixStore("a", given), 0, 1, {}), 20)


async def test_a_given_store_lives_as_long_as_the_session() -> None:
    meeting = await connect_store(resolve_spec(torch_store(), 0, 1, {}), 20)
    gc.collect()
    await meeting.store.set("key", b"value")
    assert await meeting.store.get("key", 20) == b"value"
    await meeting.aclose()


async def test_a_subclass_is_used_as_its_class_is() -> None:
    """One rank may count its calls, say."""

    class Own(dist.PrefixStore):
        """May have methods of its own."""

    given = torch_store()
    meetings = [
        await connect_store(resolve_spec(store, 0, 1, {}), 20)
        for store in (dist.PrefixStore("a", given), Own("a", given))
    ]
    await meetings[0].store.set("key", b"value")
    assert await meetings[1].store.get("key", 20) == b"value"
    for meeting in meetings:
        await meeting.aclose()
        await meeting.aclose()  # idempotent: it gives up only its own hold of the client


async def test_other_stores_of_torch_are_used_as_they_are() -> None:
    store = dist.HashStore()
    place = resolve_spec(store, 0, 1, {})
    meeting = await connect_store(place, 20)
    assert meeting.store is place.store
    await meeting.aclose()


async def test_a_given_store_that_is_busy_does_not_hold_up_the_deadline() -> None:
    server = torch_store()
    given = dist.PrefixStore("a", server)
    ended = threading.Event()

    def occupy() -> None:
        with contextlib.suppress(dist.DistStoreError):
            given.wait(["over"], timedelta(seconds=20))
        ended.set()

    threading.Thread(target=occupy).start()
    with pytest.raises(RendezvousError, match=r"the client of the store at 127\.0\.0\.1:\d+ was busy for 0\.05 s"):
        while not ended.is_set():  # the thread may not have begun
            meeting = await connect_store(resolve_spec(given, 0, 1, {}), 0.05)
            await meeting.aclose()
    dist.TCPStore("127.0.0.1", server.port, is_master=False).set("a/over", "1")
    await asyncio.to_thread(ended.wait)


async def test_a_store_hosted_anew_is_there_at_once_and_ends_with_its_place() -> None:
    place: RendezvousSpec | None = rehost(resolve_spec(MemoryStore(), 0, 1), "127.0.0.1")
    assert place is not None
    port = place.port
    gc.collect()
    early = await StoreClient.connect("127.0.0.1", port, timeout=20)  # before anybody has met there
    await early.aclose()
    meeting = await connect_store(place, 20)
    place = None
    gc.collect()
    await meeting.store.set("key", "value")
    await meeting.aclose()
    del meeting
    gc.collect()
    with pytest.raises(RendezvousError, match=str(port)):
        await StoreClient.connect("127.0.0.1", port, timeout=0.1)


async def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already in use"):
            await connect_store(tcp(0, 2, port), 20)


async def test_nobody_hosts() -> None:
    port = free_port()
    with pytest.raises(RendezvousError, match=rf"no store at 127\.0\.0\.1:{port} within 0\.05 s"):
        await connect_store(tcp(1, 2, port), 0.05)


@pytest.mark.timeout(20)
async def test_a_wrong_master_address_is_named() -> None:
    place = resolve_spec(f"tcp://no.such.host.invalid:{free_port()}", 0, 1, {})
    with pytest.raises(RendezvousError, match=rf"no store at no\.such\.host\.invalid:{place.port} within 0\.05 s"):
        await connect_store(place, 0.05)


async def test_one_process_meets_twice_at_one_address() -> None:
    port = free_port()
    first, second = await asyncio.gather(connect_store(tcp(0, 1, port), 20), connect_store(tcp(0, 1, port), 20))
    assert first.hosted is second.hosted
    await first.store.set("k", b"v")
    assert await second.store.get("k") == b"v"
    await first.aclose()
    assert await second.store.get("k") == b"v"  # the server lives as long as its last user
    third = await connect_store(tcp(0, 1, port), 20)
    assert await third.store.get("k") == b"v"
    await second.aclose()
    await third.aclose()
    fourth = await connect_store(tcp(0, 1, port), 20)
    assert not await fourth.store.check(["k"])
    await fourth.aclose()


async def test_one_process_meets_at_two_spellings_of_a_loopback_address() -> None:
    port = free_port()
    places = [resolve_spec(f"tcp://{host}:{port}", 0, 1, {}) for host in ("LOCALHOST", "[::ffff:127.0.0.1]", "127.1")]
    assert len({place.world for place in places}) == 1, "the comms of these places take different names"
    first, *others = [await connect_store(place, 20) for place in places]
    assert all(other.hosted is first.hosted for other in others)
    listen("127.0.0.2", port).close()  # the server is at no other address
    for meeting in (first, *others):
        await meeting.aclose()


async def test_loops_in_other_threads_share_the_server() -> None:
    port = free_port()

    def other() -> int:
        async def main() -> int:
            meeting = await connect_store(tcp(0, 1, port), 20)
            count = await meeting.store.add("n", 1)
            await meeting.aclose()
            return count

        return asyncio.run(main())

    keep = await connect_store(tcp(0, 1, port), 20)
    assert sorted(await asyncio.gather(*(asyncio.to_thread(other) for _ in range(4)))) == [1, 2, 3, 4]
    await keep.aclose()


async def test_meeting_can_be_cancelled_anywhere() -> None:
    port = free_port()
    turns, finished = 0, False
    while not finished:
        task = asyncio.create_task(connect_store(tcp(0, 1, port), 20))
        for _ in range(turns):
            await asyncio.sleep(0)
        turns += 1 + turns // 4
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        # a server that was about to start in its thread when the wait was given up may hold the port for a moment
        assert not isinstance(result, Exception) or isinstance(result, RendezvousError), result
        if not isinstance(result, BaseException):
            finished = True
            await result.aclose()
