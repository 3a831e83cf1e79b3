"""What shrink, reconfigure and newcomers take and refuse; what they do is in tests/comm/test_membership.py."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from asynccomm import AbortedError, ClosedError, Comm, MemoryStore, StoreError, join_comm
from asynccomm.comm.membership import Requirements
from asynccomm.comm.methods import groups as module
from asynccomm.testing.local import loopback_world


class Asked(Exception):
    """Instead of what would follow."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    async def regroup(session: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        raise Asked

    monkeypatch.setattr(module, "reconfigure", regroup)
    return calls


BAD_SHRINKS = [
    ({"exclude": 1}, r"exclude must be a list of ranks, got 1"),
    ({"exclude": "1"}, r"exclude must be a list of ranks, got '1'"),
    ({"exclude": ["1"]}, r"exclude must be integers, got '1' in \['1'\]"),
    ({"exclude": [4]}, r"exclude must be in \[0, 3\), got 4 in \[4\]"),
    ({"exclude": [2, 2]}, r"exclude must be different, got 2 twice in \[2, 2\]"),
    ({"exclude": [2, 1]}, r"exclude must not have this rank, 1, got \[2, 1\]"),
    ({"timeout": 0}, r"timeout must be positive, got 0"),
    ({"timeout": "1"}, r"timeout must be seconds or a timedelta, got '1'"),
]

BAD_MEMBERS = [
    (1, r"members must be a list of ranks and newcomers, got 1"),
    ("1", r"members must be a list of ranks and newcomers, got '1'"),
    ([], r"members must have this rank, 1, got \[\]"),
    ([0, "a"], r"members must have this rank, 1, got \[0, 'a'\]"),
    ([1, 4], r"members must be in \[0, 3\), got 4"),
    ([1, -1], r"members must be in \[0, 3\), got -1"),
    ([1, 1], r"members must be different, got 1 twice"),
    ([1, 2.5], r"members must be integers, got 2.5"),
    ([1, "a", "a"], r"members must be different newcomers, got \[1, 'a', 'a'\]"),
    ([1, ""], r"members must be different newcomers, got \[1, ''\]"),
    ([1, "a" * 257], r"members must be different newcomers, got \[1, 'aaa"),
    ([1, "a\ud800"], r"a newcomer in members must be a str that UTF-8 can encode, got 'a\\ud800'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_SHRINKS, ids=str)
async def test_bad_shrinks_raise_at_the_call(comms: list[Comm], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        comms[1].shrink(**arguments)


@pytest.mark.parametrize(("members", "message"), BAD_MEMBERS, ids=lambda value: str(value)[:20])
async def test_bad_members_raise_at_the_call(comms: list[Comm], members: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        comms[1].reconfigure(members)


async def test_the_proposal(comms: list[Comm], asked: list[tuple[Any, ...]]) -> None:
    comm = comms[1]
    for call in (
        comm.shrink(),
        comm.shrink([0], min_size=2, quorum=True, timeout=5),
        comm.shrink(timeout=timedelta(minutes=1)),
        comm.reconfigure([2, "a", 1, "b"], min_size=3),
    ):
        with pytest.raises(Asked):
            await call
    assert asked == [
        ([0, 1, 2], 600.0, Requirements(), []),
        ([1, 2], 5.0, Requirements(2, True), []),
        ([0, 1, 2], 60.0, Requirements(), []),
        ([2, "a", 1, "b"], 600.0, Requirements(3), ["a", "b"]),
    ]


async def test_the_proposal_has_job_ranks(comms: list[Comm], asked: list[tuple[Any, ...]]) -> None:
    parts = await asyncio.gather(*(comms[rank].split([2, 0], "part") for rank in (2, 0)))
    with pytest.raises(Asked):
        await parts[0].reconfigure([1, "a", 0])
    assert asked == [([0, "a", 2], 600.0, Requirements(), ["a"])]
    await asyncio.gather(*(part.aclose() for part in parts))


async def test_a_comm_that_is_closed_or_broken() -> None:
    async with loopback_world(2) as comms:
        comms[0].abort("enough")
        with pytest.raises(AbortedError):
            await comms[0].newcomers()
        made = comms[0].shrink()  # that is what it is for
        closing = asyncio.ensure_future(comms[0].aclose())
        await asyncio.sleep(0)
        for _ in range(2):  # on its way, and then
            with pytest.raises(ClosedError, match="comm 'test' is closed"):
                comms[0].shrink()
            with pytest.raises(ClosedError, match="comm 'test' is closed"):
                comms[0].reconfigure([0])
            await closing
        with pytest.raises(ClosedError, match="comm 'test' is closed"):
            await made
        with pytest.raises(ClosedError):
            await comms[0].newcomers()


async def test_ranks_without_a_control_channel() -> None:
    async with loopback_world(2) as comms:
        channel = comms[0]._session.identity.job.channel
        assert channel is not None
        del channel.topology.contacts[1]
        with pytest.raises(RuntimeError, match=r"ranks \[1\] of comm 'test' have no control channel"):
            comms[0].shrink()
        channel.topology.contacts[1] = channel.topology.contacts[0]


async def test_another_loop_and_a_thread(comms: list[Comm]) -> None:
    def elsewhere() -> None:
        async def call() -> None:
            comms[0].shrink()

        asyncio.run(call())

    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        await asyncio.to_thread(elsewhere)


async def test_a_lost_store(comms: list[Comm], monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*arguments: Any) -> Any:
        raise StoreError("it has gone")

    store = comms[0]._session.identity.job.store
    monkeypatch.setattr(store, "set", fail)
    monkeypatch.setattr(store, "add", fail)
    with pytest.raises(StoreError, match="it has gone"):
        await comms[0].newcomers()
    with pytest.raises(StoreError, match="it has gone"):
        await comms[0].reconfigure([0, 1, 2, "a"])
    monkeypatch.undo()
    tensor = await comms[0].newcomers()  # the comm is as it was
    assert tensor == []


def test_join_comm_checks_its_arguments() -> None:
    store = MemoryStore()
    for arguments, message in [
        ({"name": ""}, "name must be a non-empty str, got ''"),
        ({"timeout": -1}, "timeout must be positive, got -1"),
        ({"hints": {"control": "off"}}, "hint 'control' must be 'on' for join_comm, got 'off'"),
        ({"backend": "mpi"}, "backend 'mpi' is unknown"),
        ({"device": "toaster"}, "device must name a torch device"),
        ({"max_ops": 0}, "max_ops must be a positive integer, got 0"),
        ({"store": "http://x"}, "store 'http://x' must be"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            join_comm(**{"store": store, **arguments})  # type: ignore[arg-type]
