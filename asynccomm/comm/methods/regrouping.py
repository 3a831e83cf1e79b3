"""Going on after a loss, and with ranks that come in later."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Self, SupportsIndex

from asynccomm.comm.membership import lobby_of, reconfigure
from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.methods.groups import distinct
from asynccomm.comm.pending import PendingComm
from asynccomm.control.membership.messages import MAX_NAME
from asynccomm.errors import ClosedError
from asynccomm.options import seconds


class Regrouping(CommBase):
    """Comms that go on in place of this one.

    After a loss the comm is broken. The ranks that are left call :meth:`shrink` and get a comm of those that are alive,
    with new ranks in the order of the old ones; its ``parent_ranks`` says what they were. :meth:`reconfigure` also
    takes in processes that wait in ``asynccomm.join_comm``. The old comm is closed when the new one is there. Comms
    that were split off it are not touched; they go on, or shrink, by themselves.
    """

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
