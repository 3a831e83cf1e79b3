"""Going on as another comm: who is in it, what becomes of the old one, and what happens when anything goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from asynccomm import (
    AbortedError,
    BackendError,
    BrokenError,
    ClosedError,
    Comm,
    LeftOutError,
    MemoryStore,
    PeerLostError,
    QuorumError,
    new_comm,
)
from asynccomm.comm import membership as regrouping_module
from asynccomm.comm.bootstrap import bootstrap
from asynccomm.comm.membership import await_commit
from asynccomm.control.channel import ControlChannel
from asynccomm.control.membership.messages import (
    Commit,
    CoordinatorOrder,
    Excluded,
    Prepare,
    Rejected,
    Retry,
    View,
)
from asynccomm.control.runs import ParticipantId
from asynccomm.core.hosts import PRETENDED
from asynccomm.rendezvous import job as family_module
from asynccomm.store.server import listen, serve
from asynccomm.testing.local import loopback_world
from tests.forkserver import Nursery
from tests.sampling import amount
from tests.waiting import until

LIMIT = 20.0


@pytest.fixture(autouse=True)
def without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        monkeypatch.delenv(name)


async def together(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """What all of them give, errors too."""
    async with asyncio.timeout(LIMIT):
        return await asyncio.gather(*calls, return_exceptions=True)


def die(comm: Comm) -> None:
    """End a rank as seen by the others: its connections end without a word."""
    channel = comm._session.identity.job.channel
    assert channel is not None
    channel.call(channel._begin_closing)


async def lost(comms: Sequence[Comm], rank: int) -> None:
    """Kill a rank, and wait until the others know."""
    die(comms[rank])
    others = [comm for comm in comms if comm.rank != rank]
    await until(lambda: all(comm._session.error is not None or gone(comm, rank) for comm in others))


def gone(comm: Comm, rank: int) -> bool:
    channel = comm._session.identity.job.channel
    return channel is not None and rank in channel.gone


async def shrunk(comms: Sequence[Comm], **arguments: Any) -> list[Comm]:
    found = await together([comm.shrink(**arguments) for comm in comms])
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


async def check(comms: Sequence[Comm]) -> None:
    """They make up a comm, and it works."""
    assert [comm.rank for comm in comms] == list(range(len(comms)))
    assert {comm.size for comm in comms} == {len(comms)}
    tensors = [torch.tensor([float(comm.rank + 1)]) for comm in comms]
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*(comm.all_reduce(t) for comm, t in zip(comms, tensors, strict=True)))
    assert {t.item() for t in tensors} == {len(comms) * (len(comms) + 1) / 2}


async def close(comms: Sequence[Comm]) -> None:
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*(comm.aclose() for comm in comms))


# -- asking and forming -----------------------------------------------------------------------------------------------


class Voter:
    """Takes notes."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.hear: Callable[[CoordinatorOrder], object] = lambda order: None

    def ask(
        self, proposal: Sequence[ParticipantId] | None, wait: float, hear: Callable[[CoordinatorOrder], object]
    ) -> None:
        self.said.append(f"ask {proposal} {wait:g}")
        self.hear = hear

    def prepared(self, decision: str) -> None:
        self.said.append(f"prepared {decision}")

    def failed(self, decision: str, why: str) -> None:
        self.said.append(f"failed {decision} {why}")

    def withdraw(self) -> None:
        self.said.append("give up")


class Formed:
    """Stands for a session."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def abort(self, reason: str) -> None:
        self.ended.append(reason)

    async def aclose(self) -> None:
        self.ended.append("closed")


DROPPED = ["its members have changed before it began", "closed"]


def decided(key: str) -> Prepare:
    return Prepare(View(key, 0, 0, (0, 1)))


async def test_the_committed_session_is_returned() -> None:
    client, formed = Voter(), Formed()

    async def form(decision: View) -> Any:
        return formed

    going = asyncio.ensure_future(await_commit(client, [0, 1], 3.0, form, "c"))
    await until(lambda: bool(client.said))
    client.hear(decided("k"))
    await until(lambda: "prepared k" in client.said)
    client.hear(Commit("k"))
    assert await going is formed
    assert client.said == ["ask [0, 1] 3", "prepared k"]
    assert formed.ended == []


async def test_an_attempt_that_is_over_is_dropped_and_the_next_one_made() -> None:
    client, all_formed = Voter(), [Formed(), Formed()]
    left = iter(all_formed)

    async def form(decision: View) -> Any:
        return next(left)

    going = asyncio.ensure_future(await_commit(client, None, 3.0, form, "c"))
    await until(lambda: bool(client.said))
    client.hear(decided("a"))
    await until(lambda: "prepared a" in client.said)
    client.hear(Retry("a", 1, "rank 1 was lost"))
    await until(lambda: all_formed[0].ended == DROPPED)
    client.hear(decided("b"))
    await until(lambda: "prepared b" in client.said)
    client.hear(Commit("b"))
    assert await going is all_formed[1]


async def test_an_attempt_that_still_connects_is_cancelled() -> None:
    client, cancelled = Voter(), []

    async def form(decision: View) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(decision.key)
            raise

    going = asyncio.ensure_future(await_commit(client, None, 3.0, form, "c"))
    await until(lambda: bool(client.said))
    client.hear(decided("a"))
    await asyncio.sleep(0)
    client.hear(Retry("a", 1, "rank 1 was lost"))
    await until(lambda: cancelled == ["a"])
    client.hear(Excluded("the others were quicker"))
    with pytest.raises(LeftOutError, match="comm 'c' goes on without this rank: the others were quicker"):
        await going
    assert client.said == ["ask None 3"]


@pytest.mark.parametrize(
    "error", [BackendError("no route"), OSError("no route"), KeyError("no route"), AssertionError("no route")]
)
async def test_any_failure_is_reported_to_the_other_ranks(error: Exception) -> None:
    client = Voter()

    async def form(decision: View) -> Any:
        raise error

    going = asyncio.ensure_future(await_commit(client, None, 3.0, form, "c"))
    await until(lambda: bool(client.said))
    client.hear(decided("a"))
    await until(lambda: len(client.said) == 2)
    assert client.said[1].startswith(f"failed a {type(error).__name__}: ")
    assert "no route" in client.said[1]
    client.hear(Retry("a", 1, "no route"))
    client.hear(Rejected(1, "[0, 1] could not connect: no route", False))
    with pytest.raises(BackendError, match=r"comm 'c' cannot go on: \[0, 1\] could not connect: no route"):
        await going
    assert "give up" not in client.said  # it may call again


async def test_a_mistake_is_a_value_error_and_not_final() -> None:
    client = Voter()
    going = asyncio.ensure_future(await_commit(client, None, 3.0, _never, "c", " (as the job calls them)"))
    await until(lambda: bool(client.said))
    client.hear(Rejected(0, "rank 0 proposes [0], rank 1 proposes [1]", True))
    with pytest.raises(ValueError, match=r"comm 'c' must propose the same .* \[1\] \(as the job calls them\)"):
        await going
    assert client.said == ["ask None 3"]


async def _never(decision: View) -> Any:
    raise AssertionError


async def test_the_error_keeps_nothing_of_an_attempt() -> None:
    client, made = Voter(), []

    class Place:
        """May host a store."""

    async def form(decision: View) -> Any:
        place = Place()
        made.append(weakref.ref(place))
        await asyncio.Event().wait()

    going = asyncio.ensure_future(await_commit(client, None, 1, form, "main"))
    await until(lambda: bool(client.said))
    client.hear(decided("a"))
    await until(lambda: bool(made))
    client.hear(Excluded("they were faster"))
    with pytest.raises(LeftOutError, match="they were faster") as caught:
        await going
    gc.collect()
    assert made[0]() is None
    assert caught.value.comm == "main"


@pytest.mark.parametrize("prepared", [False, True])
async def test_cancelling_gives_up_and_leaves_nothing(prepared: bool) -> None:
    client, formed, entered = Voter(), Formed(), asyncio.Event()

    async def form(decision: View) -> Any:
        entered.set()
        if not prepared:
            await asyncio.Event().wait()
        return formed

    going = asyncio.ensure_future(await_commit(client, None, 3.0, form, "c"))
    await until(lambda: bool(client.said))
    client.hear(decided("a"))
    await entered.wait()
    await until(lambda: not prepared or "prepared a" in client.said)
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    assert client.said[-1] == "give up"
    assert formed.ended == (DROPPED if prepared else [])


# -- who goes on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_the_others_go_on(dead: int) -> None:
    async with loopback_world(3) as comms:
        await lost(comms, dead)
        left = [comm for comm in comms if comm.rank != dead]
        await until(lambda: all(isinstance(comm._session.error, PeerLostError) for comm in left))
        new = await shrunk(left)
        assert {comm.parent_ranks for comm in new} == {tuple(comm.rank for comm in left)}
        assert {comm.name for comm in new} == {"test"}
        await check(new)
        for comm in left:
            with pytest.raises(ClosedError):
                comm.barrier()
            with pytest.raises(ClosedError, match="comm 'test' is closed"):
                comm.shrink()
        await close(new)


async def test_two_die_at_once() -> None:
    async with loopback_world(4) as comms:
        die(comms[0])
        die(comms[2])
        new = await shrunk([comms[1], comms[3]])
        assert new[0].parent_ranks == (1, 3)
        await check(new)
        await close(new)


async def test_one_dies_after_the_other_until_one_is_left() -> None:
    async with loopback_world(4) as comms:
        left: Sequence[Comm] = comms
        for size in (3, 2, 1):
            await lost(left, 0)
            old = left
            left = await shrunk(left[1:])
            assert {comm.size for comm in left} == {size}
            assert left[0].parent_ranks == tuple(range(1, size + 1))
            await check(left)
            await close(old)
        left = await shrunk(left)  # alone
        assert left[0].parent_ranks == (0,)
        await check(left)
        await close(left)


async def test_shrinking_without_a_loss() -> None:
    async with loopback_world(3) as comms:
        for _ in range(3):
            new = await shrunk(comms)
            assert new[0].parent_ranks == (0, 1, 2)
            await check(new)
            await close(comms)
            comms = new
        await close(comms)


async def test_a_rank_dies_while_the_others_agree() -> None:
    async with loopback_world(3) as comms:
        calls = [asyncio.ensure_future(_await(comm.shrink())) for comm in comms[:2]]  # which wait for the third
        await until(lambda: all(_asking(comm) for comm in comms[:2]))
        die(comms[2])
        new = await together(calls)
        await check(new)
        await close(new)


def _asking(comm: Comm) -> bool:
    channel, key = comm._session.identity.job.channel, comm._session.identity.key
    return channel is not None and key in channel.service._participations


async def _await(connecting: Awaitable[Any]) -> Any:
    return await connecting


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_a_rank_dies_while_they_connect(monkeypatch: pytest.MonkeyPatch, dead: int) -> None:
    attempts: list[int] = []

    async def dying(place: Any, group: Any, *arguments: Any, **more: Any) -> Any:
        attempts.append(group.size)
        if group.size == 3 and group.rank == dead:
            die(comms[dead])
            await asyncio.Event().wait()
        return await bootstrap(place, group, *arguments, **more)

    monkeypatch.setattr(regrouping_module, "bootstrap", dying)
    async with loopback_world(3) as comms:
        calls = [asyncio.ensure_future(_await(comm.shrink())) for comm in comms]
        left = [calls[rank] for rank in range(3) if rank != dead]
        new = await together(left)
        assert attempts in ([3, 3, 3, 2, 2], [3, 3, 2, 2])  # who hears of the death first may not begin
        await check(new)
        calls[dead].cancel()
        await asyncio.wait([calls[dead]])
        await close(new)


async def test_a_rank_that_cannot_connect_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 2

    async def failing(place: Any, group: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal failures
        if group.rank == 1 and failures:
            failures -= 1
            raise BackendError("not now")
        return await bootstrap(place, group, *arguments, **more)

    monkeypatch.setattr(regrouping_module, "bootstrap", failing)
    async with loopback_world(2) as comms:
        new = await shrunk(comms)
        assert failures == 0
        await check(new)
        await close(new)


async def test_ranks_that_cannot_connect_get_an_error_and_keep_the_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = True

    async def failing(place: Any, group: Any, *arguments: Any, **more: Any) -> Any:
        if broken and group.rank == 1:
            raise BackendError("no route")
        return await bootstrap(place, group, *arguments, **more)

    monkeypatch.setattr(regrouping_module, "bootstrap", failing)
    async with loopback_world(2) as comms:
        for error in await together([comm.shrink() for comm in comms]):
            assert isinstance(error, BackendError)
            assert "comm 'test' cannot go on: [0, 1] could not connect: BackendError: no route" in str(error)
        await check(comms)  # as it was
        with pytest.raises(ValueError, match="name 'test' is in use"):
            await new_comm("loopback", name="test", store=comms[0]._session.identity.job.store, rank=0, size=2)
        broken = False
        new = await shrunk(comms)
        await check(new)
        await close(new)


async def test_different_proposals_fail_on_all_ranks_and_may_be_repeated() -> None:
    async with loopback_world(3) as comms:
        for _ in range(2):
            errors = await together([comm.shrink([2] if comm.rank == 0 else []) for comm in comms])
            assert [type(error) for error in errors] == [ValueError] * 3
            said = r"rank 0 proposes \[0, 1\], rank [12] proposes \[0, 1, 2\]|rank [12] proposes \[0, 1, 2\], rank 0 "
            assert re.search(said, str(errors[0])), errors[0]
        await check(comms)
        new = await shrunk(comms)
        await check(new)
        await close(new)


async def test_an_excluded_rank_gets_an_error() -> None:
    async with loopback_world(3) as comms:
        waiting = comms[2].recv(torch.zeros(1), 0)
        new = await shrunk(comms[:2], exclude=[2])
        await check(new)
        with pytest.raises(AbortedError, match=r"ranks \[0, 1\] go on as another comm, without this rank"):
            await waiting
        with pytest.raises(LeftOutError, match=r"ranks \[0, 1\] have gone on"):
            await comms[2].shrink()
        with pytest.raises(LeftOutError):  # whenever it asks
            await comms[2].shrink()
        await close(new)


async def test_a_late_rank_is_left_out_and_gets_an_error() -> None:
    async with loopback_world(3) as comms:
        new = await shrunk(comms[1:], timeout=0.2)
        assert new[0].parent_ranks == (1, 2)
        await check(new)
        with pytest.raises(LeftOutError):
            await comms[0].shrink()
        await close(new)


async def test_a_rank_that_does_not_reply_is_left_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(3) as comms:
        _stop(comms, 2, monkeypatch)
        new = await shrunk(comms[:2], timeout=60)
        await check(new)
        with pytest.raises(LeftOutError):
            await comms[2].shrink()
        await close(new)


async def test_a_root_that_does_not_answer_does_not_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(3) as comms:
        _stop(comms, 0, monkeypatch)
        new = await shrunk(comms[1:], timeout=60)
        await check(new)
        await until(lambda: isinstance(comms[0]._session.error, PeerLostError))
        with pytest.raises(LeftOutError, match="it was silent"):
            await comms[0].shrink()
        await close(new)


@pytest.mark.parametrize("alone_first", [False, True])
async def test_ranks_cut_off_from_each_other_do_not_all_go_on(alone_first: bool) -> None:
    async with loopback_world(3) as comms:
        channel = comms[2]._session.identity.job.channel
        assert channel is not None
        channel.call(partial(_cut_off, channel))
        await until(lambda: all(gone(comm, 2) for comm in comms[:2]) and gone(comms[2], 0) and gone(comms[2], 1))
        parts = [comms[2:], comms[:2]] if alone_first else [comms[:2], comms[2:]]
        new = await shrunk(parts[0])
        await check(new)
        errors = await together([comm.shrink() for comm in parts[1]])
        names = r"\[2\]" if alone_first else r"\[0, 1\]"
        for error in errors:
            with pytest.raises(LeftOutError, match=f"goes on without this rank: the comm goes on as {names}"):
                raise error
        await close(new)


async def test_a_rank_that_comes_second_to_the_store_is_told_the_numbering() -> None:
    async with loopback_world(3) as comms:
        kids = await asyncio.gather(*(comm.split([1, 2], "kid") for comm in comms[1:]))
        await cut_off(comms, 2)
        (new,) = await shrunk(kids[:1])
        with pytest.raises(LeftOutError, match=r"goes on as \[1\] \(where its ranks are called \[1, 2\]\)"):
            await kids[1].shrink()
        await close([new, *kids])


async def cut_off(comms: Sequence[Comm], rank: int) -> None:
    """Cut the control connection of ``rank``, the last one, and wait until all ranks have noticed."""
    channel = comms[rank]._session.identity.job.channel
    assert channel is not None
    channel.call(partial(_cut_off, channel))
    others = range(rank)
    await until(lambda: all(gone(comms[other], rank) and gone(comms[rank], other) for other in others))


@pytest.mark.parametrize("alone_first", [False, True])
async def test_with_a_quorum_the_larger_part_goes_on(alone_first: bool) -> None:
    async with loopback_world(3) as comms:
        await cut_off(comms, 2)
        new: list[Comm] = []
        for part in [comms[2:], comms[:2]] if alone_first else [comms[:2], comms[2:]]:
            found = await together([comm.shrink(quorum=True) for comm in part])
            if len(part) == 2:
                new = found
            else:
                message = "comm 'test' does not go on: 1 of its 3 ranks are left, and quorum=True demands half of them"
                assert str(found[0]) == message
                with pytest.raises(QuorumError):
                    raise found[0]
        await check(new)
        await close(new)


async def test_with_a_quorum_half_of_the_ranks_need_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2) as comms:
        await cut_off(comms, 1)
        (new,) = await shrunk([comms[1]], quorum=True)
        with pytest.raises(LeftOutError, match=r"the comm goes on as \[1\]"):
            await comms[0].shrink(quorum=True)
        await close([new])

    async def survives(*args: object) -> bool:
        return False

    monkeypatch.setattr(regrouping_module, "_survives", survives)
    async with loopback_world(2) as comms:
        await cut_off(comms, 1)
        for error in await together([comm.shrink(quorum=True) for comm in comms]):
            with pytest.raises(QuorumError, match=r"1 of its 2 ranks are left, .* more than half"):
                raise error


async def test_too_few_ranks_do_not_go_on() -> None:
    async with loopback_world(4) as comms:
        await lost(comms, 1)
        for error in await together([comms[rank].shrink(min_size=4) for rank in (0, 2, 3)]):
            with pytest.raises(QuorumError, match="3 of its 4 ranks are left, and min_size is 4") as caught:
                raise error
            assert (caught.value.comm, caught.value.left, caught.value.size) == ("test", 3, 4)
    async with loopback_world(4) as comms:
        await lost(comms, 1)
        asking = [asyncio.ensure_future(_await(comms[rank].shrink(min_size=3))) for rank in (0, 2)]
        await until(lambda: _asking(comms[0]))
        die(comms[3])
        await until(lambda: gone(comms[0], 3) and gone(comms[2], 3))
        for error in await together(asking):
            with pytest.raises(QuorumError, match="2 of its 4 ranks are left, and min_size is 3"):
                raise error


async def test_requirements_are_checked_at_the_call() -> None:
    async with loopback_world(2) as (comm, other):
        for size in (0, 3, -1, 1.5, None):
            with pytest.raises(ValueError, match=f"min_size must be from 1 to the 2 proposed members, got {size}"):
                comm.shrink(min_size=size)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="min_size must be from 1 to the 1 proposed members, got 2"):
            comm.shrink([1], min_size=2)
        with pytest.raises(TypeError, match="quorum must be True or False, got 2"):
            comm.reconfigure([0, 1], quorum=2)  # type: ignore[arg-type]
        assert other.size == 2


def _cut_off(channel: ControlChannel) -> None:
    """Make it believe that all others are dead."""
    router = channel._router
    link = router.up
    assert link is not None
    link.close()
    router.ended(link, "its connection ended")
    for rank in router.topology.contacts:
        if rank != router.rank:
            router.declare_lost(rank, "it does not listen")


def _stop(comms: Sequence[Comm], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the others believe that ``rank`` is silent."""
    for comm in comms:
        channel = comm._session.identity.job.channel
        assert channel is not None
        heard = channel._router.silence
        if comm.rank != rank:
            monkeypatch.setattr(channel._router, "silence", lambda r, heard=heard: 9.0 if r == rank else heard(r))


async def test_a_rank_declared_lost_during_its_request_is_left_out() -> None:
    async with loopback_world(3) as comms:
        asking = asyncio.ensure_future(_await(comms[1].shrink()))
        await until(lambda: _asking(comms[1]))
        channel = comms[0]._session.identity.job.channel
        assert channel is not None
        channel.call(lambda: channel._router.declare_lost(1, "it was silent"))
        (error,) = await together([asking])
        assert isinstance(error, LeftOutError)
        new = await shrunk([comms[0], comms[2]])
        await check(new)
        await close(new)


# -- the old comm -----------------------------------------------------------------------------------------------------


async def test_operations_in_flight_complete_first() -> None:
    async with loopback_world(2) as comms:
        tensor = torch.zeros(1)
        received = comms[0].recv(tensor, 1)
        calls = [asyncio.ensure_future(_await(comm.shrink())) for comm in comms]
        await until(lambda: _asking(comms[1]))
        assert not _asking(comms[0])
        await comms[1].send(torch.ones(1), 0)
        new = await together(calls)
        assert received.done()
        assert tensor.item() == 1
        await check(new)
        await close(new)


async def test_an_idle_stream_is_no_obstacle() -> None:
    async with loopback_world(2, timeout=3600) as comms:
        stream = comms[1].stream(0)
        put = comms[0].sink(1).put("first")
        assert await anext(stream) == "first"
        await put
        reading = asyncio.ensure_future(anext(stream))  # for which nothing comes any more
        await until(lambda: comms[1].statistics().in_flight == 1)
        new = await shrunk(comms)
        with pytest.raises(ClosedError, match="comm 'test' was closed while the stream was open"):
            await reading
        await check(new)
        await close(new)


async def test_a_wait_for_a_signal_is_no_obstacle() -> None:
    async with loopback_world(2, timeout=3600) as comms:
        windows = await asyncio.gather(*(comm.window(8) for comm in comms))
        work = windows[0].wait_signal()
        new = await shrunk(comms)
        with pytest.raises(ClosedError, match="comm 'test' was closed before the signal came"):
            await work
        await check(new)
        await close(new)


async def test_later_calls_do_not_delay_shrinking() -> None:
    async with loopback_world(2) as comms:
        calls = [asyncio.ensure_future(_await(comms[0].shrink()))]
        await until(lambda: _asking(comms[0]))
        late = comms[0].recv(torch.zeros(1), 1)  # nobody will send that
        new = await together([*calls, comms[1].shrink()])
        with pytest.raises(AbortedError, match="another comm goes on in place of this one"):
            await late
        await check(new)
        await close(new)


async def test_closing_the_comm_meanwhile_ends_the_wait() -> None:
    async with loopback_world(2) as comms:
        calls = [asyncio.ensure_future(_await(comms[0].shrink()))]
        await until(lambda: _asking(comms[0]))
        await comms[0].aclose()
        (error,) = await together(calls)
        assert isinstance(error, ClosedError)
        assert "comm 'test' was closed while it was regrouped" in str(error)
        new = await shrunk(comms[1:])  # which does not wait for it
        assert new[0].parent_ranks == (1,)
        await close(new)


async def test_one_call_at_a_time() -> None:
    async with loopback_world(2) as comms:
        early, first = comms[0].shrink(), comms[0].shrink()
        call = asyncio.ensure_future(_await(first))
        await until(lambda: _asking(comms[0]))
        with pytest.raises(RuntimeError, match="comm 'test' is being regrouped already, by another task"):
            comms[0].shrink()
        with pytest.raises(RuntimeError, match="comm 'test' is being regrouped already, by another task"):
            await early
        new = await together([call, comms[1].shrink()])
        await check(new)
        with pytest.raises(ClosedError):
            await first  # again
        await close(new)


async def test_cancelling_leaves_the_others_alone_and_is_final() -> None:
    async with loopback_world(3) as comms:
        call = asyncio.ensure_future(_await(comms[0].shrink()))
        await until(lambda: _asking(comms[0]))
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        new = await shrunk(comms[1:])
        await check(new)
        with pytest.raises(LeftOutError, match="it has withdrawn"):
            await comms[0].shrink()
        await close(new)


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_cancelling_before_the_request_is_final(turns: int) -> None:
    async with loopback_world(2, timeout=3600) as comms:
        call = asyncio.ensure_future(_await(comms[0].shrink()))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert call.cancel()
        await asyncio.wait([call])
        new = await shrunk(comms[1:])  # at once
        assert new[0].parent_ranks == (1,)
        with pytest.raises(LeftOutError, match="it has withdrawn"):
            await comms[0].shrink()
        await close(new)


async def test_a_rank_that_closed_the_comm_before_is_not_awaited() -> None:
    async with loopback_world(3, timeout=3600) as comms:
        left = await asyncio.gather(*(comm.split([0, 1, 2], "part") for comm in comms))
        await left[1].aclose()  # and stays, with the other comm
        new = await shrunk([left[0], left[2]])
        assert [comm.parent_ranks for comm in new] == [(0, 2)] * 2
        await close(new)


async def test_cancelling_while_they_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = asyncio.Event()

    async def slow(place: Any, group: Any, *arguments: Any, **more: Any) -> Any:
        if group.size == 3 and group.rank == 0:
            entered.set()
            await asyncio.Event().wait()
        return await bootstrap(place, group, *arguments, **more)

    monkeypatch.setattr(regrouping_module, "bootstrap", slow)
    async with loopback_world(3) as comms:
        calls = [asyncio.ensure_future(_await(comm.shrink())) for comm in comms]
        await entered.wait()
        calls[0].cancel()
        new = await together(calls[1:])
        await check(new)
        await asyncio.wait(calls[:1])
        await close(new)


async def test_cancelling_at_every_moment_leaves_nothing_behind() -> None:
    """The old one is closed or can be, the new one is got or gone, and the others go on or are told."""
    for turns in [*range(3, 60, 3), *range(60, 400, 40)]:
        async with loopback_world(2, timeout=10) as comms:
            calls = [asyncio.ensure_future(_await(comm.shrink())) for comm in comms]
            for _ in range(turns):
                await asyncio.sleep(0)
            calls[0].cancel()
            found = await together(calls)
            for comm in found:
                if isinstance(comm, Comm):
                    await comm.aclose()
                else:
                    assert isinstance(comm, (asyncio.CancelledError, LeftOutError, BrokenError)), comm
    await _nothing_is_left()


async def _nothing_is_left() -> None:
    await until(lambda: not [t for t in threading.enumerate() if t.name == "asynccomm control"])
    assert not _socket_names()
    assert not list(family_module._claims.items())


def _socket_names() -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if f"/{os.getpid()}/" in line]


# -- what it is like --------------------------------------------------------------------------------------------------


async def test_options_go_on() -> None:
    async with loopback_world(2, timeout=7, ordering="agreed", max_ops=5, max_bytes=99) as comms:
        before = comms[0].options
        new = await shrunk(comms)
        assert new[0].options == before
        assert new[0].backend == "loopback"
        assert new[0].statistics().submitted == 0
        for tag in ("a", "b"):
            assert (await asyncio.gather(*(c.all_reduce(torch.ones(1), tag=tag) for c in new)))[0].item() == 2
        newer = await shrunk(new)
        await close([*new, *newer])


async def test_a_comm_that_was_split_off_shrinks_by_itself() -> None:
    async with loopback_world(4) as comms:
        split = await asyncio.gather(*(comm.split([1, 3, 2], "part") for comm in comms[1:]))
        split.sort(key=lambda comm: comm.rank)  # job ranks 1, 3, 2
        errors = await together([comm.shrink([1] if comm.rank == 0 else []) for comm in split])
        assert "(where its ranks are called [1, 3, 2])" in str(errors[0])
        new = await shrunk([split[0], split[2]], exclude=[1])
        assert new[0].parent_ranks == (0, 2)
        assert new[0].name == "test/part"
        await check(new)
        await check(comms)  # untouched
        await close([*split, *new])


async def test_without_a_control_channel() -> None:
    async with loopback_world(2, hints={"control": "off"}) as comms:
        with pytest.raises(RuntimeError, match="comm 'test' has no control channel on this rank"):
            comms[0].shrink()


async def test_nothing_is_left_after_many() -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(_socket_names())

    before = held()
    async with loopback_world(2) as comms:
        for turn in range(amount(50, 20)):
            old, comms = comms, await shrunk(comms)
            await close(old)
            if turn == 4:
                before = held()
        # somebody who looks at what goes on here may just be connected
        await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
        await close(comms)
    await _nothing_is_left()


# -- stores -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def world(size: int, store: Callable[[int], Any], backend: str = "gloo") -> AsyncIterator[list[Comm]]:
    comms = await asyncio.gather(*(new_comm(backend, store=store(rank), rank=rank, size=size) for rank in range(size)))
    try:
        yield list(comms)
    finally:
        for comm in comms:
            comm.abort("the test is over")
        await close(comms)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def thrice(comms: list[Comm]) -> None:
    """All of them, and then fewer."""
    left = comms
    for exclude in ([], [0], [0]):
        new = await shrunk(left[len(exclude) :], exclude=exclude)
        await check(new)
        await close(left)
        left = new
    await close(left)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
async def test_on_a_store_of_the_launcher(backend: str) -> None:
    server = serve("127.0.0.1", listen("127.0.0.1", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(server.port))
        async with world(3, lambda rank: None, backend) as comms:
            await thrice(comms)
    server.release()


async def test_on_a_file(tmp_path: Path) -> None:
    async with world(3, lambda rank: f"file://{tmp_path}/store") as comms:
        await thrice(comms)


async def test_on_a_store_of_torch() -> None:
    store = dist.HashStore()
    async with world(3, lambda rank: store) as comms:
        await thrice(comms)


async def test_on_a_store_that_one_of_them_hosts() -> None:
    port = free_port()
    async with world(3, lambda rank: f"tcp://127.0.0.1:{port}") as comms:
        await thrice(comms)


@pytest.mark.parametrize("regrouped", ["parent", "sibling"])
async def test_the_host_of_the_store_stays_for_comms_that_were_split_off_before(regrouped: str) -> None:
    port = free_port()
    async with world(3, lambda rank: f"tcp://127.0.0.1:{port}") as comms:
        kids = await asyncio.gather(*(comm.split([1, 2], "kid") for comm in comms[1:]))
        if regrouped == "parent":
            new = await asyncio.gather(*(comm.reconfigure([0, 1, 2]) for comm in comms))
        else:
            pair = await asyncio.gather(*(comm.split([0, 1], "sibling") for comm in comms[:2]))
            await close(await shrunk(pair))
            new = comms
        closing = [asyncio.ensure_future(comm.aclose()) for comm in new]
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*closing[1:])
            for _ in range(3):  # the store is there
                await asyncio.gather(*(kid.monitored_barrier() for kid in kids))
                assert not closing[0].done()
            await close(kids)
            await closing[0]


async def test_regrouping_waits_for_no_comm_that_was_split_off_before(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    async with world(3, lambda rank: f"tcp://127.0.0.1:{port}") as comms:
        kids = await asyncio.gather(*(comm.split([1, 2], "kid") for comm in comms[1:]))
        start, left = time.monotonic(), comms
        for _ in range(3):
            left = await shrunk(left)
        assert time.monotonic() - start < regrouping_module.CLOSE_SECONDS
        await close(kids)
        await close(left)
    await _nothing_is_left()
    assert not caplog.records


async def test_the_survivors_host_a_store_when_the_old_store_is_lost() -> None:
    server = serve("127.0.0.1", listen("127.0.0.1", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(server.port))
        async with world(4, lambda rank: None) as comms:
            server.release()
            left = comms
            for dead in (0, 2, 0):  # the last one: who hosts
                await lost(left, dead)
                new = await shrunk([comm for comm in left if comm.rank != dead])
                await check(new)
                part = await asyncio.gather(*(comm.split(range(comm.size), "part") for comm in new))
                await close([*part, *left])
                left = new
            await close(left)


async def test_hosts_that_differ_meet_by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(range(1000))
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{next(names)}")
    store = MemoryStore()
    async with world(3, lambda rank: store, "loopback") as comms:
        channel = comms[0]._session.identity.job.channel
        assert channel is not None
        assert all(contact.port for contact in channel.topology.contacts.values())
        await lost(comms, 0)
        new = await shrunk(comms[1:])
        await check(new)
        await close(new)


async def test_the_root_goes_on_alone_if_the_last_peer_dies_while_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dying(place: Any, group: Any, *arguments: Any, **more: Any) -> Any:
        if group.size == 2 and group.rank == 1:
            die(comms[1])
            await asyncio.Event().wait()
        return await bootstrap(place, group, *arguments, **more)

    monkeypatch.setattr(regrouping_module, "bootstrap", dying)
    async with loopback_world(2) as comms:
        calls = [asyncio.ensure_future(_await(comm.shrink())) for comm in comms]
        new = await together(calls[:1])
        await check(new)
        calls[1].cancel()
        await asyncio.wait(calls)
        await close(new)


# -- processes that are killed and stopped ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery(__file__)
    yield found
    found.close()


async def _use(comm: Comm) -> list[Any]:
    """Whom it is made of, once it has worked."""
    tensor = torch.ones(1)
    await comm.all_reduce(tensor)
    assert tensor.item() == comm.size
    return [comm.rank, list(comm.parent_ranks)]


async def survive(rank: int, backend: str, victims: list[int], signal_number: int) -> list[Any]:
    """Some ranks die or stop in the middle of a collective; the others go on."""
    comm = await new_comm(backend, timeout=2)
    with contextlib.suppress(BrokenError):  # a victim may be lost before the others have left the barrier
        await comm.barrier()
    try:
        if rank in victims:
            os.kill(os.getpid(), signal_number)
            await comm.barrier()  # when it goes on
        else:
            await comm.all_reduce(torch.ones(4))
    except BrokenError as exc:
        error = type(exc).__name__
    try:
        start = time.monotonic()
        new = await comm.shrink()
    except LeftOutError:
        await comm.aclose()
        return ["left out", error]
    found = [*await _use(new), error, round(time.monotonic() - start, 3)]
    await new.aclose()
    return found


async def survive_without_leaders(rank: int) -> list[Any]:
    """The ranks that relay to the others, on each of two hosts, are stopped; the others do not wait for them."""
    os.environ[PRETENDED] = "ab"[rank % 2]
    comm = await new_comm("gloo", timeout=2)
    await comm.barrier()
    if rank < 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        new = await comm.shrink(timeout=20)
    except LeftOutError as exc:
        await comm.aclose()
        return ["left out", str(exc)]
    found = await _use(new)
    await new.aclose()
    return found


async def stop_idle(rank: int, victim: int) -> list[Any]:
    """One rank stops while nothing is under way; the others go on, and are gone when it continues."""
    comm = await new_comm("shm", timeout=20)
    await comm.barrier()
    if rank != victim:
        new = await comm.shrink()
        found = await _use(new)
        await new.aclose()
        return found
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        await comm.all_reduce(torch.ones(1))
    except BrokenError as exc:
        error = exc
    try:
        await comm.shrink()
    except LeftOutError as exc:
        await comm.aclose()
        return [str(error), str(exc)]
    return ["went on alone"]


@pytest.mark.parametrize(
    ("backend", "size", "victims", "agent"),
    [
        ("shm", 4, [1, 2], True),
        ("shm", 3, [0], False),  # which hosts the store
        ("gloo", 3, [0], True),
        ("gloo", 4, [0, 3], False),
    ],
)
def test_ranks_that_are_killed(nursery: Nursery, backend: str, size: int, victims: list[int], agent: bool) -> None:
    found = nursery.run(survive, size, backend, victims, signal.SIGKILL, agent=agent)
    left = [rank for rank in range(size) if rank not in victims]
    assert {rank: result[:3] for rank, result in found.items()} == {
        old: [new, left, "PeerLostError"] for new, old in enumerate(left)
    }


@pytest.mark.parametrize(("victim", "agent"), [(2, True), (0, True), (0, False)])
def test_a_rank_that_is_stopped(nursery: Nursery, victim: int, agent: bool) -> None:
    found = nursery.run(survive, 3, "shm", [victim], signal.SIGSTOP, agent=agent)
    left = [rank for rank in range(3) if rank != victim]
    assert found.pop(victim)[0] == "left out"
    assert {rank: result[:2] for rank, result in found.items()} == {old: [new, left] for new, old in enumerate(left)}
    # who hears it from another one before its own deadline has the latter
    assert {result[2] for result in found.values()} <= {"CollectiveTimeoutError", "AbortedError"}


def test_ranks_that_relay_to_others_are_stopped(nursery: Nursery) -> None:
    found = nursery.run(survive_without_leaders, 4)
    assert [found.pop(rank)[0] for rank in (0, 1)] == ["left out"] * 2
    assert found == {2: [0, [2, 3]], 3: [1, [2, 3]]}


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_stopped_while_idle(nursery: Nursery, victim: int) -> None:
    found = nursery.run(stop_idle, 3, victim)
    left = [rank for rank in range(3) if rank != victim]
    error, reason = found.pop(victim)
    assert "without this rank" in error or "goes on without rank 0" in error
    assert reason.startswith("comm 'main' goes on without this rank: ")
    assert found == {old: [new, left] for new, old in enumerate(left)}
