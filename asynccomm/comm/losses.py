"""The process of a lost rank: host, pid, and the exit code or signal if a launcher on this host records it."""

from __future__ import annotations

from asynccomm.backends.base import RankInfo
from asynccomm.core.exit_records import exits_are_recorded, recorded_exit
from asynccomm.errors import PeerLostError


def located(error: PeerLostError, comm: str, member: RankInfo, here: RankInfo) -> PeerLostError:
    """``error`` with the process of the lost rank.

    Args:
        comm: name of the comm.
        member: the lost rank.
        here: this rank.
    """
    ended = recorded_exit(member.pid) if member.host == here.host else ""
    found = PeerLostError(error.rank, f"it {ended}" if ended else error.detail, comm, member.host, member.pid)
    found.__cause__ = error.__cause__
    return found


def may_be_recorded(member: RankInfo, here: RankInfo) -> bool:
    """Whether the end of ``member`` is not recorded yet, and may be soon."""
    return exits_are_recorded() and member.host == here.host and not recorded_exit(member.pid)
