"""How a comm goes on as another one: the ranks that are left agree who they are, and connect anew.

What they agree on, and how, is ``control.quorum``; here is what each of them does about it. A comm that was agreed on
is used only when all its members have connected: until then any loss makes them agree again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, final

import anyio.to_thread

from asynccomm.assembly import assemble
from asynccomm.checks import Group
from asynccomm.control.ballots import Again, Committed, Decided, Decision, LeftOut, Order, Refused, Who, listed
from asynccomm.control.channel import Channel
from asynccomm.errors import AsyncCommError, BackendError, ClosedError, LeftOutError, StoreError
from asynccomm.session import Session
from asynccomm.store.rendezvous import Place, host_anew

__all__ = ["CONNECT_SECONDS", "Voter", "go_on", "regroup", "scope_of"]

STORE_SECONDS: Final = 1.0  # for a store to answer, or it counts as dead
CONNECT_SECONDS: Final = 20.0  # for the members to connect, once they are agreed on
CLOSE_SECONDS: Final = 2.0  # for the old comm to close, before that goes on by itself

WENT_ON: Final = "went-on"  # key in a comm's room: who goes on in its place

_background: set[asyncio.Task[None]] = set()


class Voter(Protocol):
    """A participant in the agreement; see ``control.elections``."""

    def ask(self, proposal: Sequence[Who] | None, wait: float, hear: Callable[[Order], object]) -> None: ...
    def prepared(self, decision: str) -> None: ...
    def failed(self, decision: str, why: str) -> None: ...
    def give_up(self) -> None: ...


@final
class _Rank:
    """A rank of the comm that is left behind, as a voter."""

    def __init__(self, channel: Channel, key: str, ranks: Sequence[int]) -> None:
        self._channel = channel
        self._key = key
        self._ranks = list(ranks)

    def ask(self, proposal: Sequence[Who] | None, wait: float, hear: Callable[[Order], object]) -> None:
        self._call(lambda: self._channel.elections.ask(self._key, self._ranks, proposal, wait, hear))

    def prepared(self, decision: str) -> None:
        self._call(lambda: self._channel.elections.prepared(self._key, decision))

    def failed(self, decision: str, why: str) -> None:
        self._call(lambda: self._channel.elections.failed(self._key, decision, why))

    def give_up(self) -> None:
        self._call(lambda: self._channel.elections.give_up(self._key))

    def _call(self, call: Callable[[], object]) -> None:
        self._channel.call(call)


async def go_on(
    voter: Voter,
    proposal: Sequence[Who] | None,
    wait: float,
    form: Callable[[Decision], Awaitable[Session]],
    name: str,
) -> Session:
    """Ask, and form what is decided, until a decision is committed.

    Args:
        proposal: in the order of the new ranks; None: all.
        wait: seconds to wait for others to ask.
        form: connects the members of a decision.
        name: of the comm, for errors.

    Raises: ValueError: the ranks propose different things; LeftOutError; BackendError: they could not connect.
    """
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[Order] = asyncio.Queue()

    def hear(order: Order) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            loop.call_soon_threadsafe(orders.put_nowait, order)

    attempt: _Attempt | None = None
    voter.ask(proposal, wait, hear)
    try:
        while True:
            match await orders.get():
                case Decided(decision):
                    attempt = _Attempt(voter, decision, form)
                case Again():
                    if attempt is not None:
                        if attempt.left_out is not None:
                            raise attempt.left_out
                        await attempt.drop()
                        attempt = None
                case Committed():
                    assert attempt is not None
                    return attempt.session
                case Refused(_, why, mistake):
                    if mistake:
                        raise ValueError(f"the ranks of comm {name!r} must propose the same members: {why}")
                    raise BackendError(f"comm {name!r} cannot go on: {why}")
                case LeftOut(why):
                    raise LeftOutError(name, why)
                case _:
                    pass
    except BaseException:
        voter.give_up()
        if attempt is not None:
            await asyncio.shield(attempt.drop())
        raise


@final
class _Attempt:
    """The members of a decision connect."""

    def __init__(self, voter: Voter, decision: Decision, form: Callable[[Decision], Awaitable[Session]]) -> None:
        self._session: Session | None = None
        self.left_out: LeftOutError | None = None  #: what this rank has found out while it connected
        self._task = asyncio.ensure_future(self._run(voter, decision, form))

    async def _run(self, voter: Voter, decision: Decision, form: Callable[[Decision], Awaitable[Session]]) -> None:
        try:
            self._session = await form(decision)
        except (AsyncCommError, OSError, ValueError, RuntimeError) as exc:
            if isinstance(exc, LeftOutError):
                self.left_out = exc
            voter.failed(decision.key, f"{type(exc).__name__}: {exc}")
        else:
            voter.prepared(decision.key)

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    async def drop(self) -> None:
        """It is not to be."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._session is not None:
            self._session.abort("its members have changed before it began")
            await self._session.aclose()


async def regroup(session: Session, proposal: Sequence[Who] | None, wait: float) -> Session:
    """Go on as a comm of ``proposal``, as far as these come; closes the old one.

    Args:
        proposal: ranks of the old comm as the job calls them, and newcomers, in the order of their new ranks.
        wait: seconds for them to ask, too.
    """
    seat = session.seat
    channel, origin = seat.family.channel, seat.family.origin
    assert channel is not None
    assert origin is not None
    assert session.backend is not None
    backends = {session.backend_name: type(session.backend)}
    group, options = session.group, session.options
    await session.come_to_rest()
    members: tuple[Who, ...] = ()

    async def form(decision: Decision) -> Session:
        nonlocal members
        members = decision.members
        seat.free_name()
        me = decision.members.index(channel.rank)
        place = await _place(session, decision, origin.place)
        ranks = {job: rank for rank, job in enumerate(seat.job_ranks)}
        return await assemble(
            replace(place, rank=me, size=len(decision.members), scope=scope_of(origin.place, decision)),
            Group(group.name, me, len(decision.members), group.device),
            session.backend_name,
            backends,
            options,
            origin=origin,
            parent_ranks=[ranks[who] if isinstance(who, int) else -1 for who in decision.members],
            limit=min(options.timeout, CONNECT_SECONDS),
        )

    new = await go_on(_Rank(channel, seat.key, seat.job_ranks), proposal, wait, form, group.name)
    assert session.reporter is not None
    session.reporter.succeeded = True
    await _leave_word(session, members)
    closing = asyncio.ensure_future(session.aclose())
    _background.add(closing)
    closing.add_done_callback(_background.discard)
    await asyncio.wait([closing], timeout=CLOSE_SECONDS)
    return new


def scope_of(place: Place, decision: Decision) -> str:
    """Prefix of the keys of what was decided."""
    return f"{place.scope}/{decision.key}"


async def _leave_word(session: Session, members: Sequence[Who]) -> None:
    """Say in the store who goes on, before the control channel of the old comm is closed.

    A rank that was stopped until then finds nobody there, and would take all others for lost and go on alone.
    """
    with contextlib.suppress(AsyncCommError, TimeoutError):
        async with asyncio.timeout(STORE_SECONDS):
            await session.seat.room.set(WENT_ON, json.dumps(members))
            await session.seat.room.check([WENT_ON])  # a reply: the server has it


async def _place(session: Session, decision: Decision, place: Place) -> Place:
    """Where the members meet: at the old store if that is alive, else at one that the first of them hosts."""
    reporter, channel = session.reporter, session.seat.family.channel
    assert reporter is not None
    assert channel is not None
    first = next(who for who in decision.members if isinstance(who, int))
    if first != channel.rank:
        address = (await reporter.heard_of(decision.key))["store"]
        if address is None:
            return place
        return replace(place, store=None, path=None, host=address[0], port=address[1], hosting=False)
    address = None
    room = session.seat.room
    try:
        async with asyncio.timeout(STORE_SECONDS):
            others = json.loads(await room.get(WENT_ON)) if await room.check([WENT_ON]) else [channel.rank]
        if channel.rank not in others:
            raise LeftOutError(session.group.name, f"the comm went on as {listed(others)} while it did not answer")
    except (StoreError, ClosedError, TimeoutError):
        contact = channel.roster.contacts[channel.rank]
        place = await anyio.to_thread.run_sync(partial(host_anew, place, contact.address or "127.0.0.1"))
        address = [place.host, place.port]
    reporter.say({"kind": "meet", "key": decision.key, "store": address})
    return place
