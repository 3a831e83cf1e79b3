"""What the comms of one process share that were split off one another: the store, the control channel, and names.

A family begins with a comm of ``new_comm``; whatever is split off its members belongs to it. Its comms fail and close
apart from each other, in any order. The store stays connected until the last of them has closed, and only then does
this rank say that it needs the store no more.

All keys of a comm lie in its room of the store: those of a child in a room within its parent's, which all members find
without talking to each other. See :meth:`CommIdentity.room_for`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final
from weakref import WeakValueDictionary

from asynccomm.backends.base import RankInfo
from asynccomm.control.channel import ControlChannel
from asynccomm.errors import AsyncCommError, ClosedError
from asynccomm.ops.validation import CommInfo
from asynccomm.rendezvous.spec import RendezvousSpec, StoreSession
from asynccomm.store.base import PrefixStore, Store, within

STORE_HOST_KEY = "host"  # in a family's room: which of its ranks hosts the store, if one does
WORD_SECONDS = 1.0  # for the store, which may be gone or stuck, to take a rank's word that it leaves
LEAVE_SECONDS = 10.0  # the rank that hosts the store stays for the others this long after it has closed its comms

ProcessIdentity = tuple[object, int]  # where the ranks met, and as which of them this process did

_log = logging.getLogger("asynccomm")
_claims: WeakValueDictionary[tuple[ProcessIdentity, str], NameReservation] = WeakValueDictionary()  # names in use
_claiming = threading.RLock()  # a comm that is collected within it releases its name, too


@final
class NameReservation:
    """A comm's name, taken until it is released or dropped. Raises ``ValueError`` if it is taken already."""

    def __init__(self, world: ProcessIdentity, name: str) -> None:
        self.name = name
        self._key = world, name
        with _claiming:
            if self._key in _claims:
                raise ValueError(f"name {name!r} is in use by an open comm of this process: take another or close it")
            _claims[self._key] = self

    def release(self) -> None:
        """Let others take the name. Idempotent; from any thread."""
        with _claiming:
            if _claims.get(self._key) is self:
                del _claims[self._key]


@final
@dataclass(frozen=True, slots=True)
class JobOrigin:
    """Where comms that follow each other meet, and as which rank of the first of them this process was there."""

    place: RendezvousSpec
    rank: int

    @property
    def world(self) -> ProcessIdentity:
        return self.place.world, self.rank


@final
class Job:
    """The comms of this process that came of one another.

    Args:
        world: of the rank.
        group, room: of the first of them, which all ranks of the family's comms belong to.
        meeting, channel: closed with the last of them. No channel: there is none.
        origin: None: nothing can follow this family.
    """

    def __init__(
        self,
        world: ProcessIdentity,
        group: CommInfo,
        room: Store,
        meeting: StoreSession,
        channel: ControlChannel | None = None,
        origin: JobOrigin | None = None,
    ) -> None:
        self.world = world
        self.channel = channel
        self.origin = origin
        self.followed = False  #: comms of another family go on in place of these: the store is theirs now
        self.room = room
        self._group = group
        self._meeting = meeting
        self.store = meeting.store
        self._seats = 0
        self._over = False

    def enter(self) -> None:
        """One more comm. On the loop. Raises: ClosedError when all have ended."""
        if self._over:
            raise ClosedError(f"comm {self._group.name!r} and all that were split off it are closed")
        self._seats += 1

    def abandon(self) -> None:
        """One comm less, whose loop turns no more: what is on it is lost, and the control channel ends all the same."""
        self._seats -= 1
        if self._seats == 0 and self.channel is not None:
            self.channel.end()

    async def leave(self) -> None:
        """One comm less; with the last, the rank leaves the store."""
        self._seats -= 1
        if self._seats == 0:
            self._over = True
            try:
                await self._say_goodbye()
            finally:
                try:
                    if self.channel is not None:
                        await self.channel.aclose()
                finally:
                    await self._meeting.aclose()

    async def _say_goodbye(self) -> None:
        """Say that this rank is done; the host of the store waits for the others, who may still need it."""
        name, size = self._group.name, self._group.size
        stays = self._meeting.hosted is not None and not self.followed
        try:
            async with within(LEAVE_SECONDS if stays else WORD_SECONDS):
                gone = await self.room.add("gone", 1)
                if stays:
                    while gone + self._lost < size:
                        await asyncio.sleep(0.01)
                        gone = await self.room.add("gone", 0)
        except TimeoutError:
            if stays:
                _log.warning("comm %r: not all ranks have closed within %g s; the store ends now", name, LEAVE_SECONDS)
        except AsyncCommError as exc:
            _log.debug("comm %r: the store was gone before this rank left: %s", name, exc)

    @property
    def _lost(self) -> int:
        """Ranks that will not say so any more."""
        return 0 if self.channel is None else sum(map(bool, list(self.channel.gone.values())))


@final
class CommIdentity:
    """One comm's place in its family.

    Args:
        job: which it enters.
        reservation: to the comm's name.
        room: keys of this comm alone.
        members: in rank order.
        parent_ranks: what they are called in the comm that this one was split off.
        job_ranks: what they are called in the first comm of the family.
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
        self.job = job
        self.room = room
        self.members = tuple(members)
        self.parent_ranks = tuple(parent_ranks)
        self.job_ranks = tuple(job_ranks)
        self.key = _digest(_path(room))  #: of this comm in the control channel
        self._reservation = reservation
        self._splits: Counter[str] = Counter()
        self._left = True  # or nobody is here yet
        job.enter()
        self._left = False

    def child_prefix(self, name: str, ranks: Sequence[int]) -> Store:
        """Where ``ranks`` meet for the next comm of that ``name``.

        It follows from the name, the ranks, and how often these have split so: what all of them know. A split that
        failed or was cancelled counts, or the others, who tried it, would be one ahead for ever.
        """
        digest = _digest(json.dumps([name, list(ranks)]))
        number = self._splits[digest]
        self._splits[digest] += 1
        return self.room.prefix(f"split/{name}/{digest}/{number}")

    def members_of(self, ranks: Sequence[int]) -> list[RankInfo]:
        """Those of ``ranks``, numbered anew."""
        return [RankInfo(new, self.members[old].host, self.members[old].pid) for new, old in enumerate(ranks)]

    def free_name(self) -> None:
        """Let another comm take the name. From any thread."""
        self._reservation.release()

    def reserve_again(self) -> None:
        """Take it back, unless somebody else has it."""
        with contextlib.suppress(ValueError):
            self._reservation = NameReservation(self.job.world, self._reservation.name)

    def __del__(self) -> None:
        if not self._left:  # its loop has ended before the comm could
            self._left = True
            self.job.abandon()

    def detach_in_child(self) -> None:
        """This is a forked child: the place is the parent's."""
        self._left = True

    async def leave(self) -> None:
        """The comm has ended."""
        self._left = True
        try:
            await self.job.leave()
        finally:
            self.free_name()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _path(room: Store) -> str:
    names = []
    while isinstance(room, PrefixStore):
        names.append(room.name)
        room = room.underlying
    return "/".join(reversed(names))


def _renew_lock() -> None:
    global _claiming
    _claiming = threading.RLock()  # a thread that is not in the child may have held the old one


os.register_at_fork(after_in_child=_renew_lock)
