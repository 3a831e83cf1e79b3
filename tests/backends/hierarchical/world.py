"""All ranks of hierarchical comms in one process, with loopback in place of shared memory and gloo."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from asynccomm import MemoryStore
from asynccomm.backends.base import BackendContext, RankInfo, Submission
from asynccomm.backends.hierarchical.backend import HierarchicalBackend, _among
from asynccomm.backends.hierarchical.pipeline import Lane
from asynccomm.backends.hierarchical.placement import HostPlacement
from asynccomm.backends.loopback import Hub, LoopbackBackend
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import Work
from asynccomm.errors import BrokenError
from asynccomm.ops import Call
from asynccomm.ops.validation import CommInfo

#: the hosts of some comms: even, uneven, not laid out host by host
WORLDS: Final = {
    "2x2": ((0, 1), (2, 3)),
    "mixed": ((0, 3), (1, 2)),
    "3+1": ((0, 1, 2), (3,)),
    "1+2+3": ((0,), (1, 4), (2, 3, 5)),
    "2x3": ((0, 2, 4), (1, 3, 5)),
    "3x2": ((0, 1), (2, 3), (4, 5)),
}


class World:
    """The ranks of one comm on ``hosts``; needs a running event loop."""

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self.hosts = tuple(tuple(host) for host in hosts)
        self.size = sum(map(len, hosts))
        self.errors: list[tuple[int, BrokenError]] = []  #: with the ranks that reported them
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.hubs: dict[tuple[object, ...], Hub] = {}
        self.groups = [CommInfo("world", rank, self.size, torch.device("cpu")) for rank in range(self.size)]
        self._numbers = [0] * self.size
        self.ranks = [self._rank(rank) for rank in range(self.size)]

    def _rank(self, rank: int) -> HierarchicalBackend:
        where = HostPlacement(rank, self.hosts)
        context = BackendContext(
            group=self.groups[rank],
            members=[RankInfo(each, f"host-{where.host_of(each)}", each) for each in range(self.size)],
            store=MemoryStore(),
            mailbox=self.mailbox,
            timeout=math.inf,
            on_error=lambda error: self.errors.append((rank, error)),
        )

        def joined(ranks: Sequence[int], *key: object) -> LoopbackBackend:
            among = _among(context, LoopbackBackend, "x", ranks)
            hub = self.hubs.setdefault(key, Hub(len(ranks)))
            hub.join(among)
            return LoopbackBackend(hub, among)

        lanes = {}
        if not where.alone:
            lanes = {lane: joined(where.local, lane, where.host) for lane in (Lane.UP, Lane.DOWN)}
        if where.position < where.rails:
            lanes[Lane.ACROSS] = joined(where.rail(), Lane.ACROSS, where.position)
        return HierarchicalBackend(context, where, lanes, (lanes.get(Lane.UP), joined(range(self.size), "messages")))

    def submit(self, calls: Sequence[Call]) -> list[Work[Any]]:
        """Submit the call of each rank, in the order of the ranks."""
        return [self.submit_on(rank, call) for rank, call in enumerate(calls)]

    def submit_on(self, rank: int, call: Call) -> Work[Any]:
        work: Work[Any] = Work(
            call.op, self._numbers[rank], self.mailbox, value=None, timeout=math.inf, on_settled=lambda _: None
        )
        self._numbers[rank] += 1
        self.ranks[rank].submit((Submission(call, work),))
        return work

    def run(self, make: Callable[[CommInfo], Call]) -> list[Call]:
        """Run one operation on all ranks; returns the calls."""
        calls = [make(group) for group in self.groups]
        works = self.submit(calls)
        assert not self.errors, self.errors
        assert all(work.done() for work in works)
        assert not any(work.exception() for work in works)
        return calls
