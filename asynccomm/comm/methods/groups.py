"""Smaller comms, made of the ranks of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Self, SupportsIndex

from asynccomm.comm.membership import lobby_of, reconfigure
from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.pending import PendingComm
from asynccomm.comm.session import Session
from asynccomm.control.membership.messages import MAX_NAME
from asynccomm.core.mailbox import Mailbox
from asynccomm.errors import ClosedError
from asynccomm.ops.validation import CommInfo, as_index
from asynccomm.options import check_hints, check_name, seconds
from asynccomm.rendezvous.job import CommIdentity, NameReservation

Ranks = Sequence[SupportsIndex]


class Groups(CommBase):
    """Smaller comms, made of the ranks of this one.

    A comm that was split off lives on its own: each fails, is aborted and is closed apart, in any order, and all can be
    used at the same time. It runs on the same backend and device, with the same options.

    After a loss the comm is broken. The ranks that are left call :meth:`shrink` and get a comm of those that are alive,
    with new ranks in the order of the old ones; its ``parent_ranks`` says what they were. :meth:`reconfigure` also
    takes in processes that wait in ``asynccomm.join_comm``. The old comm is closed when the new one is there. Comms
    that were split off it are not touched; they go on, or shrink, by themselves.
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

    # -- going on in place of this comm --------------------------------------------------------------------------------

    def shrink(
        self, exclude: Sequence[SupportsIndex] = (), *, timeout: float | timedelta | None = None
    ) -> PendingComm[Self]:
        """Go on without the ranks that are lost; ``await`` it, or better ``async with`` it. All that are left do so.

        ::

            try:
                await comm.all_reduce(tensor)
            except asynccomm.BrokenError:
                comm = await comm.shrink()

        Who is left is agreed on over the control channel, whatever state the transport is in, also when ranks die
        while that goes on. A comm that is not broken is let come to rest first.

        Args:
            exclude: ranks to leave out though they are alive; they do not call this. The same on all ranks.
            timeout: seconds to wait for ranks that are alive to call it, too; None: the comm's. They are left out
                then, as are at once those that do not answer at all (they are stopped).

        Raises:
            ValueError, TypeError: at the call, naming the argument; from awaiting, if ranks want different things.
            ClosedError: this rank has closed the comm; also from awaiting, if it does so meanwhile.
            LeftOutError: from awaiting: the others went on without this rank.
            BackendError: from awaiting: the members could not connect, in several tries.
            RuntimeError: this rank has no control channel, or not all ranks have one; another task regroups the comm.

        After ValueError and BackendError the comm is as it was, and all may call again. Cancelling the await is safe
        and final: the others go on without this rank, and calling again raises LeftOutError. What is called on the old
        comm meanwhile may fail with AbortedError. Ranks that are left out find the old comm broken.
        """
        excluded = distinct(self._group, "exclude", exclude)
        if self.rank in excluded:
            raise ValueError(f"exclude must not have this rank, {self.rank}, got {list(exclude)!r}")
        return self._regroup([rank for rank in range(self.size) if rank not in excluded], timeout)

    def reconfigure(
        self, members: Sequence[SupportsIndex | str], *, timeout: float | timedelta | None = None
    ) -> PendingComm[Self]:
        """Go on as a comm of ``members``; as :meth:`shrink`, and for more.

        ::

            waiting = await comm.broadcast_object(await comm.newcomers() if comm.rank == 0 else None, root=0)
            if waiting:
                comm = await comm.reconfigure([*range(comm.size), *waiting])

        Args:
            members: ranks of this comm and names of newcomers (see :meth:`newcomers`), in the order of their new ranks,
                with this rank among them. The same on all ranks. Those that are lost, or do not come, are left out:
                newcomers, ten seconds after all ranks have called this.
            timeout: as for :meth:`shrink`.

        Raises: what :meth:`shrink` raises; StoreError from awaiting, if newcomers cannot be invited.
        """
        if isinstance(members, (str, bytes)) or not isinstance(members, Sequence):
            raise ValueError(f"members must be a list of ranks and newcomers, got {members!r}")
        ranks = distinct(self._group, "members", [member for member in members if not isinstance(member, str)])
        if self.rank not in ranks:
            raise ValueError(f"members must have this rank, {self.rank}, got {list(members)!r}")
        names = [member for member in members if isinstance(member, str)]
        if len(set(names)) < len(names) or not all(0 < len(name) <= MAX_NAME for name in names):
            raise ValueError(f"members must be different newcomers, got {list(members)!r}")
        found = iter(ranks)
        return self._regroup([m if isinstance(m, str) else next(found) for m in members], timeout)

    async def newcomers(self) -> list[str]:
        """The names of processes that wait in ``join_comm`` for a comm of this name, longest first.

        Each is asked whether it is still there, which takes half a second if one is not. Not collective. Cancelling is
        safe. Raises: StoreError; ClosedError, BrokenError.
        """
        session = self._session
        session.check_loop()
        session.check_open()
        return await lobby_of(session).waiting()

    def _regroup(self, proposal: Sequence[int | str], timeout: float | timedelta | None) -> PendingComm[Self]:
        session = self._session
        wait = seconds("timeout", timeout, session.options.timeout)
        session.check_loop()
        self._check_regrouping()
        if (reason := self._why_fixed()) is not None:
            raise RuntimeError(reason)
        jobs = [who if isinstance(who, str) else session.identity.job_ranks[who] for who in proposal]

        async def connect() -> Self:
            session.check_loop()
            self._check_regrouping()  # much may have happened since the call
            new = await reconfigure(session, jobs, wait, [who for who in jobs if isinstance(who, str)])
            return type(self)(new, new.backend_name)

        return PendingComm(connect)

    def _why_fixed(self) -> str | None:
        """What keeps the comm from being regrouped: a control channel that this rank, or another one, does not have."""
        session = self._session
        channel = session.identity.job.channel
        if session.reporter is None or channel is None or session.backend is None:
            return f"comm {self.name!r} has no control channel on this rank, and cannot be regrouped"
        absent = [rank for rank, job in enumerate(session.identity.job_ranks) if job not in channel.topology.contacts]
        if absent:
            return f"ranks {absent} of comm {self.name!r} have no control channel: it cannot be regrouped"
        return None

    def _check_regrouping(self) -> None:
        session = self._session
        if session.closed or isinstance(session.error, ClosedError):
            raise ClosedError(f"comm {self.name!r} is closed") from session.error
        if session.regrouping is not None:
            raise RuntimeError(f"comm {self.name!r} is being regrouped already, by another task")


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
