"""Connecting a session alone; missing ranks are in ``test_new_comm``, and members that leave in ``test_groups``."""

from __future__ import annotations

import asyncio
from typing import Self

import pytest

from asynccomm import AbortedError, BackendError, ClosedError, MemoryStore
from asynccomm.backends.base import BackendContext, UnsuitableError
from asynccomm.backends.loopback import LoopbackBackend
from asynccomm.comm.connecting import connect_session
from asynccomm.ops import Barrier
from tests.comm.sessions import alone


class Unsuitable(LoopbackBackend):
    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        raise UnsuitableError("not here")


async def test_a_session_uses_the_first_backend_that_suits() -> None:
    session = alone(MemoryStore())
    assert session.backend is None
    await connect_session(session, {"unsuitable": Unsuitable, "loopback": LoopbackBackend}, 10)
    assert session.backend_name == "loopback"
    assert session.submitter.backend is session.backend
    work = session.submitter.submit(Barrier.of(session.group), None, None)
    assert await work is None
    await session.aclose()
    assert session.ended
    assert isinstance(session.error, ClosedError)


async def test_a_session_without_a_backend_frees_its_name() -> None:
    room = MemoryStore()
    session = alone(room)
    with pytest.raises(UnsuitableError, match="not here"):
        await connect_session(session, {"unsuitable": Unsuitable}, 10)
    assert session.ended
    await alone(room).aclose()


async def test_a_backend_that_takes_too_long_is_named() -> None:
    class Slow(LoopbackBackend):
        @classmethod
        async def connect(cls, context: BackendContext) -> Self:
            await asyncio.get_running_loop().create_future()
            raise AssertionError("never")

    session = alone(MemoryStore(), timeout=0.05)
    with pytest.raises(BackendError, match=r"slow did not connect rank 0 of comm 'alone' within 0\.05 s"):
        await connect_session(session, {"slow": Slow}, 0.05)
    assert isinstance(session.error, (AbortedError, ClosedError))
    assert session.ended


async def test_the_failure_of_a_parent_ends_connecting() -> None:
    class Slow(LoopbackBackend):
        @classmethod
        async def connect(cls, context: BackendContext) -> Self:
            parent.abort("enough")
            await asyncio.get_running_loop().create_future()
            raise AssertionError("never")

    parent, child = alone(MemoryStore()), alone(MemoryStore())
    await connect_session(parent, {"loopback": LoopbackBackend}, 10)
    with pytest.raises(AbortedError, match="enough"):
        await connect_session(child, {"slow": Slow}, 20, parent)
    assert child.ended
    assert not parent.children
    await parent.aclose()
