"""A comm goes on as another one: the remaining ranks agree on the members, and connect a new comm.

``control.membership.coordinator`` decides the members; this module is the part of each rank. The new comm is used only
when all its members have connected: until then any loss makes them agree again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

import anyio.to_thread

from asynccomm.comm.bootstrap import bootstrap
from asynccomm.comm.session import Session
from asynccomm.control.channel import ControlChannel
from asynccomm.control.membership.joiner import Joiner
from asynccomm.control.membership.messages import (
    Commit,
    CoordinatorOrder,
    Excluded,
    Prepare,
    Rejected,
    Retry,
    View,
    describe_many,
)
from asynccomm.control.runs import ParticipantId, Runs, distinct, expand
from asynccomm.control.timing import CONNECT_SECONDS
from asynccomm.control.transport.schema import dumps, loads
from asynccomm.core.tasks import cancel, detach, shielded
from asynccomm.errors import AsyncCommError, BackendError, ClosedError, LeftOutError, QuorumError
from asynccomm.ops.validation import CommInfo
from asynccomm.rendezvous.job import STORE_HOST_KEY
from asynccomm.rendezvous.lobby import Lobby
from asynccomm.rendezvous.spec import RendezvousSpec, rehost

STORE_SECONDS: Final = 1.0  # for a store to answer, else it counts as dead
CLOSE_SECONDS: Final = 2.0  # for the old comm to close; later it goes on closing in the background


@final
class _RankClient:
    """Lets a rank of the old comm take part in the agreement, over the control channel."""

    def __init__(self, channel: ControlChannel, key: str, ranks: Sequence[int]) -> None:
        self._channel = channel
        self._key = key
        self._ranks = list(ranks)
        self.has_asked: bool = False

    def ask(
        self, proposal: Sequence[ParticipantId] | None, wait: float, on_order: Callable[[CoordinatorOrder], object]
    ) -> None:
        self.has_asked = True
        self._call(lambda: self._channel.service.ask(self._key, self._ranks, proposal, wait, on_order))

    def prepared(self, decision: str) -> None:
        self._call(lambda: self._channel.service.prepared(self._key, decision))

    def failed(self, decision: str, why: str) -> None:
        self._call(lambda: self._channel.service.failed(self._key, decision, why))

    def withdraw(self) -> None:  # final
        self._call(lambda: self._channel.service.withdraw(self._key))

    def _call(self, call: Callable[[], object]) -> None:
        self._channel.call(call)


@final
@dataclass(frozen=True, slots=True)
class Requirements:
    """Conditions on the members of the new comm."""

    min_size: int = 1  #: number of members
    quorum: bool = False  #: more than half of the old comm's ranks; or half of them, with the store


MembershipClient = _RankClient | Joiner  # a participant in the agreement; see ``control.membership.service``


async def await_commit(
    client: MembershipClient,
    proposal: Sequence[ParticipantId] | None,
    wait: float,
    form: Callable[[View], Awaitable[Session]],
    name: str,
    note: str = "",
) -> Session:
    """Propose members, and connect each decision, until one is committed. Cancelling gives up for good.

    Args:
        proposal: the members in the order of their new ranks; None: all.
        wait: seconds to wait for the proposals of other ranks.
        form: connects the members of a decision. Raises LeftOutError if other ranks go on in place of the comm,
            QuorumError if the decision has too few members.
        name: the name of the comm, for errors.
        note: explains the rank numbers in errors, where they are not the comm's.

    Raises: ValueError: the ranks propose different things; LeftOutError; QuorumError; BackendError: they could not
    connect.
    """
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[CoordinatorOrder | LeftOutError | QuorumError] = asyncio.Queue()

    def on_order(order: CoordinatorOrder) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            loop.call_soon_threadsafe(orders.put_nowait, order)

    attempt: _JoinAttempt | None = None
    asking = True
    client.ask(proposal, wait, on_order)
    try:
        while True:
            match await orders.get():
                case Prepare(decision):
                    attempt = _JoinAttempt(client, decision, form, orders.put_nowait)
                case Retry():
                    if attempt is not None:
                        await attempt.drop()
                        attempt = None
                case Commit():
                    assert attempt is not None
                    return attempt.session
                case Rejected(_, why, mistake):
                    asking = False  # this rank may call again
                    if mistake:
                        raise ValueError(f"the ranks of comm {name!r} must propose the same members: {why}{note}")
                    raise BackendError(f"comm {name!r} cannot go on: {why}{note}")
                case Excluded(why):
                    asking = False
                    raise LeftOutError(name, f"{why}{note}")
                case LeftOutError(reason=why):
                    raise LeftOutError(name, f"{why}{note}")
                case QuorumError() as error:
                    raise error
                case _:
                    pass
    except BaseException:
        if asking:
            client.withdraw()
        if attempt is not None:
            await attempt.drop()
            attempt = None  # the error keeps this frame alive, and with it the store that the attempt may host
        raise


@final
class _JoinAttempt:
    """Connects the members of a decision; calls ``give_up`` if this rank must not go on."""

    def __init__(
        self,
        client: MembershipClient,
        decision: View,
        form: Callable[[View], Awaitable[Session]],
        give_up: Callable[[LeftOutError | QuorumError], object],
    ) -> None:
        self._client, self._decision, self._form, self._give_up = client, decision, form, give_up
        self._session: Session | None = None
        self._dropping: asyncio.Task[None] | None = None
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            self._session = await self._form(self._decision)
        except (LeftOutError, QuorumError) as exc:
            self._give_up(exc)
        except Exception as exc:  # after any error: the other ranks must not wait for this one
            self._client.failed(self._decision.key, f"{type(exc).__name__}: {exc}")
        else:
            self._client.prepared(self._decision.key)

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    async def drop(self) -> None:
        """Undo the attempt. After a cancellation the clean-up goes on; ``drop`` may be called again."""
        if self._dropping is None:
            self._dropping = detach(asyncio.ensure_future(self._drop()))
        await asyncio.shield(self._dropping)

    async def _drop(self) -> None:
        await cancel(self._task)
        if self._session is not None:
            await _drop(self._session)


async def reconfigure(
    session: Session,
    proposal: Sequence[ParticipantId],
    wait: float,
    requirements: Requirements,
    invite: Sequence[str] = (),
) -> Session:
    """Connect a comm of the members in ``proposal`` that take part, and close the old comm. One call at a time.

    Args:
        proposal: job ranks of members of the old comm, and names of newcomers, in the order of their new ranks.
        wait: seconds for them to propose, too.
        requirements: of the members.
        invite: the newcomers in ``proposal``.
    """
    identity = session.identity
    assert identity.job.channel is not None
    client = _RankClient(identity.job.channel, identity.key, identity.job_ranks)
    task = asyncio.ensure_future(_regroup(session, client, proposal, wait, requirements, invite))
    detach(task)
    session.regrouping = task  # closing the comm meanwhile cancels the task
    try:
        await asyncio.wait([task])
        if task.cancelled():
            raise ClosedError(f"comm {session.group.name!r} was closed while it was regrouped")
        return task.result()
    except asyncio.CancelledError:
        await cancel(task)
        if not client.has_asked:
            client.withdraw()  # the other ranks must not wait for this one
        if not task.cancelled() and task.exception() is None:
            await _drop(task.result())
        raise
    finally:
        session.regrouping = None


async def _regroup(
    session: Session,
    client: _RankClient,
    proposal: Sequence[ParticipantId],
    wait: float,
    requirements: Requirements,
    invite: Sequence[str],
) -> Session:
    identity = session.identity
    job, channel = identity.job, identity.job.channel
    origin = job.origin
    assert channel is not None
    assert origin is not None
    assert session.backend is not None
    backends = session.candidates  # members on other hosts, or none on other hosts, may need another one
    group, options = session.group, replace(session.options, hints=session.hints)
    ranks = {job: rank for rank, job in enumerate(identity.job_ranks)}
    if invite:
        await lobby_of(session).invite(invite, session.invitation())
    await session.wait_idle()

    async def form(decision: View) -> Session:
        me = decision.members.index(channel.rank)
        await _check(session, decision, requirements)
        place = await _place(session, decision, origin.place)
        identity.free_name()
        return await bootstrap(
            replace(place, rank=me, size=len(decision.members), scope=run_prefix(place, decision)),
            CommInfo(group.name, me, len(decision.members), group.device),
            " or ".join(backends),
            backends,
            options,
            origin=replace(origin, place=place),
            parent_ranks=[ranks[member] if isinstance(member, int) else -1 for member in decision.members],
            limit=min(options.timeout, CONNECT_SECONDS),
        )

    note = "" if list(ranks) == list(ranks.values()) else f" (where its ranks are called {list(ranks)})"
    try:
        new = await await_commit(client, proposal, wait, form, group.name, note)
    except BaseException:
        if not session.closed:
            identity.reserve_again()
        raise
    session.regrouping = None
    try:
        await _give_way(session, new)
    except asyncio.CancelledError:
        await shielded(_drop(new))
        raise
    return new


async def _give_way(session: Session, new: Session) -> None:
    """Close ``session``, which ``new`` replaces."""
    assert session.reporter is not None
    identity, new_members = session.identity, new.identity.parent_ranks
    session.submitter.watchers.regrouped(new_members)
    session.reporter.followers = [identity.job_ranks[rank] for rank in new_members if rank >= 0]
    identity.job.left_out |= {*identity.job_ranks} - {*session.reporter.followers}
    identity.successor = new.identity.job
    session.retire()
    closing = asyncio.ensure_future(session.aclose())
    detach(closing)
    await asyncio.wait([closing], timeout=CLOSE_SECONDS)


async def _drop(session: Session) -> None:
    """End the new comm of an attempt that failed."""
    session.abort("its members have changed before it began")
    await session.aclose()


def lobby_of(session: Session) -> Lobby:
    """The lobby for newcomers to the comm."""
    job = session.identity.job
    assert job.origin is not None
    return Lobby(job.store.prefix(job.origin.place.scope), session.group.name)


def run_prefix(place: RendezvousSpec, decision: View) -> str:
    """The prefix of the store keys of the decided comm."""
    return f"{place.scope}/{decision.key}"


async def _place(session: Session, decision: View, place: RendezvousSpec) -> RendezvousSpec:
    """The rendezvous of the members: the old store if it survives, else a store that the first member hosts."""
    reporter, channel = session.reporter, session.identity.job.channel
    assert reporter is not None
    assert channel is not None
    first = next(member for member in decision.members if isinstance(member, int))
    if first != channel.rank:
        address = await reporter.receive_store(decision.key)
        if address is None:
            return place
        return replace(place, store=None, path=None, host=address[0], port=address[1], hosting=False, server=None)
    address = None
    if await _survives(session, decision):
        await _reservation(session, decision)
    else:
        contact = channel.topology.contacts[channel.rank]
        place = await anyio.to_thread.run_sync(partial(rehost, place, contact.address or "127.0.0.1"))
        address = [place.host, place.port]
    reporter.send_store(decision.key, address)
    return place


async def _check(session: Session, decision: View, requirements: Requirements) -> None:
    """Raise QuorumError if the decision has too few members. Every member checks, and none goes on without all."""
    name, size, members = session.group.name, session.group.size, decision.members
    if len(members) < requirements.min_size:
        raise QuorumError(name, len(members), size, f"min_size is {requirements.min_size}")
    if not requirements.quorum:
        return
    left = sum(isinstance(member, int) for member in members)
    if 2 * left < size:
        raise QuorumError(name, left, size, "quorum=True demands half of them")
    if 2 * left == size:
        if not await _survives(session, decision):
            raise QuorumError(name, left, size, "quorum=True demands more than half of them where the store is gone")
        await _reservation(session, decision)


async def _reservation(session: Session, decision: View) -> None:
    """Record the members in the store; then only a decision that shares a member with them may go on.

    So two parts of the comm that cannot reach each other do not both go on, while the store lives.

    Raises: LeftOutError: other ranks have recorded their decision first.
    """
    room, key = session.identity.job.room, f"followed/{session.identity.key}"
    ours, found = dumps(decision.listed).encode(), b""
    while (before := found) != ours:
        found = await room.compare_set(key, before, ours)
        if found != ours and distinct(decision.listed).isdisjoint(members := expand(loads(Runs, found))):
            raise LeftOutError(session.group.name, f"the comm goes on as {describe_many(members)}")


async def _survives(session: Session, decision: View) -> bool:
    """Whether the store answers, and lives as long as the members need it."""
    room = session.identity.job.room
    try:
        async with asyncio.timeout(STORE_SECONDS):
            if not await room.check([STORE_HOST_KEY]):
                return True
            host = int(await room.get(STORE_HOST_KEY, STORE_SECONDS))
    except (AsyncCommError, OSError):  # TimeoutError is an OSError
        return False
    # newcomers know no other store
    return host in decision.members or not all(isinstance(member, int) for member in decision.members)
