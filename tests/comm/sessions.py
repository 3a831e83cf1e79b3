"""Sessions alone, with one rank and without a control channel."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from asynccomm import CommOptions, MemoryStore
from asynccomm.backends.base import RankInfo
from asynccomm.comm.session import Session
from asynccomm.core.mailbox import Mailbox
from asynccomm.ops.validation import CommInfo
from asynccomm.rendezvous.job import CommIdentity, Job, NameReservation
from asynccomm.rendezvous.spec import StoreSession


def alone(room: MemoryStore, **options: Any) -> Session:
    group = CommInfo("alone", 0, 1, torch.device("cpu"))
    member = RankInfo(0, "host", 1)
    job = Job((room, 0), group, room, StoreSession(room, room.aclose))
    identity = CommIdentity(job, NameReservation((room, 0), "alone"), room, [member], [0], [0])
    return Session(group, CommOptions(**options), Mailbox(asyncio.get_running_loop()), identity)
