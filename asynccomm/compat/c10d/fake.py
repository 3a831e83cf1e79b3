"""Fake groups of any size in one process, for dry runs: collectives check their arguments and do nothing else.

Outputs stay unchanged. Operations that receive payloads from other ranks, such as objects, fail with PayloadError.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar, Self, final

import torch

from asynccomm.backends.base import Backend, BackendContext, RankInfo, Submission, device_of
from asynccomm.comm.comm import Comm
from asynccomm.comm.connecting import connect_session
from asynccomm.comm.session import Session
from asynccomm.core.mailbox import Mailbox
from asynccomm.errors import PayloadError
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous.job import CommIdentity, Job, NameReservation
from asynccomm.rendezvous.spec import StoreSession
from asynccomm.store.memory import MemoryStore


@final
class FakeBackend(Backend):
    """Backend of one rank of a group without other processes."""

    name = "fake"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    any_source = False  # no rank sends

    @classmethod
    async def connect(cls, context: BackendContext) -> Self:
        return cls()

    def submit(self, batch: Sequence[Submission]) -> None:
        for submission in batch:
            error = None
            if submission.place is not None:
                error = PayloadError(f"backend 'fake' moves nothing, so nothing has come for {submission.op}")
            submission.work.settle(error)

    async def aclose(self) -> None:
        pass

    def abort(self) -> None:
        pass


async def fake_comm(name: str, rank: int, size: int, device: torch.device, timeout: timedelta) -> Comm:
    """Create a comm without a rendezvous and without other ranks."""
    group = CommInfo(name, rank, size, device_of(device))
    room = MemoryStore()
    world = (room, rank)
    identity = CommIdentity(
        Job(world, group, room, StoreSession(room, room.aclose)),
        NameReservation(world, name),
        room,
        [RankInfo(each, socket.gethostname(), os.getpid(), number=each) for each in range(size)],
        range(size),
        range(size),
    )
    options = CommOptions(timeout=timeout.total_seconds())
    session = Session(group, options, Mailbox(asyncio.get_running_loop()), identity)
    await connect_session(session, {FakeBackend.name: FakeBackend}, options.timeout)
    return Comm(session, session.backend_name)
