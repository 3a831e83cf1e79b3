"""Sessions alone, with one rank and without a control channel."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import torch

from asynccomm import CommOptions, MemoryStore
from asynccomm.backends.base import RankInfo
from asynccomm.comm.session import Session
from asynccomm.core.mailbox import Mailbox
from asynccomm.ops.validation import CommInfo
from asynccomm.rendezvous import shared_channels
from asynccomm.rendezvous.job import CommIdentity, Job, NameReservation
from asynccomm.rendezvous.spec import StoreSession
from tests.waiting import until


def alone(room: MemoryStore, **options: Any) -> Session:
    group = CommInfo("alone", 0, 1, torch.device("cpu"))
    member = RankInfo(0, "host", 1)
    job = Job((room, 0), group, room, StoreSession(room, room.aclose))
    identity = CommIdentity(job, NameReservation((room, 0), "alone"), room, [member], [0], [0])
    return Session(group, CommOptions(**options), Mailbox(asyncio.get_running_loop()), identity)


async def close(*sessions: Session) -> None:
    """Close all ``sessions`` at once."""
    async with asyncio.timeout(20):
        await asyncio.gather(*(session.aclose() for session in sessions))


async def nothing_is_left() -> None:
    """Wait until this process has no control channel."""
    await until(lambda: not [t for t in threading.enumerate() if t.name == "asynccomm control"])
    await until(lambda: f"/{os.getpid()}/" not in Path("/proc/net/unix").read_text())
    assert shared_channels._open == []
