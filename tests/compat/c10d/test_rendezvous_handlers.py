"""Where ranks meet, and the barrier over the store."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as torch_dist
from torch.distributed import distributed_c10d as torch_c10d

import asynccomm.compat.c10d as dist
from asynccomm import MemoryStore, Store, StoreTimeoutError
from asynccomm.compat.c10d import rendezvous_handlers
from asynccomm.compat.c10d.rendezvous_handlers import LeaveOnExit, as_store

LIMIT = timedelta(seconds=30)
VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    yield port


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten."""
    monkeypatch.setattr(rendezvous_handlers, "_handlers", dict(rendezvous_handlers._handlers))


def test_stores_of_both_kinds() -> None:
    ours = MemoryStore()
    assert as_store(ours) is ours
    assert isinstance(as_store(torch_dist.HashStore()), Store)
    with pytest.raises(TypeError, match="store must be a Store"):
        as_store("tcp://")  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", VARIABLES)
async def test_missing_variables_are_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"{missing} is not set"):
        await anext(dist.rendezvous("env://"))


async def test_the_environment_and_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with free_port() as port:
        for name, value in {**VARIABLES, "RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        met = dist.rendezvous("env://?rank=0&world_size=1", timeout=LIMIT)  # the URL counts
        store, rank, size = await anext(met)
        assert (rank, size) == (0, 1)
        await store.set("key", "value")
        assert await store.get("key") == b"value"
        await met.aclose()


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:1?rank=0", "env://?world_size=1"])
def test_rank_and_size_are_given_once(url: str) -> None:
    with pytest.raises(AssertionError, match="and by the URL"):
        dist.rendezvous(url, 0, 1)


@pytest.mark.parametrize("url", ["quantum://here", "nothing", 3])
def test_schemes_that_nobody_handles(url: Any) -> None:
    with pytest.raises(RuntimeError, match=r"no handler is registered for the scheme|must be a str"):
        dist.rendezvous(url)


@pytest.mark.parametrize("port", ["65536", "-1", "x"])
async def test_ports_that_there_are_not(port: str) -> None:
    with pytest.raises(ValueError, match="port"):
        await anext(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1))


async def test_there_is_no_meeting_again() -> None:
    with free_port() as port:
        met = dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1, LIMIT)
        await anext(met)
        with pytest.raises(RuntimeError, match="once"):
            await anext(met)


async def test_a_file(tmp_path: Path) -> None:
    met = dist.rendezvous(f"file://{tmp_path}/meeting", 0, 1, LIMIT)
    store, rank, size = await anext(met)
    assert (rank, size) == (0, 1)
    await store.set("key", "value")
    assert await store.get("key") == b"value"
    await met.aclose()


async def test_an_agent_may_host_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {**VARIABLES, "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    met = dist.rendezvous("env://", timeout=LIMIT)
    store, _, _ = await anext(met)
    await store.set("key", "value")
    assert await store.get("key") == b"value"
    assert server.get("key") == b"value"
    await met.aclose()


async def test_the_host_stays_for_the_others() -> None:
    with free_port() as port:
        url = f"tcp://127.0.0.1:{port}"
        for _ in range(2):  # the second time, too
            first, second = dist.rendezvous(url, 0, 2, LIMIT), dist.rendezvous(url, 1, 2, LIMIT)
            await anext(first)
            store, _, _ = await anext(second)
            leaving = asyncio.ensure_future(first.aclose())
            while await store.add(rendezvous_handlers.GONE_KEY, 0) < 1:
                await asyncio.sleep(0)
            assert not leaving.done()
            await second.aclose()
            await leaving


async def test_the_host_may_wait_for_fewer() -> None:
    with free_port() as port:
        url = f"tcp://127.0.0.1:{port}"
        met = [dist.rendezvous(url, rank, 3, LIMIT) for rank in range(3)]
        store, _, _ = [await anext(each) for each in met][1]
        leaving = asyncio.ensure_future(met[0].athrow(LeaveOnExit(2)))
        while await store.add(rendezvous_handlers.GONE_KEY, 0) < 1:
            await asyncio.sleep(0)
        assert not leaving.done()
        for each in (met[1].athrow(LeaveOnExit(1)), leaving):  # others do not wait, but say so
            with pytest.raises(LeaveOnExit):
                await each
        with pytest.raises(LeaveOnExit):
            await met[2].athrow(LeaveOnExit(3))  # the store is gone


async def test_the_host_may_wait_for_nobody() -> None:
    with free_port() as port:
        met = dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 3, LIMIT)
        await anext(met)
        with pytest.raises(LeaveOnExit):
            await met.athrow(LeaveOnExit(1))


async def test_the_host_does_not_stay_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous_handlers, "LEAVE_SECONDS", 0.05)
    with free_port() as port:
        met = dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, LIMIT)
        await anext(met)
        await met.aclose()
    assert "not all ranks have destroyed their groups within 0.05 s" in caplog.text


@pytest.mark.usefixtures("handlers")
async def test_handlers_of_ones_own() -> None:
    store = MemoryStore()

    def sync(url: str, **options: Any) -> Iterator[Any]:
        assert (url, options) == ("sync://here?rank=1&world_size=2", {"timeout": LIMIT, "more": 1})
        yield store, 1, 2

    async def awaited(url: str, **options: Any) -> AsyncIterator[Any]:
        yield store, 0, 1

    class Once:
        def __init__(self, url: str, **options: Any) -> None:
            self.items = [(store, 0, 1)]

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Any:
            return self.items.pop()

    dist.register_rendezvous_handler("sync", sync)
    dist.register_rendezvous_handler("awaited", awaited)
    dist.register_rendezvous_handler("once", Once)
    assert await anext(dist.rendezvous("sync://here", 1, 2, LIMIT, more=1)) == (store, 1, 2)
    assert await anext(dist.rendezvous("awaited://")) == (store, 0, 1)
    assert await anext(dist.rendezvous("once://")) == (store, 0, 1)
    for scheme in ("sync", "env", "tcp", "file"):
        with pytest.raises(RuntimeError, match=f"the scheme '{scheme}' is handled already"):
            dist.register_rendezvous_handler(scheme, sync)


# -- the barrier --------------------------------------------------------------------------------------------------


async def test_the_barrier_leaves_torch_s_words_in_the_store() -> None:
    store = MemoryStore()
    first = asyncio.ensure_future(dist._store_based_barrier(0, store, "7", 2, LIMIT))
    while await store.add("store_based_barrier_key:7", 0) < 1:
        await asyncio.sleep(0)
    assert not first.done()
    await dist._store_based_barrier(1, store, "7", 2, LIMIT)
    await first
    assert await store.get("store_based_barrier_key:7") == b"2"
    assert await store.get("store_based_barrier_key:7:last_worker") == b"1"


async def test_the_barrier_can_be_passed_again() -> None:
    store = MemoryStore()
    for _ in range(3):
        first = asyncio.ensure_future(dist._store_based_barrier(0, store, "0", 2, LIMIT))
        for _ in range(20):  # as often as it would take to pass
            await asyncio.sleep(0)
        assert not first.done()
        await dist._store_based_barrier(1, store, "0", 2, LIMIT)
        await first


async def test_ranks_of_torch_and_ours_pass_one_barrier() -> None:
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    theirs = torch_dist.PrefixStore("default_pg", server)
    theirs_again = torch_dist.PrefixStore("default_pg", torch_dist.TCPStore("127.0.0.1", server.port))
    name = dist.GroupName("0")
    for mine, ours in ((0, as_store(theirs_again)), (1, theirs_again)):
        group = f"{name}{mine}"  # torch's passes only once
        their_part = asyncio.to_thread(torch_c10d._store_based_barrier, 1 - mine, theirs, group, 2, LIMIT)  # type: ignore[arg-type]
        await asyncio.gather(their_part, dist._store_based_barrier(mine, ours, group, 2, LIMIT))


async def test_who_waits_too_long_says_who_came() -> None:
    store = MemoryStore()
    expected = r"took longer than 0.02 s on rank 3, key store_based_barrier_key:7: 1 of 4 ranks have come"
    with pytest.raises(dist.DistStoreError, match=expected):
        await dist._store_based_barrier(3, store, "7", 4, timedelta(seconds=0.02))


async def test_who_waits_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = []

    class Impatient(MemoryStore):  # type: ignore[misc]
        async def wait(self, keys: Any, timeout: float | None = None) -> None:
            slices.append(timeout)
            if len(slices) == 3:
                return
            raise StoreTimeoutError("not yet")

    with caplog.at_level(logging.DEBUG, "asynccomm"):
        await dist._store_based_barrier(0, Impatient(), "7", 2000, timedelta(minutes=5))
    assert slices == [12.0] * 3  # a millisecond for each rank on top of ten seconds
    said = [record.message for record in caplog.records if "the barrier over the store waits" in record.message]
    assert len(said) == 2
    assert re.search(r"rank 0, key store_based_barrier_key:7: 1 of 2000 ranks have come", said[0])
