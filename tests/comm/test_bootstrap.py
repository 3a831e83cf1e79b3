"""Assembling a comm: what it is made of, what an attempt leaves behind that fails, and stores on their way out.

Most of what can go wrong is in ``test_connect`` and ``test_join``.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from asynccomm import AbortedError, BackendError, MemoryStore, RendezvousError, StoreClient, StoreError
from asynccomm.backends.base import BackendContext
from asynccomm.backends.loopback import LoopbackBackend
from asynccomm.comm import bootstrap as assembly_module
from asynccomm.comm.bootstrap import bootstrap
from asynccomm.comm.session import Session
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous.job import JobOrigin, NameReservation
from asynccomm.rendezvous.spec import RendezvousSpec, StoreSession, resolve_spec
from asynccomm.store.base import Store
from asynccomm.store.server import listen, serve
from asynccomm.store.shared import SharedClient
from tests.waiting import until

OPTIONS = CommOptions(timeout=10)
SILENT = CommOptions(timeout=10, hints={"control": "off"})
CPU = torch.device("cpu")


def place(store: Store, rank: int, size: int) -> RendezvousSpec:
    return RendezvousSpec(rank, size, "asynccomm/run/0", store=store)


async def made(store: Store, rank: int, size: int, options: CommOptions = OPTIONS, **more: Any) -> Session:
    group = CommInfo("c", rank, size, CPU)
    return await bootstrap(place(store, rank, size), group, "loopback", {"loopback": LoopbackBackend}, options, **more)


async def close(*sessions: Session) -> None:
    async with asyncio.timeout(20):
        await asyncio.gather(*(session.aclose() for session in sessions))


async def nothing_is_left() -> None:
    await until(lambda: not [t for t in threading.enumerate() if t.name == "asynccomm control"])
    await until(lambda: f"/{os.getpid()}/" not in Path("/proc/net/unix").read_text())


async def test_the_ranks_share_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets: list[bytes] = []
    connect = LoopbackBackend.connect

    async def noted(context: BackendContext) -> LoopbackBackend:
        secrets.append(context.secret)
        assert repr(context.secret) not in repr(context)
        return await connect(context)

    monkeypatch.setattr(LoopbackBackend, "connect", noted)
    for _ in range(2):
        store = MemoryStore()
        await close(*await asyncio.gather(*(made(store, rank, 2) for rank in range(2))))
    first, second, third, fourth = secrets
    assert first == second != third == fourth
    assert len(first) == 32


async def test_the_first_of_its_family() -> None:
    store = MemoryStore()
    sessions = await asyncio.gather(*(made(store, rank, 2) for rank in range(2)))
    for rank, session in enumerate(sessions):
        identity = session.identity
        assert session.backend_name == "loopback"
        assert identity.parent_ranks == identity.job_ranks == (0, 1)
        assert identity.job.origin == JobOrigin(place(store, rank, 2), rank, rank)
        assert identity.job.channel is not None
        assert list(identity.job.channel.topology.contacts) == [0, 1]
        assert not await identity.job.room.check(["host"])  # the store is nobody's
    await close(*sessions)
    await nothing_is_left()


async def test_one_that_follows() -> None:
    store = MemoryStore()
    origins = [JobOrigin(place(store, rank, 4), rank + 2, rank + 5) for rank in range(2)]
    found = await asyncio.gather(
        *(made(store, rank, 2, origin=origin, parent_ranks=[3, -1]) for rank, origin in enumerate(origins))
    )
    assert {session.identity.parent_ranks for session in found} == {(3, -1)}
    assert {session.identity.job_ranks for session in found} == {(0, 1)}
    assert [session.identity.job.origin for session in found] == origins
    with pytest.raises(ValueError, match="name 'c' is in use"):
        NameReservation(origins[0].world, "c")  # of the rank that it was in the first comm
    await close(*found)


async def test_without_a_control_channel() -> None:
    session = await made(MemoryStore(), 0, 1, CommOptions(timeout=10, hints={"control": "off"}))
    assert session.identity.job.channel is None
    await close(session)


async def test_the_limit_is_not_the_operations() -> None:
    store = MemoryStore()
    with pytest.raises(RendezvousError, match=r"ranks \[1\] of 2 did not come within 0.1 s"):
        await made(store, 0, 2, limit=0.1)
    await nothing_is_left()
    session = await made(store, 0, 1, limit=5)
    assert session.options.timeout == 10
    await close(session)


async def test_cancelling_at_any_moment_leaves_nothing() -> None:
    for turns in [*range(0, 40, 2), *range(40, 200, 20)]:
        store = MemoryStore()
        tasks = [asyncio.ensure_future(made(store, rank, 2, limit=0.3)) for rank in range(2)]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[0].cancel()
        async with asyncio.timeout(20):
            found = await asyncio.gather(*tasks, return_exceptions=True)
        await close(*(one for one in found if isinstance(one, Session)))
        for rank in range(2):
            NameReservation((id(store), rank), "c").release()  # the name is free
    await nothing_is_left()


async def test_hosts_that_differ_listen_on_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(range(100))
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{next(names)}")
    store = MemoryStore()
    sessions = await asyncio.gather(*(made(store, rank, 2) for rank in range(2)))
    for session in sessions:
        channel = session.identity.job.channel
        assert channel is not None
        assert all(contact.port and contact.address for contact in channel.topology.contacts.values())
    await close(*sessions)


async def test_the_problem_of_an_address_outlives_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that hosts the store ends once all have read the problem: the others lose their connections."""
    names = iter(range(100))
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{next(names)}")
    store = MemoryStore()
    wait = store.wait

    async def lost(keys: Sequence[str], timeout: float | None = None) -> None:
        if any("addresses read" in key for key in keys):
            raise StoreError("the connection was lost")
        await wait(keys, timeout)

    monkeypatch.setattr(store, "wait", lost)
    options = CommOptions(timeout=10, hints={"interface": "nosuch0"})
    found = await asyncio.gather(*(made(store, rank, 2, options) for rank in range(2)), return_exceptions=True)
    for error in found:
        assert isinstance(error, BackendError), error
        assert "rank 0 of 2: hint 'interface'='nosuch0' names no interface" in str(error)
    await nothing_is_left()


async def test_the_end_of_a_given_store_is_an_error_at_once() -> None:
    """No other server comes in its place, unlike at an address that a rank hosts."""
    server = serve("127.0.0.1", listen("127.0.0.1", 0))
    place = resolve_spec(dist.TCPStore("127.0.0.1", server.port, is_master=False), 1, 2, {})
    shared = await SharedClient.connect("127.0.0.1", server.port, 60)
    joining = asyncio.create_task(
        assembly_module._join(
            place, CommInfo("c", 1, 2, CPU), "auto", SILENT, 1, 60, time.monotonic(), False, AsyncExitStack()
        )
    )
    await until(lambda: shared._users == 2)
    server.release()
    async with asyncio.timeout(20):
        with pytest.raises(StoreError, match="was lost"):
            await joining
    await shared.release()


async def test_a_store_that_ends_meanwhile_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meeting:
        def __init__(self) -> None:
            self.store, self.hosted, self.closed = MemoryStore(), None, 0

        async def aclose(self) -> None:
            self.closed += 1

    meetings: list[Meeting] = []

    async def meet(place: RendezvousSpec, timeout: float) -> Meeting:
        meetings.append(Meeting())
        return meetings[-1]

    async def join(scope: Store, *arguments: Any, **more: Any) -> Any:
        if len(meetings) < 3:
            raise StoreError("the connection was lost")
        return "joined"

    monkeypatch.setattr(assembly_module, "connect_store", meet)
    monkeypatch.setattr(assembly_module, "handshake", join)
    where = RendezvousSpec(1, 2, "asynccomm/run/0", host="h", port=1)
    found = await assembly_module._join(
        where,
        CommInfo("c", 1, 2, CPU),
        "auto",
        SILENT,
        1,
        10,
        asyncio.get_running_loop().time(),
        False,
        AsyncExitStack(),
    )
    assert found == (meetings[2], "joined", None, None)
    assert [meeting.closed for meeting in meetings] == [1, 1, 0]
    meetings.clear()
    hosting = RendezvousSpec(0, 2, "asynccomm/run/0", host="h", port=1, hosting=True)
    with pytest.raises(StoreError):  # the one who hosts it knows better
        async with AsyncExitStack() as undo:
            await assembly_module._join(hosting, CommInfo("c", 0, 2, CPU), "auto", SILENT, 0, 10, 0.0, False, undo)
    assert [meeting.closed for meeting in meetings] == [1]


async def test_a_store_that_ends_for_good_is_named_with_the_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[StoreSession] = []

    async def meet(place: RendezvousSpec, timeout: float) -> StoreSession:
        if met:
            raise RendezvousError(f"no store at h:1 within {timeout:g} s: Connection refused")
        met.append(StoreSession(MemoryStore()))
        return met[0]

    async def join(scope: Store, *arguments: Any, **more: Any) -> Any:
        raise StoreError("the connection was lost")

    monkeypatch.setattr(assembly_module, "connect_store", meet)
    monkeypatch.setattr(assembly_module, "handshake", join)
    where, group = RendezvousSpec(1, 2, "asynccomm/run/0", host="h", port=1), CommInfo("c", 1, 2, CPU)
    text = r"comm 'c': the ranks did not meet within 10 s; the store was lost meanwhile: .* \(this is rank 1\)"
    begin = asyncio.get_running_loop().time()
    with pytest.raises(RendezvousError, match="no store at h:1"):
        met.append(StoreSession(MemoryStore()))
        await assembly_module._join(where, group, "auto", SILENT, 1, 10, begin, False, AsyncExitStack())
    met.clear()
    with pytest.raises(RendezvousError, match=text):
        await assembly_module._join(where, group, "auto", SILENT, 1, 10, begin, False, AsyncExitStack())


async def test_the_rank_that_hosts_the_store_records_it() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    where = [RendezvousSpec(r, 2, "asynccomm/run/0", host="127.0.0.1", port=port, hosting=r == 1) for r in range(2)]
    sessions = await asyncio.gather(
        *(bootstrap(where[r], CommInfo("c", r, 2, CPU), "gloo", {"gloo": _gloo()}, OPTIONS) for r in range(2))
    )
    assert await sessions[0].identity.job.room.get("host") == b"1"
    await close(*sessions)


# -- comms of the same processes --------------------------------------------------------------------------------------


class Ranks:
    """Two ranks at a store that rank 0 hosts, and their first comm."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.first: list[Session] = []

    async def rank(self, rank: int, name: str, options: CommOptions = OPTIONS, requested: str = "gloo") -> Session:
        where = RendezvousSpec(rank, 2, "asynccomm/run/0", host="127.0.0.1", port=self.port, hosting=rank == 0)
        group = CommInfo(name, rank, 2, CPU)
        return await bootstrap(where, group, requested, {"gloo": _gloo()}, options)

    async def both(self, name: str, *options: CommOptions) -> list[Session]:
        async with asyncio.timeout(20):
            return await asyncio.gather(*(self.rank(rank, name, *options[rank : rank + 1]) for rank in range(2)))

    async def epoch_of(self, name: str) -> bool:
        """Whether the ranks have used the store to meet for comm ``name``."""
        client = await StoreClient.connect("127.0.0.1", self.port)
        found = await client.check([f"asynccomm/run/0/{name}/epoch"])
        await client.aclose()
        return found


@asynccontextmanager
async def two_ranks() -> AsyncIterator[Ranks]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        ranks = Ranks(sock.getsockname()[1])
    ranks.first = await ranks.both("first")
    yield ranks
    await close(*ranks.first)
    await nothing_is_left()


def channels(sessions: Sequence[Session]) -> list[Any]:
    return [session.identity.job.channel for session in sessions]


async def test_later_comms_use_the_channel_of_the_first_and_meet_over_it() -> None:
    async with two_ranks() as ranks:
        assert await ranks.epoch_of("first")
        second, third = await asyncio.gather(ranks.both("second"), ranks.both("third"))
        assert channels(ranks.first) == channels(second) == channels(third)
        assert not await ranks.epoch_of("second")
        every = [ranks.first, second, third]
        assert len({session.identity.job.secret for each in every for session in each}) == 3
        assert len({session.identity.key for each in every for session in each}) == 3
        assert [each.identity.members for each in second] == [each.identity.members for each in ranks.first]
        await close(*ranks.first)
        fourth = await ranks.both("first")  # the name again
        assert channels(fourth) == channels(second)
        second[1].abort("for the test")
        await until(lambda: isinstance(second[0].error, AbortedError))
        assert fourth[0].error is third[0].error is None
        await close(*second, *third, *fourth)


async def test_a_rank_without_a_channel_is_met_at_the_store() -> None:
    async with two_ranks() as ranks:
        second = await ranks.both("second", OPTIONS, SILENT)
        assert await ranks.epoch_of("second")
        assert second[1].identity.job.channel is None
        assert list(second[0].identity.job.channel.topology.contacts) == [0]  # type: ignore[union-attr]
        third = await ranks.both("third")
        assert channels(third) == channels(ranks.first)
        await close(*second, *third)


async def test_a_late_rank_is_met_over_the_channel() -> None:
    async with two_ranks() as ranks:
        for early in range(2):
            name = f"after rank {early}"
            waiting = asyncio.ensure_future(ranks.rank(early, name))
            if early == 0:
                while not await ranks.epoch_of(name):  # it does not wait for the channel alone
                    await asyncio.sleep(0.01)
            else:
                await asyncio.sleep(0.1)
            late = await ranks.rank(1 - early, name)
            assert channels(sorted([await waiting, late], key=lambda session: session.group.rank)) == channels(
                ranks.first
            )
            await close(await waiting, late)


async def test_a_mismatch_is_found_over_the_channel() -> None:
    async with two_ranks() as ranks:
        found = await asyncio.gather(
            ranks.rank(0, "second"), ranks.rank(1, "second", requested="shm"), return_exceptions=True
        )
        for error in found:
            assert isinstance(error, RendezvousError)
            assert str(error) == "comm 'second': backend differs: rank 0 has 'gloo', rank 1 has 'shm'"
        await close(*await ranks.both("second"))


async def test_a_rank_that_closes_its_comms_meanwhile_is_met_at_the_store() -> None:
    async with two_ranks() as ranks:
        waiting = asyncio.ensure_future(ranks.rank(0, "second"))
        await close(ranks.first[1])
        last = await ranks.rank(1, "second")
        second = [await waiting, last]
        assert await ranks.epoch_of("second")
        assert channels(second)[0] is not ranks.first[0].identity.job.channel
        await close(*second)


@pytest.mark.parametrize("rank", [0, 1])
async def test_cancelling_beside_another_comm_at_any_moment(rank: int) -> None:
    short = CommOptions(timeout=0.1)
    connected = aborted = 0
    async with two_ranks() as ranks:
        for turns in range(0, 60, 3):
            tasks = [asyncio.ensure_future(ranks.rank(each, "second", short)) for each in range(2)]
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[rank].cancel()
            async with asyncio.timeout(20):
                mine, theirs = await asyncio.gather(tasks[rank], tasks[1 - rank], return_exceptions=True)
            connected += isinstance(mine, Session)
            if isinstance(mine, asyncio.CancelledError) and isinstance(theirs, AbortedError):
                assert "could not connect" in str(theirs)
                aborted += 1
            await close(*(one for one in (mine, theirs) if isinstance(one, Session)))
            await close(*await ranks.both("second"))
        assert connected or aborted  # it came as far as the backend
        assert all(each.error is None for each in ranks.first)


def _gloo() -> Any:
    from asynccomm.backends.registry import load_backend

    return load_backend("gloo", CPU)
