"""Control channels that the comms of the same processes share.

The ranks of a new comm may have a channel already, from an earlier comm of the same processes under the same numbers,
at the same store. Then they meet over it (``rendezvous.channel_meeting``), and the new comm uses it. So they keep one
tree of connections and one set of heartbeats, and a comm after the first one connects sooner.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple, final

from asynccomm.backends.base import RankInfo
from asynccomm.control.channel import ControlChannel


@final
class ChannelPlace(NamedTuple):
    """Comms share a channel only if they agree in all of this."""

    run: str  #: of the launcher; tools find the comms of a run by its channels
    store: str  #: the address; ranks of other stores are other processes
    host: str  #: the name of this rank's host, and its network, as the other ranks know them
    network: str


_open: list[SharedChannel] = []  # the channels of this process that jobs share
_lock = threading.RLock()  # reentrant: a comm collected while the lock is held also ends its lease


@final
class SharedChannel:
    """A channel, the place and the ranks that it was opened for, and the number of its leases."""

    __slots__ = ("channel", "key", "leases", "members", "where")

    def __init__(self, channel: ControlChannel, where: ChannelPlace | None, members: Sequence[RankInfo]) -> None:
        self.channel: ControlChannel = channel
        #: the same on all ranks; the tokens do not follow from it
        self.key: str = hashlib.sha256(b"shared channel" + channel.tokens.secret).hexdigest()[:16]
        self.where: ChannelPlace | None = where
        self.members: Sequence[RankInfo] = members
        self.leases: int = 0


@final
class ChannelLease:
    """The use of a channel by one job; the channel ends with its last lease. From any thread."""

    def __init__(self, shared: SharedChannel) -> None:
        self._shared = shared
        self._ended = self._last = False
        with _lock:
            shared.leases += 1

    @classmethod
    def of_new(cls, channel: ControlChannel, where: ChannelPlace | None, members: Sequence[RankInfo]) -> ChannelLease:
        """The first lease of ``channel``.

        Args:
            where: None: no other job uses the channel.
            members: of the comm that has opened the channel, in rank order.
        """
        shared = SharedChannel(channel, where, members)
        with _lock:
            if where is not None:
                _open.append(shared)
            return cls(shared)

    @classmethod
    def of_open(cls, where: ChannelPlace, rank: int, size: int) -> ChannelLease | None:
        """A lease of an open channel with these numbers for its ranks, none of which is gone; None: there is none.

        Of several channels, all ranks take the same one if they have the same ones, opened in any order. A process that
        has the same number in several groups of one size has channels with different peers, and may take another one
        than its peers do.
        """
        with _lock:
            found = [each for each in _open if each.where == where and each.channel.connects_all(rank, size)]
            return cls(min(found, key=lambda each: each.key)) if found else None

    @property
    def channel(self) -> ControlChannel:
        return self._shared.channel

    @property
    def members(self) -> Sequence[RankInfo]:
        """The ranks that the channel connects, with the addresses that they have met with, in rank order."""
        return self._shared.members

    @property
    def key(self) -> str:
        """Identifies the channel; the same on all ranks."""
        return self._shared.key

    def end(self) -> None:
        """End the lease without waiting. Idempotent."""
        if self._end():
            self.channel.end()

    async def aclose(self) -> None:
        """End the lease; the last one leaves and closes the channel in good order. Idempotent."""
        if self._end():
            await self.channel.aclose()

    def _end(self) -> bool:
        """End the lease. Returns whether it was the last one."""
        with _lock:
            if not self._ended:
                self._ended = True
                self._shared.leases -= 1
                self._last = not self._shared.leases
                if self._last and self._shared in _open:  # a forked child has forgotten it
                    _open.remove(self._shared)
            return self._last


def _forget_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that is missing in the child may have held the old one
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)
