"""A job's comms in one process: the store, the control channel and the names that they share.

A job begins with a comm of ``new_comm`` and includes all comms split off its members. Jobs of the same processes may
lease one control channel (``shared_channels``). The comms of a job fail and close independently, in any order. The
store stays connected until the last comm has closed; only then does this rank announce that it no longer needs the
store. The rank that hosts the store waits for the announcements of the other ranks. If its last comm of the job ends
because a comm of another job replaces it, the wait goes on beside that job, and ends with it; ranks that are no part of
that job are waited for no longer than the job.

All keys of a comm lie under its prefix in the store. A child's prefix lies within its parent's, and all members compute
the same prefix without communicating. See :meth:`CommIdentity.child_prefix`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final
from weakref import WeakValueDictionary

from asynccomm.backends.base import RankInfo
from asynccomm.control.channel import ControlChannel
from asynccomm.control.timing import SILENT_SECONDS
from asynccomm.core.tasks import detach
from asynccomm.errors import AsyncCommError, ClosedError
from asynccomm.ops.validation import CommInfo
from asynccomm.rendezvous.shared_channels import ChannelLease
from asynccomm.rendezvous.spec import RendezvousSpec, StoreSession
from asynccomm.store.base import Store, path_of, within

STORE_HOST_KEY = "host"  # key under a job's prefix: the rank that hosts the store, if a rank does
DEPARTURES_KEY = "gone"  # key under a job's prefix: the number of ranks that no longer need the store
ANNOUNCE_SECONDS = 1.0  # seconds for the departure of a rank to reach the store, which may be lost or stuck
LEAVE_SECONDS = 10.0  # seconds that the rank hosting the store stays for the other ranks after closing its comms
LOOK_SECONDS = 0.01  # seconds between looks for their announcements
LOOK_BESIDE_SECONDS = 0.25  # the same, while the host goes on with another job

ProcessIdentity = tuple[object, int]  # the rendezvous, and this process's rank there

_log = logging.getLogger("asynccomm")
_claims: WeakValueDictionary[tuple[ProcessIdentity, str], NameReservation] = WeakValueDictionary()  # names in use
_claiming = threading.RLock()  # reentrant: a comm collected while the lock is held also releases its name


class NameInUseError(ValueError):
    """An open comm of this process has the name."""


@final
class NameReservation:
    """A comm's name, reserved until released or dropped. Raises NameInUseError."""

    def __init__(self, world: ProcessIdentity, name: str) -> None:
        self.name = name
        self._key = world, name
        with _claiming:
            if self._key in _claims:
                raise NameInUseError(
                    f"name {name!r} is in use by an open comm of this process: take another or close it"
                )
            _claims[self._key] = self

    @property
    def held(self) -> bool:
        """Whether the name has not been released. From any thread."""
        with _claiming:
            return _claims.get(self._key) is self

    def release(self) -> None:
        """Make the name available again. Idempotent; from any thread."""
        with _claiming:
            if _claims.get(self._key) is self:
                del _claims[self._key]


@final
@dataclass(frozen=True, slots=True)
class JobOrigin:
    """The rendezvous of jobs that replace each other, and this process's rank in the first of them, and its number."""

    place: RendezvousSpec
    rank: int
    number: int  #: see ``launchers.process_number``

    @property
    def world(self) -> ProcessIdentity:
        return self.place.world, self.rank


@final
class Job:
    """The comms of this process that descend from one ``new_comm``.

    Args:
        world: the rendezvous and rank of this process.
        group, room: the first comm's group and store prefix; all ranks of the job belong to this comm.
        meeting, lease: closed with the last comm. No lease: the job runs without a control channel.
        origin: None: no other job can replace this one.
        secret: as secret as the tokens of the job; empty: there is none.
    """

    def __init__(
        self,
        world: ProcessIdentity,
        group: CommInfo,
        room: Store,
        meeting: StoreSession,
        lease: ChannelLease | None = None,
        origin: JobOrigin | None = None,
        secret: bytes = b"",
    ) -> None:
        self.world = world
        self.secret = secret
        self.channel: ControlChannel | None = None if lease is None else lease.channel
        self.origin = origin
        self.left_out: set[int] = set()  #: ranks without which another job has replaced a comm of this one
        self.room = room
        self._group = group
        self._meeting = meeting
        self._lease = lease
        self.store: Store = meeting.store
        self._seats = 0
        self._over = False
        self._predecessors: dict[asyncio.Task[None], Job] = {}  # that this job replaces, by the tasks that end them
        self._last = asyncio.Event()  # set: the job that replaces this one ends, too

    def enter(self) -> None:
        """Count one more comm. On the loop. Raises: ClosedError when all comms of the job have closed."""
        if self._over:
            raise ClosedError(f"comm {self._group.name!r} and all that were split off it are closed")
        self._seats += 1

    def abandon(self) -> None:
        """Count one comm less after its loop has ended; the last one ends the lease of the channel without the loop."""
        self._seats -= 1
        if self._seats == 0 and self._lease is not None:
            self._lease.end()

    async def leave(self, successor: Job | None = None, *, abandoned: bool = False) -> None:
        """Count one comm less; with the last, the rank leaves the store.

        Args:
            successor: the job of the comm that replaces the one that has closed; None: no comm does.
            abandoned: whether the comm is not counted any more.
        """
        self._seats -= not abandoned
        if self._seats or self._over:
            return
        self._over = True
        if self._meeting.hosted is None or successor is None or successor._over:
            await self._end(LEAVE_SECONDS)
        else:  # the new comm need not wait for ranks that use other comms of this job
            earlier, self._predecessors = self._predecessors, {}
            for ending, job in [*earlier.items(), (detach(asyncio.ensure_future(self._end(math.inf))), self)]:
                successor._predecessors[ending] = job
                ending.add_done_callback(lambda ended: successor._predecessors.pop(ended, None))

    async def _end(self, limit: float) -> None:
        """Leave the store and end the lease of the channel; see ``_announce_departure``."""
        try:
            await self._announce_departure(limit)
        finally:
            try:
                ending = list(self._predecessors)
                for task in ending:
                    task.cancel()
                await asyncio.gather(*ending, return_exceptions=True)
            finally:
                try:
                    if self._lease is not None:
                        await self._lease.aclose()
                finally:
                    await self._meeting.aclose()

    async def _announce_departure(self, limit: float) -> None:
        """Announce that this rank is done; the store's host waits ``limit`` seconds for the other ranks to do so."""
        name, size = self._group.name, self._group.size
        hosts = self._meeting.hosted is not None
        stays = hosts or bool(self._predecessors)
        for job in self._predecessors.values():
            job._last.set()
        try:
            async with within(limit if stays else ANNOUNCE_SECONDS):
                gone = await self.room.add(DEPARTURES_KEY, 1)
                while hosts and gone + self._lost < size:
                    await self._pause(limit)
                    gone = await self.room.add(DEPARTURES_KEY, 0)
                if self._predecessors:
                    await asyncio.wait(self._predecessors)
        except TimeoutError:
            if stays:
                _log.warning("comm %r: not all ranks have closed within %g s; the store ends now", name, limit)
        except AsyncCommError as exc:
            _log.debug("comm %r: the store was gone before this rank left: %s", name, exc)

    async def _pause(self, limit: float) -> None:
        """Wait until the next look for announcements: a longer time while another job goes on beside."""
        if limit < math.inf or self._last.is_set():
            await asyncio.sleep(LOOK_SECONDS)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_BESIDE_SECONDS):
                    await self._last.wait()

    @property
    def _lost(self) -> int:
        """The number of ranks that can no longer announce their departure, or are not waited for, being left out."""
        channel = self.channel
        if channel is None:
            return 0
        gone = channel.gone.copy()  # the control thread changes it
        left_out = self.left_out - gone.keys()
        if not self._last.is_set():
            left_out = {rank for rank in left_out if (channel.silence(rank) or 0.0) > SILENT_SECONDS}  # stopped
        return sum(map(bool, gone.values())) + len(left_out)


@final
class CommIdentity:
    """One comm's membership in its job.

    Args:
        job: the job that the comm belongs to.
        reservation: of the comm's name.
        room: the comm's own store prefix.
        members: in rank order.
        parent_ranks: the members' ranks in the parent comm.
        job_ranks: the members' ranks in the first comm of the job.
    """

    def __init__(
        self,
        job: Job,
        reservation: NameReservation,
        room: Store,
        members: Sequence[RankInfo],
        parent_ranks: Sequence[int],
        job_ranks: Sequence[int],
    ) -> None:
        self._left = True  # first, for __del__: nothing to abandon unless enter() succeeds
        self.job = job
        self.room = room
        self.members: tuple[RankInfo, ...] = tuple(members)
        self.parent_ranks: tuple[int, ...] = tuple(parent_ranks)
        self.job_ranks: tuple[int, ...] = tuple(job_ranks)
        self.key: str = comm_key(path_of(room))  #: identifies this comm in the control channel
        self.successor: Job | None = None  #: the job of the comm that replaces this one
        self._reservation = reservation
        self._splits: Counter[str] = Counter()
        self._unnamed: Counter[str] = Counter()
        job.enter()
        self._left = False

    def child_prefix(self, name: str, ranks: Sequence[int]) -> Store:
        """The store prefix at which ``ranks`` meet for their next comm called ``name``.

        The prefix follows from the name, the ranks, and the number of their earlier splits, all of which every member
        has. Failed and cancelled splits count: otherwise ranks that did try would stay one ahead for ever.
        """
        digest = _digest(json.dumps([name, list(ranks)]))
        number = self._splits[digest]
        self._splits[digest] += 1
        return self.room.prefix(f"split/{name}/{digest}/{number}")

    def default_name(self, kind: str) -> str:
        """The name of the next comm of a ``kind`` that is made without a name."""
        number = self._unnamed[kind] + 1
        return kind if number == 1 else f"{kind} {number}"

    def take_default_name(self, kind: str) -> None:
        """Count a comm that has the default name of its ``kind``: all ranks count them alike."""
        self._unnamed[kind] += 1

    def members_of(self, ranks: Sequence[int]) -> list[RankInfo]:
        """The members with these ``ranks``, renumbered from 0."""
        members = [self.members[old] for old in ranks]
        return [each if each.rank == new else replace(each, rank=new) for new, each in enumerate(members)]

    @property
    def numbers(self) -> list[int]:
        """The members' numbers in dumps and traces, in rank order."""
        return [member.number for member in self.members]

    @property
    def has_name(self) -> bool:
        """Whether the name is reserved for this comm, and not available to another one. From any thread."""
        return self._reservation.held

    def free_name(self) -> None:
        """Make the name available to another comm. From any thread."""
        self._reservation.release()

    def reserve_again(self) -> None:
        """Reserve the name again, unless another comm has taken it."""
        with contextlib.suppress(ValueError):
            self._reservation = NameReservation(self.job.world, self._reservation.name)

    def __del__(self) -> None:
        if not self._left:  # the loop ended before the comm was closed
            self._left = True
            if self.job.channel is not None:  # which may go on, with other comms
                self.job.channel.unsubscribe(self.key, {"kind": "closed"})
            self.job.abandon()

    def detach_in_child(self) -> None:
        """Disown the membership in a forked child: the parent keeps it."""
        self._left = True

    async def leave(self) -> None:
        """Leave the job after the comm has closed, and release the name."""
        abandoned, self._left = self._left, True  # the end of a comm dropped in a cycle comes after ``__del__`` here
        successor, self.successor = self.successor, None  # a closed comm keeps no other alive
        try:
            await self.job.leave(successor, abandoned=abandoned)
        finally:
            self.free_name()


async def announce_departure(room: Store) -> None:
    """Announce that this rank has met the others in ``room``, and needs the store no longer."""
    with contextlib.suppress(TimeoutError, AsyncCommError):
        async with within(ANNOUNCE_SECONDS):
            await room.add(DEPARTURES_KEY, 1)


def comm_key(path: str) -> str:
    """The key in the control channel of the comm with the store prefix ``path``."""
    return _digest(path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _renew_lock() -> None:
    global _claiming
    _claiming = threading.RLock()  # a thread that is missing in the child may have held the old one


os.register_at_fork(after_in_child=_renew_lock)
