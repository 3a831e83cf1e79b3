"""Coming into a comm that is there already: taken in, left out, refused, or given up."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from asynccomm import (
    BackendError,
    Comm,
    LeftOutError,
    MemoryStore,
    RendezvousError,
    StoreError,
    join_comm,
    new_comm,
)
from asynccomm.comm import join_comm as join_comm_module
from asynccomm.comm.bootstrap import bootstrap
from asynccomm.control.membership import joiner as guest_module
from asynccomm.core.hosts import PRETENDED
from asynccomm.rendezvous import lobby as newcomers_module
from asynccomm.store.server import listen, serve
from tests.waiting import until

LIMIT = 20.0


@pytest.fixture(autouse=True)
def without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(newcomers_module, "ANSWER_SECONDS", 0.1)


@asynccontextmanager
async def world(size: int, store: Any, backend: str = "loopback", **options: Any) -> AsyncIterator[list[Comm]]:
    comms = await asyncio.gather(
        *(new_comm(backend, store=store, rank=rank, size=size, timeout=10, **options) for rank in range(size))
    )
    try:
        yield list(comms)
    finally:
        await close(comms)
    await until(lambda: not [t for t in threading.enumerate() if t.name == "asynccomm control"])
    await until(lambda: f"/{os.getpid()}/" not in Path("/proc/net/unix").read_text())


async def close(comms: Sequence[Comm]) -> None:
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*(comm.aclose() for comm in comms))


async def _await(connecting: Awaitable[Any]) -> Any:
    return await connecting


def joining(store: Any, backend: str = "auto", **options: Any) -> asyncio.Task[Comm]:
    return asyncio.ensure_future(_await(join_comm(backend, store=store, **{"timeout": 10, **options})))


async def waiting(comm: Comm, count: int) -> list[str]:
    async with asyncio.timeout(LIMIT):
        while len(found := await comm.newcomers()) < count:
            await asyncio.sleep(0)
    return found


async def together(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    async with asyncio.timeout(LIMIT):
        return await asyncio.gather(*calls, return_exceptions=True)


async def check(comms: Sequence[Comm]) -> None:
    tensors = [torch.tensor([float(comm.rank + 1)]) for comm in comms]
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*(comm.all_reduce(t) for comm, t in zip(comms, tensors, strict=True)))
    assert {t.item() for t in tensors} == {len(comms) * (len(comms) + 1) / 2}


@pytest.mark.parametrize("backend", ["loopback", "gloo", "shm"])
async def test_a_newcomer_joins(backend: str) -> None:
    store = MemoryStore()
    async with world(2, store, backend) as comms:
        coming = joining(store)
        (name,) = await waiting(comms[0], 1)
        found = await together([*(comm.reconfigure([0, 1, name]) for comm in comms), coming])
        assert [comm.rank for comm in found] == [0, 1, 2]
        assert {comm.parent_ranks for comm in found} == {(0, 1, -1)}
        assert {comm.backend for comm in found} == {backend}
        assert {comm.name for comm in found} == {"main"}
        assert await found[0].newcomers() == []
        await check(found)
        await close(found)


async def test_a_newcomer_on_the_pretended_host_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRETENDED, "elsewhere")
    store = MemoryStore()
    async with world(2, store) as comms:
        coming = joining(store)
        (name,) = await waiting(comms[0], 1)
        found = await together([*(comm.reconfigure([0, 1, name]) for comm in comms), coming])
        await check(found)
        await close(found)


async def test_several_come_in_anywhere_and_go_on_as_all_others() -> None:
    store = MemoryStore()
    async with world(2, store) as comms:
        coming = [joining(store) for _ in range(2)]
        a, b = await waiting(comms[1], 2)
        found = await together([*(comm.reconfigure([b, 1, a, 0]) for comm in comms), *coming])
        assert {comm.parent_ranks for comm in found} == {(-1, 1, -1, 0)}
        found.sort(key=lambda comm: comm.rank)
        await check(found)
        (more,) = [joining(store)]
        (c,) = await waiting(found[0], 1)  # who came in may ask, too
        newer = await together([*(comm.reconfigure([0, 2, 3, c]) for comm in found if comm.rank != 1), more])
        assert {comm.parent_ranks for comm in newer} == {(0, 2, 3, -1)}
        await check(newer)
        last = await together([comm.shrink([0]) for comm in newer[1:]])
        await check(last)
        await close([*last, *newer, *found])


async def test_a_comm_with_other_ranks_in_the_job() -> None:
    store = MemoryStore()
    async with world(3, store) as comms:
        parts = await asyncio.gather(*(comm.split([2, 1], "part") for comm in comms[1:]))
        parts.sort(key=lambda comm: comm.rank)
        coming = joining(store, name="main/part")
        (name,) = await waiting(parts[0], 1)
        found = await together([*(comm.reconfigure([1, 0, name]) for comm in parts), coming])
        assert {comm.parent_ranks for comm in found} == {(1, 0, -1)}
        await close([*parts, *found])


async def test_the_options_are_its_own_but_for_the_ordering() -> None:
    store = MemoryStore()
    async with world(1, store, ordering="agreed") as comms:
        coming = joining(store, timeout=7, max_ops=3)
        (name,) = await waiting(comms[0], 1)
        found = await together([comms[0].reconfigure([0, name]), coming])
        options = found[1].options
        assert (options.timeout, options.max_ops, options.ordering) == (7, 3, "agreed")
        assert found[0].options == comms[0].options
        await close(found)


async def test_on_a_store_of_the_launcher() -> None:
    server = serve("127.0.0.1", listen("127.0.0.1", 0))
    port = server.port
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(port))
        async with world(2, None, "gloo") as comms:
            coming = joining(f"tcp://127.0.0.1:{port}")
            (name,) = await waiting(comms[0], 1)
            found = await together([*(comm.reconfigure([0, 1, name]) for comm in comms), coming])
            await check(found)
            await close(found)
    server.release()


async def test_on_a_store_that_a_rank_hosts_which_leaves() -> None:
    server = serve("127.0.0.1", listen("127.0.0.1", 0))
    port = server.port
    server.release()
    url = f"tcp://127.0.0.1:{port}"
    async with world(3, url, "gloo") as comms:
        coming = joining(url)
        (name,) = await waiting(comms[1], 1)
        found = await together([*(comm.reconfigure([1, 2, name]) for comm in comms[1:]), coming])
        await check(found)
        await close(found)


async def test_no_rank_adds_the_process() -> None:
    store = MemoryStore()
    with pytest.raises(RendezvousError, match=r"no rank of comm 'main' has added this process within 0.1 s"):
        await joining(store, timeout=0.1)
    with pytest.raises(StoreError):
        await joining("tcp://127.0.0.1:9", timeout=0.1)
    async with world(1, store) as comms:
        coming = joining(store, name="another", timeout=0.2)
        assert await comms[0].newcomers() == []
        with pytest.raises(RendezvousError, match=r"comm 'another' has added this process within 0\.2 s"):
            await coming


async def test_one_that_gives_up_waiting_is_not_seen_any_more() -> None:
    store = MemoryStore()
    async with world(1, store) as comms:
        coming = joining(store)
        await waiting(comms[0], 1)
        coming.cancel()
        await asyncio.wait([coming])
        assert await comms[0].newcomers() == []


async def test_another_backend_does_not_hold_up_the_others() -> None:
    store = MemoryStore()
    async with world(2, store) as comms:
        coming = joining(store, "gloo")
        (name,) = await waiting(comms[0], 1)
        found = await together([*(comm.reconfigure([0, 1, name], timeout=600) for comm in comms), coming])
        assert isinstance(found[2], RendezvousError)
        assert "comm 'main' uses backend 'loopback', but this process requests 'gloo'" in str(found[2])
        assert [comm.size for comm in found[:2]] == [2, 2]
        await check(found[:2])
        await close(found[:2])


async def test_a_device_that_the_backend_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, device: torch.device) -> Any:
        raise ValueError("backend 'loopback' takes tensors on moons")

    store = MemoryStore()
    async with world(1, store) as comms:
        coming = joining(store)
        monkeypatch.setattr(join_comm_module, "load_backend", fail)
        (name,) = await waiting(comms[0], 1)
        found = await together([comms[0].reconfigure([0, name], timeout=600), coming])
        assert isinstance(found[1], RendezvousError)
        assert "'loopback', which cannot be used here: backend 'loopback' takes tensors on moons" in str(found[1])
        await close(found[:1])


async def test_one_that_was_invited_and_gives_up() -> None:
    store = MemoryStore()
    async with world(2, store) as comms:
        coming = joining(store)
        (name,) = await waiting(comms[0], 1)
        call = asyncio.ensure_future(_await(comms[0].reconfigure([0, 1, name], timeout=600)))
        await until(lambda: _joiners(comms[0]) == [name])
        coming.cancel()
        found = await together([call, comms[1].reconfigure([0, 1, name], timeout=600)])
        await asyncio.wait([coming])
        assert coming.cancelled()
        await check(found)
        await close(found)


def _joiners(comm: Comm) -> list[str]:
    channel = comm._session.identity.job.channel
    assert channel is not None
    return list(channel._joiners)


async def test_one_that_dies_while_they_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    async def dies(*arguments: Any, **more: Any) -> Any:
        assert coming.cancel()
        await asyncio.Event().wait()

    async with world(2, store) as comms:
        monkeypatch.setattr(join_comm_module, "bootstrap", dies)
        coming = joining(store)
        (name,) = await waiting(comms[0], 1)
        found = await together([comm.reconfigure([0, 1, name], timeout=600) for comm in comms])
        await asyncio.wait([coming])
        assert {comm.size for comm in found} == {2}
        await check(found)
        await close(found)


async def test_an_invited_process_that_never_joins_is_left_out_in_time() -> None:
    store = MemoryStore()
    async with world(2, store) as comms:
        found = await together([comm.reconfigure([0, 1, "nobody"], timeout=0.2) for comm in comms])
        await check(found)
        await close(found)


async def test_they_go_on_without_the_one_they_invited() -> None:
    store = MemoryStore()
    async with world(2, store) as comms:
        coming = joining(store)
        (name,) = await waiting(comms[0], 1)
        call = asyncio.ensure_future(_await(comms[0].reconfigure([0, 1, name])))
        await until(lambda: _joiners(comms[0]) == [name])
        errors = await together([call, comms[1].shrink()])
        assert [type(error) for error in errors] == [ValueError] * 2
        assert not coming.done()  # they may still take it in
        assert await waiting(comms[1], 1) == [name]
        found = await together([comm.shrink() for comm in comms])
        with pytest.raises(LeftOutError, match=r"comm .main. goes on without this rank.*does not propose it"):
            await coming
        await close(found)


async def test_a_mistake_of_theirs_is_not_its_end() -> None:
    store = MemoryStore()
    async with world(2, store) as comms:
        coming = joining(store)
        (name,) = await waiting(comms[0], 1)
        for _ in range(2):
            errors = await together([comms[0].reconfigure([0, 1, name]), comms[1].reconfigure([name, 0, 1])])
            assert [type(error) for error in errors] == [ValueError] * 2
            assert await waiting(comms[0], 1) == [name]
        found = await together([*(comm.reconfigure([0, 1, name]) for comm in comms), coming])
        await check(found)
        await close(found)


async def test_it_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    async def fail(*arguments: Any, **more: Any) -> Any:
        raise BackendError("no route")

    async with world(2, store) as comms:
        monkeypatch.setattr(join_comm_module, "bootstrap", fail)
        coming = joining(store)
        (name,) = await waiting(comms[0], 1)
        errors = await together([*(comm.reconfigure([0, 1, name]) for comm in comms), coming])
        for error in errors:
            assert isinstance(error, BackendError)
            assert "could not connect: BackendError: no route" in str(error)
        await check(comms)  # as they were


async def test_the_wait_of_an_invited_process_has_a_limit() -> None:
    store = MemoryStore()
    async with world(2, store) as comms:
        coming = joining(store, timeout=1)
        (name,) = await waiting(comms[0], 1)
        call = asyncio.ensure_future(_await(comms[0].reconfigure([0, 1, name])))  # and the other one does not
        with pytest.raises(
            RendezvousError, match="comm 'main' has invited this process, but did not connect within 1 s"
        ):
            await coming
        call.cancel()
        await asyncio.wait([call])


async def test_all_inviting_ranks_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_module, "REACH_SECONDS", 0.2)
    store = MemoryStore()
    async with world(2, store) as comms:
        coming = joining(store)
        (name,) = await waiting(comms[0], 1)
        call = asyncio.ensure_future(_await(comms[0].reconfigure([0, 1, name])))
        await until(lambda: _joiners(comms[0]) == [name])
        call.cancel()
        for comm in comms:
            channel = comm._session.identity.job.channel
            assert channel is not None
            channel.call(channel._begin_closing)
        with pytest.raises(LeftOutError, match="none of its ranks can be reached any more"):
            await coming
        await asyncio.wait([call])


async def test_the_root_dies_before_the_decision() -> None:
    store = MemoryStore()
    async with world(3, store) as comms:
        coming = joining(store)
        (name,) = await waiting(comms[0], 1)
        calls = [asyncio.ensure_future(_await(comm.reconfigure([0, 1, 2, name]))) for comm in comms[:2]]
        await until(lambda: _joiners(comms[0]) == [name])
        channel = comms[0]._session.identity.job.channel
        assert channel is not None
        channel.call(channel._begin_closing)
        found = await together([calls[1], comms[2].reconfigure([0, 1, 2, name]), coming])
        assert {comm.parent_ranks for comm in found} == {(1, 2, -1)}
        await check(found)
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        await close(found)


async def test_a_rank_dies_while_all_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    sizes: list[int] = []

    async def watched(place: Any, group: Any, *arguments: Any, **more: Any) -> Any:
        sizes.append(group.size)
        if group.size == 4:
            channel = comms[0]._session.identity.job.channel
            assert channel is not None
            channel.call(channel._begin_closing)
        return await bootstrap(place, group, *arguments, **more)

    async with world(3, store) as comms:
        monkeypatch.setattr(join_comm_module, "bootstrap", watched)
        coming = joining(store)
        (name,) = await waiting(comms[1], 1)
        calls = [asyncio.ensure_future(_await(comm.reconfigure([0, 1, 2, name]))) for comm in comms]
        found = await together([*calls[1:], coming])
        assert sizes == [4, 3]
        assert {comm.parent_ranks for comm in found} == {(1, 2, -1)}
        await check(found)
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        await close([*found, *([calls[0].result()] if not calls[0].cancelled() else [])])
