"""Assembling a comm: what it is made of, what an attempt leaves behind that fails, and stores on their way out.

Most of what can go wrong is in ``test_connect`` and ``test_join``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from asynccomm import BackendError, MemoryStore, RendezvousError, StoreError
from asynccomm.backends.base import BackendContext
from asynccomm.backends.loopback import LoopbackBackend
from asynccomm.comm.bootstrap import bootstrap
from asynccomm.comm.session import Session
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous.job import JobOrigin, NameReservation
from asynccomm.rendezvous.spec import RendezvousSpec
from asynccomm.store.base import Store
from tests.comm.sessions import close, nothing_is_left
from tests.sampling import amount

OPTIONS = CommOptions(timeout=10)
SILENT = CommOptions(timeout=10, hints={"control": "off"})
CPU = torch.device("cpu")


def place(store: Store, rank: int, size: int) -> RendezvousSpec:
    return RendezvousSpec(rank, size, "asynccomm/run/0", store=store)


async def made(store: Store, rank: int, size: int, options: CommOptions = OPTIONS, **more: Any) -> Session:
    group = CommInfo("c", rank, size, CPU)
    return await bootstrap(place(store, rank, size), group, "loopback", {"loopback": LoopbackBackend}, options, **more)


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
    for turns in [*range(0, 40, amount(2, 4)), *range(40, 200, amount(20, 40))]:
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


def _gloo() -> Any:
    from asynccomm.backends.registry import load_backend

    return load_backend("gloo", CPU)
