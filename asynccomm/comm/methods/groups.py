"""Smaller comms, made of the ranks of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Self, SupportsIndex

from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.pending import PendingComm
from asynccomm.comm.session import Session
from asynccomm.core.mailbox import Mailbox
from asynccomm.ops.validation import CommInfo, as_index
from asynccomm.options import check_hints, check_name, seconds
from asynccomm.rendezvous.job import CommIdentity, NameReservation

Ranks = Sequence[SupportsIndex]


class Groups(CommBase):
    """Smaller comms, made of the ranks of this one.

    A comm that was split off lives on its own: each fails, is aborted and is closed apart, in any order, and all can be
    used at the same time. It runs on the same backend and device, with the same options.
    """

    @property
    def parent_ranks(self) -> tuple[int, ...]:
        """By rank, what each was called in the comm that this one was split off; else ``0, 1, ...``."""
        return self._session.identity.parent_ranks

    def split(
        self,
        ranks: Ranks,
        name: str,
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self | None]:
        """Make a comm of some ranks; ``await`` it, or better ``async with`` it. Only those ranks do so.

        ::

            async with comm.split([0, 2], "even") as even: ...

        Args:
            ranks: of this comm, the same list on all of them; their order is that of their new ranks. Empty: no comm.
            name: the same on all of them. The new comm is called ``f"{comm.name}/{name}"``, which must be unique among
                the open comms of this process; other ranks may use the name for a comm of theirs.
            hints: for the backend, in place of this comm's; None: this comm's.
            timeout: for connecting and for the operations; None: this comm's.

        Returns: the new comm; None if ``ranks`` is empty.

        Raises:
            ValueError, TypeError: at the call, naming the argument; also if ``ranks`` does not have this rank.
            ClosedError, BrokenError: this comm's, at the call, or from awaiting if it breaks meanwhile.
            BackendError: from awaiting: the transport could not connect, or ranks did not come.
            AbortedError: from awaiting: another rank could not connect, or gave up.

        Cancelling the await is safe; the other ranks hear of it. Ranks are told apart by ``ranks``, ``name`` and how
        often they have split so, thus each of them must have called this as often.
        """
        return self._split(distinct(self._group, "ranks", ranks), name, hints, timeout)

    def dup(
        self, name: str = "dup", *, hints: Mapping[str, str] | None = None, timeout: float | timedelta | None = None
    ) -> PendingComm[Self]:
        """Make another comm of the same ranks, whose operations are independent of this one's; see :meth:`split`."""
        return self._split(range(self._group.size), name, hints, timeout)  # type: ignore[return-value]  # never None

    def subgroups(
        self,
        group_size: SupportsIndex,
        name: str = "subgroups",
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self]:
        """Make comms of ``group_size`` consecutive ranks each; gives the one that this rank is in. See :meth:`split`.

        Args:
            group_size: a divisor of ``size``.
        """
        length, size = as_index(group_size), self._group.size
        if length is None or length < 1 or size % length:
            raise ValueError(f"group_size must be a positive integer that divides the {size} ranks, got {group_size!r}")
        first = self._group.rank // length * length
        return self._split(range(first, first + length), name, hints, timeout)  # type: ignore[return-value]

    def subgroups_by_enumeration(
        self,
        groups: Sequence[Ranks],
        name: str = "subgroups",
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self | None]:
        """Make a comm of each list of ranks; gives the one that this rank is in, None if in none. See :meth:`split`.

        Args:
            groups: lists that have no rank in common; ranks may be left out.
        """
        if isinstance(groups, (str, bytes)) or not isinstance(groups, Sequence) or not groups:
            raise ValueError(f"groups must be a list of at least one list of ranks, got {groups!r}")
        mine: Sequence[int] = ()
        homes: dict[int, int] = {}  # number of its list, by rank
        for i, group in enumerate(groups):
            ranks = distinct(self._group, f"groups[{i}]", group)
            if not ranks:
                raise ValueError(f"groups[{i}] must have at least one rank, got {group!r}")
            for rank in ranks:
                if homes.setdefault(rank, i) != i:
                    raise ValueError(
                        f"groups must not overlap, but groups[{homes[rank]}] and groups[{i}] have rank {rank}"
                    )
            if self._group.rank in ranks:
                mine = ranks
        return self._split(mine, name, hints, timeout)

    def intra_node(
        self,
        name: str = "intra_node",
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self]:
        """Make a comm of the ranks on each node; gives the one that this rank is in. See :meth:`split`.

        Ranks are on one node if their hosts have the same name, wherever they were started and however many there are
        on each. They keep their order. With :meth:`inter_node` these make a hierarchy: what is to go to all ranks goes
        over the network once for each node.
        """
        hosts = self._hosts()
        mine = [rank for rank, host in enumerate(hosts) if host == hosts[self._group.rank]]
        return self._split(mine, name, hints, timeout)  # type: ignore[return-value]  # never None

    def inter_node(
        self,
        name: str = "inter_node",
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self | None]:
        """Make a comm of one rank on each node, the first; None on all others. See :meth:`split`.

        Its ranks are those that are rank 0 of :meth:`intra_node`, in their order here.
        """
        hosts = self._hosts()
        firsts = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
        return self._split(firsts if self._group.rank in firsts else [], name, hints, timeout)

    def _hosts(self) -> list[str]:
        return [member.host for member in self._session.identity.members]

    def _split(
        self,
        ranks: Sequence[int],
        name: str,
        hints: Mapping[str, str] | None,
        timeout: float | timedelta | None,
    ) -> PendingComm[Self | None]:
        parent, group = self._session, self._group
        check_name(name)
        if ranks and group.rank not in ranks:
            raise ValueError(f"ranks must include this rank, {group.rank}, or be empty, got {list(ranks)}")
        backend = type(self.unsafe_get_backend())
        options = replace(parent.options, timeout=seconds("timeout", timeout, parent.options.timeout))
        if hints is not None:
            checked = check_hints(hints, backend.hints, self._backend_name)
            backend.check_hints(checked)
            options = replace(options, hints=checked)
        parent.check_loop()
        if not ranks:
            return PendingComm(_nobody)
        job = parent.identity.job
        reservation = NameReservation(job.world, f"{group.name}/{name}")
        room = parent.identity.child_prefix(name, ranks)
        child = CommInfo(reservation.name, list(ranks).index(group.rank), len(ranks), group.device)
        called = [reservation]  # taken by the await

        async def connect() -> Self:
            parent.check_loop()
            if not called:
                raise RuntimeError(f"this split of {child.name!r} was awaited before; call split() again")
            jobs = [parent.identity.job_ranks[rank] for rank in ranks]
            identity = CommIdentity(job, called.pop(), room, parent.identity.members_of(ranks), ranks, jobs)
            session = Session(child, options, Mailbox(parent.mailbox.loop), identity)
            await session.connect({self._backend_name: backend}, options.timeout, parent)
            return type(self)(session, session.backend_name)

        return PendingComm(connect)


async def _nobody() -> None:
    """The comm of no ranks."""


def distinct(group: CommInfo, name: str, ranks: object) -> list[int]:
    """``ranks`` as a list of different ranks. Raises ``ValueError`` naming ``name``."""
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Sequence):
        raise ValueError(f"{name} must be a list of ranks, got {ranks!r}")
    found: list[int] = []
    for rank in ranks:
        value = as_index(rank)
        if value is None:
            raise ValueError(f"{name} must be integers, got {rank!r} in {ranks!r}")
        if not 0 <= value < group.size:
            raise ValueError(f"{name} must be in [0, {group.size}), got {value} in {ranks!r}")
        if value in found:
            raise ValueError(f"{name} must be different, got {value} twice in {ranks!r}")
        found.append(value)
    return found
