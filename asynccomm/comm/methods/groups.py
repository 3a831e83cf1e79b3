"""Comms made from the ranks of a comm: smaller groups, and comms that go on after a loss or with new ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Never, Self, SupportsIndex, overload

from asynccomm.backends.base import Backend, own_hints
from asynccomm.backends.registry import load_backend
from asynccomm.comm.connecting import connect_session
from asynccomm.comm.membership import Requirements, lobby_of, reconfigure
from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.pending import PendingComm
from asynccomm.comm.session import Session
from asynccomm.control.runs import MAX_NAME
from asynccomm.core.mailbox import Mailbox
from asynccomm.errors import ClosedError
from asynccomm.ops.validation import CommInfo, as_index
from asynccomm.options import check_bool, check_hints, check_name, duration, seconds
from asynccomm.rendezvous.job import CommIdentity, NameReservation

NETWORKS: Final = frozenset({"gloo", "hierarchical"})  # backends of ranks that may share memory in a host

Ranks = Sequence[SupportsIndex]


class Groups(CommBase):
    """Comms made from the ranks of this comm.

    A comm that was split off is independent: parent and child fail, are aborted and are closed separately, in any
    order, and can be used at the same time. The child uses the same device and options, and the same backend, except
    that the ranks of one host share memory if this comm's do not.

    After a loss the comm is broken. The remaining ranks call :meth:`shrink` and get a comm of the live ranks, with new
    numbers in the order of the old ones; its ``parent_ranks`` gives the old numbers. :meth:`reconfigure` also adds
    processes that wait in ``asynccomm.join_comm``. The old comm is closed when the new comm is connected. Comms that
    were split off the old comm are not affected; they go on, or shrink, by themselves.
    """

    @property
    def parent_ranks(self) -> tuple[int, ...]:
        """The number of each rank in the comm that this one was made from, -1 for newcomers; else ``0, 1, ...``."""
        return self._session.identity.parent_ranks

    @overload  # a list that the type checker knows to be empty
    def split(  # type: ignore[overload-overlap]
        self,
        ranks: Sequence[Never],
        name: str,
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[None]: ...

    @overload
    def split(
        self,
        ranks: Ranks,
        name: str,
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self]: ...

    def split(
        self,
        ranks: Ranks,
        name: str,
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Any]:
        """Make a comm of some ranks; ``await`` it, or better ``async with`` it. Only those ranks call this.

        ::

            async with comm.split([0, 2], "even") as even: ...

        Args:
            ranks: ranks of this comm, the same list on all of them, in the order of their new numbers. Empty: no comm.
            name: the same on all of them. The new comm is called ``f"{comm.name}/{name}"``, which must be unique among
                the open comms of this process; ranks outside ``ranks`` may use the name for another comm.
            hints: for the backend, in place of this comm's hints; None: this comm's hints.
            timeout: for connecting and for the operations; None: this comm's time limit.

        Returns: the new comm; None if ``ranks`` is empty, which type checkers see only where it is written as ``[]``.

        Raises:
            ValueError, TypeError: at the call, naming the argument; also if ``ranks`` does not have this rank.
            ClosedError, BrokenError: the error of this comm, at the call, or from awaiting if it breaks meanwhile.
            BackendError: from awaiting: the transport could not connect, or ranks did not call this, or passed another
                list of ranks, also the same ranks in another order; if a rank has closed this comm, in 2 seconds.
            AbortedError: from awaiting: another rank could not connect, or gave up.

        Cancelling the await is safe; the other ranks get an AbortedError. A split is identified by ``ranks``, ``name``
        and the number of earlier splits with both, so all of its ranks must have made the same number of such splits.
        """
        return self._split(distinct(self._group, "ranks", ranks), name, hints, timeout)

    def dup(
        self, name: str = "dup", *, hints: Mapping[str, str] | None = None, timeout: float | timedelta | None = None
    ) -> PendingComm[Self]:
        """Make another comm of the same ranks, with independent operations; see :meth:`split`."""
        return self._split(range(self._group.size), name, hints, timeout)  # type: ignore[return-value]  # never None

    def subgroups(
        self,
        group_size: SupportsIndex,
        name: str = "subgroups",
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self]:
        """Make comms of ``group_size`` consecutive ranks each; gives the comm of this rank. See :meth:`split`.

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
        """Make a comm of each list of ranks; gives the comm of this rank, or None. See :meth:`split`.

        Args:
            groups: lists without common ranks; a rank in none of the lists gets None.
        """
        if isinstance(groups, (str, bytes)) or not isinstance(groups, Sequence) or not groups:
            raise ValueError(f"groups must be a list of at least one list of ranks, got {groups!r}")
        mine: Sequence[int] = ()
        homes: dict[int, int] = {}  # the number of each rank's list
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
        name: str | None = None,
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self]:
        """Make a comm of the ranks on each node; gives the comm of this rank's node. See :meth:`split`.

        Ranks are on one node if their hosts have the same name; nodes may have different numbers of ranks. The ranks
        keep their order. They share memory if they can, with any backend of this comm. With :meth:`inter_node` the
        comms form a hierarchy, in which data for all ranks crosses the network once for each node; the backend
        "hierarchical" does so by itself.

        Args:
            name: of the comm; None: "intra_node", and "intra_node 2" for the second call.
        """
        hosts = self._hosts()
        mine = [rank for rank, host in enumerate(hosts) if host == hosts[self._group.rank]]
        return self._split_by_node(  # type: ignore[return-value]  # never None
            "intra_node", mine, name, hints, timeout, shares=True
        )

    def inter_node(
        self,
        name: str | None = None,
        *,
        hints: Mapping[str, str] | None = None,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self | None]:
        """Make a comm of the first rank on each node; gives None on all other ranks. See :meth:`split`.

        The ranks are the ranks 0 of :meth:`intra_node`, in the order of this comm.

        Args:
            name: of the comm; None: "inter_node", and "inter_node 2" for the second call.
        """
        hosts = self._hosts()
        firsts = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
        mine = firsts if self._group.rank in firsts else []
        return self._split_by_node("inter_node", mine, name, hints, timeout)

    def _split_by_node(
        self,
        kind: str,
        ranks: Sequence[int],
        name: str | None,
        hints: Mapping[str, str] | None,
        timeout: float | timedelta | None,
        *,
        shares: bool = False,
    ) -> PendingComm[Self | None]:
        """See :meth:`_split`; without a name, the comm has the next default name of its kind."""
        if name is not None:
            return self._split(ranks, name, hints, timeout, shares=shares)
        identity = self._session.identity
        made = self._split(ranks, identity.default_name(kind), hints, timeout, shares=shares)
        identity.take_default_name(kind)  # a refused call takes none
        return made

    def _hosts(self) -> list[str]:
        return [member.host for member in self._session.identity.members]

    def _split(
        self,
        ranks: Sequence[int],
        name: str,
        hints: Mapping[str, str] | None,
        timeout: float | timedelta | None,
        whole_name: str = "",
        *,
        shares: bool = False,
    ) -> PendingComm[Self | None]:
        """See :meth:`split`.

        Args:
            whole_name: the name of the new comm, in place of both; it need not be unique.
            shares: whether the ranks shall share memory if they can.
        """
        parent, group = self._session, self._group
        check_name(name)
        if ranks and group.rank not in ranks:
            raise ValueError(f"ranks must include this rank, {group.rank}, or be empty, got {list(ranks)}")
        backends = self._backends_for(ranks, shares=shares)
        options = parent.options
        if timeout is not None:
            options = replace(options, timeout=duration("timeout", timeout))
        if hints is not None:
            known = {key: text for backend in backends.values() for key, text in backend.hints.items()}
            checked = check_hints(hints, known, self._backend_name)
            for backend in backends.values():
                backend.check_hints(own_hints(backend, checked))
            options = replace(options, hints=checked)
        self._submitter.check_loop()
        if not ranks:
            return PendingComm(_no_comm)
        job = parent.identity.job
        world = (object(), group.rank) if whole_name else job.world
        reservation = NameReservation(world, whole_name or f"{group.name}/{name}")
        room = parent.identity.child_prefix(name, ranks)
        child = CommInfo(reservation.name, list(ranks).index(group.rank), len(ranks), group.device)
        called = [reservation]  # the await takes it, so a second await finds none

        async def connect() -> Self:
            self._submitter.check_loop()
            if not called:
                raise RuntimeError(f"this split of {child.name!r} was awaited before; call split() again")
            jobs = [parent.identity.job_ranks[rank] for rank in ranks]
            identity = CommIdentity(job, called.pop(), room, parent.identity.members_of(ranks), ranks, jobs)
            session = Session(child, options, Mailbox(parent.mailbox.loop), identity)
            await connect_session(session, backends, options.timeout, parent)
            return type(self)(session, session.backend_name)

        return PendingComm(connect)

    def _backends_for(self, ranks: Sequence[int], *, shares: bool) -> dict[str, type[Backend]]:
        """The backends that may connect ``ranks`` of this comm, in the order to try them.

        Args:
            shares: whether the ranks shall share memory if they can, even where all ranks of this comm are on one host.
        """
        name, hosts = self._backend_name, self._hosts()
        own = {name: type(self.unsafe_get_backend())}
        if name not in NETWORKS or not ranks:
            return own
        if len({hosts[rank] for rank in ranks}) == 1:
            here = shares or len(set(hosts)) > 1
            return {"shm": load_backend("shm", self._group.device)} | own if here else own
        return own if name == "gloo" else own | {"gloo": load_backend("gloo", self._group.device)}

    # -- going on in place of this comm --------------------------------------------------------------------------------

    def shrink(
        self,
        exclude: Sequence[SupportsIndex] = (),
        *,
        min_size: SupportsIndex = 1,
        quorum: bool = False,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self]:
        """Go on without the lost ranks; ``await`` it, or better ``async with`` it. All remaining ranks call this.

        ::

            try:
                await comm.all_reduce(tensor)
            except asynccomm.BrokenError:
                comm = await comm.shrink()

        The remaining ranks agree over the control channel, in any state of the transport, also when more ranks die
        during the agreement. On a comm that is not broken, the operations in flight are awaited first.

        Args:
            exclude: live ranks to leave out; they do not call this. The same on all ranks.
            min_size: go on with at least so many ranks. The same on all ranks.
            quorum: go on only with more than half of the ranks of this comm, or with half of them if they reach its
                store first. So of the parts of a comm that cannot reach each other, one at most goes on. The same on
                all ranks.
            timeout: seconds to wait for the live ranks to call this, too; None: the comm's time limit. Ranks that have
                not called by then are left out; ranks that do not answer at all (they are stopped) are left out at
                once.

        Raises:
            ValueError, TypeError: at the call, naming the argument; from awaiting, if ranks propose different members.
            ClosedError: this rank has closed the comm; also from awaiting, if the comm is closed meanwhile.
            LeftOutError: from awaiting: the other ranks went on without this rank.
            QuorumError: from awaiting: too few ranks are left for ``min_size`` or ``quorum``. Final, as cancelling is.
            BackendError: from awaiting: the members could not connect, in several attempts.
            RuntimeError: this rank has no control channel, or not all ranks have one; another task regroups the comm.

        After ValueError and BackendError the comm is unchanged, and all ranks may call again. Cancelling the await is
        safe and final: the other ranks go on without this rank, and calling again raises LeftOutError. Operations
        called on the old comm meanwhile may fail with AbortedError. On ranks that are left out the old comm is broken.
        """
        excluded = distinct(self._group, "exclude", exclude)
        if self.rank in excluded:
            raise ValueError(f"exclude must not have this rank, {self.rank}, got {list(exclude)!r}")
        return self._regroup([rank for rank in range(self.size) if rank not in excluded], min_size, quorum, timeout)

    def reconfigure(
        self,
        members: Sequence[SupportsIndex | str],
        *,
        min_size: SupportsIndex = 1,
        quorum: bool = False,
        timeout: float | timedelta | None = None,
    ) -> PendingComm[Self]:
        """Go on as a comm of ``members``, like :meth:`shrink`, but in any order and with newcomers.

        ::

            newcomers = await comm.newcomers() if comm.rank == 0 else None
            waiting = await comm.broadcast_object(newcomers, root=0, expect=list)
            if waiting:
                comm = await comm.reconfigure([*range(comm.size), *waiting])

        Args:
            members: ranks of this comm and names of newcomers (see :meth:`newcomers`), in the order of their new
                numbers, with this rank among them. The same on all ranks. Members that are lost or do not join are left
                out; newcomers, ten seconds after all ranks have called this.
            min_size, quorum, timeout: as for :meth:`shrink`; newcomers count for ``min_size``, not for ``quorum``.

        Raises: the errors of :meth:`shrink`; StoreError from awaiting, if newcomers cannot be invited.
        """
        if isinstance(members, (str, bytes)) or not isinstance(members, Sequence):
            raise ValueError(f"members must be a list of ranks and newcomers, got {members!r}")
        ranks = distinct(self._group, "members", [member for member in members if not isinstance(member, str)])
        if self.rank not in ranks:
            raise ValueError(f"members must have this rank, {self.rank}, got {list(members)!r}")
        names = [member for member in members if isinstance(member, str)]
        if len(set(names)) < len(names) or not all(0 < len(name) <= MAX_NAME for name in names):
            raise ValueError(f"members must be different newcomers, got {list(members)!r}")
        for name in names:
            check_name(name, "a newcomer in members")
        found = iter(ranks)
        return self._regroup([m if isinstance(m, str) else next(found) for m in members], min_size, quorum, timeout)

    async def newcomers(self) -> list[str]:
        """The names of the processes that wait in ``join_comm`` for a comm of this name, longest wait first.

        Each process is asked whether it still waits, which takes half a second if one does not answer. Not collective.
        Cancelling is safe. Raises: StoreError; ClosedError, BrokenError.
        """
        self._submitter.check_loop()
        self._submitter.check_open()
        return await lobby_of(self._session).waiting()

    def _regroup(
        self,
        proposal: Sequence[int | str],
        min_size: SupportsIndex,
        quorum: bool,
        timeout: float | timedelta | None,
    ) -> PendingComm[Self]:
        session = self._session
        least = as_index(min_size)
        if least is None or not 0 < least <= len(proposal):
            raise ValueError(f"min_size must be from 1 to the {len(proposal)} proposed members, got {min_size!r}")
        check_bool("quorum", quorum)
        requirements = Requirements(least, quorum)
        wait = seconds("timeout", timeout, session.options.timeout)
        self._check_regrouping()
        jobs = [each if isinstance(each, str) else session.identity.job_ranks[each] for each in proposal]

        async def connect() -> Self:
            self._check_regrouping()  # the state may have changed since the call
            new = await reconfigure(session, jobs, wait, requirements, [job for job in jobs if isinstance(job, str)])
            return type(self)(new, new.backend_name)

        return PendingComm(connect)

    def _check_regrouping(self) -> None:
        session, name = self._session, self.name
        self._submitter.check_loop()
        if isinstance(session.error, ClosedError):
            self._submitter.check_open()
        if session.closed:  # after it broke
            raise ClosedError(f"comm {name!r} is closed") from session.error
        if session.regrouping is not None:
            raise RuntimeError(f"comm {name!r} is being regrouped already, by another task")
        if (reason := self._why_fixed()) is not None:
            raise RuntimeError(reason)

    def _why_fixed(self) -> str | None:
        """The reason why the comm cannot be regrouped, a missing control channel here or on another rank; else None."""
        session = self._session
        channel = session.identity.job.channel
        if session.reporter is None or channel is None or session.backend is None:
            return f"comm {self.name!r} has no control channel on this rank, and cannot be regrouped"
        absent = [rank for rank, job in enumerate(session.identity.job_ranks) if job not in channel.topology.contacts]
        if absent:
            return f"ranks {absent} of comm {self.name!r} have no control channel: it cannot be regrouped"
        return None


async def _no_comm() -> None:
    """Gives None: there is no comm for this rank."""


def distinct(group: CommInfo, name: str, ranks: object) -> list[int]:
    """``ranks`` as a list of different integers. Raises ``ValueError`` naming the argument ``name``."""
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
