"""Meeting at stores on their way out, and meetings of ranks that have a control channel already."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from asynccomm import (
    AbortedError,
    BackendError,
    MemoryStore,
    RendezvousError,
    StoreClient,
    StoreError,
    new_comm,
    pair_comm,
)
from asynccomm.backends.registry import load_backend
from asynccomm.comm import bootstrap as bootstrap_module
from asynccomm.comm import joining as joining_module
from asynccomm.comm.bootstrap import bootstrap
from asynccomm.comm.joining import Joining
from asynccomm.comm.pairs import meet
from asynccomm.comm.session import Session
from asynccomm.ops.validation import CommInfo
from asynccomm.options import CommOptions
from asynccomm.rendezvous import job as job_module
from asynccomm.rendezvous import shared_channels
from asynccomm.rendezvous.spec import RendezvousSpec, StoreSession, connect_store, resolve_spec
from asynccomm.store.base import Store, path_of
from asynccomm.store.server import listen, serve
from asynccomm.store.shared import SharedClient
from tests.comm.sessions import close, nothing_is_left
from tests.sampling import amount
from tests.waiting import until

OPTIONS = CommOptions(timeout=10)
SILENT = CommOptions(timeout=10, hints={"control": "off"})
CPU = torch.device("cpu")
HERE: ContextVar[int] = ContextVar("HERE")  # the rank of a task


def attempt(place: RendezvousSpec, *, limit: float = 10.0) -> Joining:
    group = CommInfo("c", place.rank, place.size, CPU)
    return Joining(place, group, "auto", SILENT, number=place.rank, shares=False, limit=limit)


@asynccontextmanager
async def stoppable_store() -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of a store, and the process that hosts it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-P", "-m", "asynccomm.cli.store_process", str(listening.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listening.fileno()])
        url = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    try:
        yield url, process
    finally:
        process.kill()
        process.communicate()


async def test_comms_do_not_wait_for_a_stopped_store_beyond_their_limit() -> None:
    def pair() -> list[Any]:
        return [pair_comm(f"{me}", f"{1 - me}", store=url, timeout=1) for me in range(2)]

    async with asyncio.timeout(60), stoppable_store() as (url, process):
        port = int(url.rpartition(":")[2])
        await (await StoreClient.connect("127.0.0.1", port)).aclose()  # the process has started
        # an open comm keeps the client that all comms with its time limit share
        shared = await SharedClient.connect("127.0.0.1", port, 1.0)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        found = await asyncio.gather(new_comm(store=url, rank=1, size=2, timeout=1), *pair(), return_exceptions=True)
        assert {type(error) for error in found} == {RendezvousError}
        assert all("the store did not answer within 1 s" in str(error) for error in found)
        process.send_signal(signal.SIGCONT)
        assert await shared.client.add("number", 1) == 1
        for comm in await asyncio.gather(*pair()):
            await comm.aclose()
        await shared.release()


async def test_the_end_of_a_given_store_is_an_error_at_once() -> None:
    """No other server comes in its place, unlike at an address that a rank hosts."""
    server = serve("127.0.0.1", listen("127.0.0.1", 0))
    place = resolve_spec(dist.TCPStore("127.0.0.1", server.port, is_master=False), 1, 2, {})
    shared = await SharedClient.connect("127.0.0.1", server.port, 60)
    joining = asyncio.create_task(attempt(place, limit=60).meet())
    await until(lambda: shared._users == 2)
    server.release()
    async with asyncio.timeout(20):
        with pytest.raises(StoreError, match="was lost"):
            await joining
    await shared.release()


async def test_a_store_that_ends_meanwhile_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meeting:
        def __init__(self) -> None:
            self.store, self.hosted, self.closed = MemoryStore(), None, 0

        async def aclose(self) -> None:
            self.closed += 1

    meetings: list[Meeting] = []

    async def meet(place: RendezvousSpec, timeout: float) -> Meeting:
        meetings.append(Meeting())
        return meetings[-1]

    async def join(scope: Store, *arguments: Any, **more: Any) -> Any:
        if len(meetings) < 3:
            raise StoreError("the connection was lost")
        return "joined"

    monkeypatch.setattr(joining_module, "connect_store", meet)
    monkeypatch.setattr(joining_module, "handshake", join)
    joining = attempt(RendezvousSpec(1, 2, "asynccomm/run/0", host="h", port=1))
    assert await joining.meet() == "joined"
    assert joining.meeting is meetings[2]
    assert [meeting.closed for meeting in meetings] == [1, 1, 0]
    meetings.clear()
    hosting = RendezvousSpec(0, 2, "asynccomm/run/0", host="h", port=1, hosting=True)
    joining = attempt(hosting)
    with pytest.raises(StoreError) as caught:  # the rank that hosts it knows better
        await joining.meet()
    await joining.abandon(caught.value)
    assert [meeting.closed for meeting in meetings] == [1]


async def test_a_store_that_ends_for_good_is_named_with_the_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[StoreSession] = []

    async def meet(place: RendezvousSpec, timeout: float) -> StoreSession:
        if met:
            raise RendezvousError(f"no store at h:1 within {timeout:g} s: Connection refused")
        met.append(StoreSession(MemoryStore()))
        return met[0]

    async def join(scope: Store, *arguments: Any, **more: Any) -> Any:
        raise StoreError("the connection was lost")

    monkeypatch.setattr(joining_module, "connect_store", meet)
    monkeypatch.setattr(joining_module, "handshake", join)
    where = RendezvousSpec(1, 2, "asynccomm/run/0", host="h", port=1)
    text = r"comm 'c': the ranks did not meet within 10 s; the store was lost meanwhile: .* \(this is rank 1\)"
    with pytest.raises(RendezvousError, match="no store at h:1"):
        met.append(StoreSession(MemoryStore()))
        await attempt(where).meet()
    met.clear()
    with pytest.raises(RendezvousError, match=text):
        await attempt(where).meet()


# -- comms of the same processes --------------------------------------------------------------------------------------


class Ranks:
    """Ranks at a store that rank 0 hosts, and their first comm."""

    def __init__(self, port: int, size: int) -> None:
        self.port = port
        self.size = size
        self.first: list[Session] = []

    async def rank(self, rank: int, name: str, options: CommOptions = OPTIONS, requested: str = "gloo") -> Session:
        size = self.size
        HERE.set(rank)
        where = RendezvousSpec(rank, size, "asynccomm/run/0", host="127.0.0.1", port=self.port, hosting=rank == 0)
        group = CommInfo(name, rank, size, CPU)
        return await bootstrap(where, group, requested, {"gloo": load_backend("gloo", CPU)}, options)

    async def all(self, name: str, *options: CommOptions) -> list[Session]:
        async with asyncio.timeout(20):
            return await asyncio.gather(
                *(self.rank(rank, name, *options[rank : rank + 1]) for rank in range(self.size))
            )

    async def wait(self, key: str) -> None:
        client = await StoreClient.connect("127.0.0.1", self.port)
        await client.wait([key], 10.0)
        await client.aclose()

    async def value(self, key: str) -> str:
        client = await StoreClient.connect("127.0.0.1", self.port)
        found = await client.get(f"asynccomm/run/0/{key}")
        await client.aclose()
        return found.decode()

    async def epoch_of(self, name: str) -> bool:
        """Whether the ranks have used the store to meet for comm ``name``."""
        client = await StoreClient.connect("127.0.0.1", self.port)
        found = await client.check([f"asynccomm/run/0/{name}/epoch"])
        await client.aclose()
        return found


@asynccontextmanager
async def some_ranks(size: int = 2, options: CommOptions = OPTIONS) -> AsyncIterator[Ranks]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        ranks = Ranks(sock.getsockname()[1], size)
    ranks.first = await ranks.all("first", *[options] * size)
    try:
        yield ranks
    finally:
        await close(*ranks.first)
    await nothing_is_left()


def channels(sessions: Sequence[Session]) -> list[Any]:
    return [session.identity.job.channel for session in sessions]


async def test_later_comms_use_the_channel_of_the_first_and_meet_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining_module, "SOON_SECONDS", 3600.0)
    async with some_ranks() as ranks:
        assert await ranks.epoch_of("first")
        second, third = await asyncio.gather(ranks.all("second"), ranks.all("third"))
        assert channels(ranks.first) == channels(second) == channels(third)
        assert not await ranks.epoch_of("second")
        every = [ranks.first, second, third]
        assert len({session.identity.job.secret for each in every for session in each}) == 3
        assert len({session.identity.key for each in every for session in each}) == 3
        assert [each.identity.members for each in second] == [each.identity.members for each in ranks.first]
        await close(*ranks.first)
        fourth = await ranks.all("first")  # the name again
        assert channels(fourth) == channels(second)
        second[1].abort("for the test")
        await until(lambda: isinstance(second[0].error, AbortedError))
        assert fourth[0].error is third[0].error is None
        await close(*second, *third, *fourth)


@pytest.mark.parametrize("options", [OPTIONS, SILENT])
async def test_meeting_may_have_no_time_limit(options: CommOptions) -> None:
    async with some_ranks() as ranks:
        second = await ranks.all("second", *[replace(options, timeout=math.inf)] * 2)
        await close(*second)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_comm_that_is_dropped_with_its_loop_is_closed_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "LEAVE_SECONDS", 0.1)  # nothing announces the departure of the dropped comm
    async with some_ranks() as ranks:
        zero = asyncio.ensure_future(ranks.rank(0, "second"))
        channel = ranks.first[1].identity.job.channel
        assert channel is not None

        def comm_of_another_loop() -> None:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(ranks.rank(1, "second"))
            loop.close()

        await asyncio.to_thread(comm_of_another_loop)
        second = await zero
        gc.collect()
        assert second.reporter is not None
        async with asyncio.timeout(20):
            assert await second.reporter.closed_by([1]) == 1
        await until(lambda: list(channel._members._members) == [ranks.first[1].identity.key])
        second.abort("its peer has gone")
        await close(second)


async def test_a_rank_without_a_channel_is_met_at_the_store() -> None:
    async with some_ranks() as ranks:
        second = await ranks.all("second", OPTIONS, SILENT)
        assert await ranks.epoch_of("second")
        assert second[1].identity.job.channel is None
        assert list(second[0].identity.job.channel.topology.contacts) == [0]  # type: ignore[union-attr]
        third = await ranks.all("third")
        assert channels(third) == channels(ranks.first)
        await close(*second, *third)


async def test_a_late_rank_is_met_over_the_channel() -> None:
    async with some_ranks() as ranks:
        for early in range(2):
            name = f"after rank {early}"
            waiting = asyncio.ensure_future(ranks.rank(early, name))
            if early == 0:
                while not await ranks.epoch_of(name):  # it does not wait for the channel alone
                    await asyncio.sleep(0.01)
            else:
                await asyncio.sleep(0.1)
            late = await ranks.rank(1 - early, name)
            assert channels(sorted([await waiting, late], key=lambda session: session.group.rank)) == channels(
                ranks.first
            )
            await close(await waiting, late)


async def test_a_mismatch_is_found_over_the_channel() -> None:
    async with some_ranks() as ranks:
        found = await asyncio.gather(
            ranks.rank(0, "second"), ranks.rank(1, "second", requested="shm"), return_exceptions=True
        )
        for error in found:
            assert isinstance(error, RendezvousError)
            assert str(error) == "comm 'second': backend differs: rank 0 has 'gloo', rank 1 has 'shm'"
        await close(*await ranks.all("second"))


async def test_a_rank_that_closes_its_comms_meanwhile_is_met_at_the_store() -> None:
    async with some_ranks() as ranks:
        waiting = asyncio.ensure_future(ranks.rank(0, "second"))
        await close(ranks.first[1])
        last = await ranks.rank(1, "second")
        second = [await waiting, last]
        assert await ranks.epoch_of("second")
        assert channels(second)[0] is not ranks.first[0].identity.job.channel
        await close(*second)


@pytest.mark.parametrize("rank", [0, 1])
async def test_cancelling_beside_another_comm_at_any_moment(rank: int) -> None:
    short = CommOptions(timeout=0.1)
    connected = aborted = turns = 0
    step = amount(3, 6)
    async with some_ranks() as ranks:
        while turns < 60 or not (connected or aborted):  # it came as far as the backend
            tasks = [asyncio.ensure_future(ranks.rank(each, "second", short)) for each in range(2)]
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[rank].cancel()
            async with asyncio.timeout(20):
                mine, theirs = await asyncio.gather(tasks[rank], tasks[1 - rank], return_exceptions=True)
            connected += isinstance(mine, Session)
            if isinstance(mine, asyncio.CancelledError) and isinstance(theirs, AbortedError):
                assert "could not connect" in str(theirs)
                aborted += 1
            await close(*(one for one in (mine, theirs) if isinstance(one, Session)))
            await close(*await ranks.all("second"))
            turns += step
        assert all(each.error is None for each in ranks.first)


@pytest.mark.parametrize("again", [OPTIONS, SILENT], ids=["channel", "no channel"])
async def test_a_hello_of_a_rank_that_has_withdrawn_is_not_counted(again: CommOptions) -> None:
    async with some_ranks(3) as ranks:
        others = [asyncio.ensure_future(ranks.rank(0, "second"))]
        while not await ranks.epoch_of("second"):
            await asyncio.sleep(0.01)
        hello = f"asynccomm/run/0/second/{await ranks.value('second/epoch')}/hello/1"
        first = asyncio.ensure_future(ranks.rank(1, "second"))
        await ranks.wait(hello)
        first.cancel()
        await asyncio.wait([first])
        others.append(asyncio.ensure_future(ranks.rank(2, "second")))
        await ranks.wait(hello.replace("hello/1", "hello/2"))
        async with asyncio.timeout(5):  # not the time limit
            second = [await ranks.rank(1, "second", again), *[await other for other in others]]
        assert {session.group.size for session in second} == {3}
        await close(*second)


async def test_a_rank_that_has_withdrawn_is_missing() -> None:
    short = CommOptions(timeout=3.0)
    async with some_ranks(3) as ranks:
        waiting = asyncio.ensure_future(ranks.rank(0, "second", short))
        while not await ranks.epoch_of("second"):
            await asyncio.sleep(0.01)
        hello = f"asynccomm/run/0/second/{await ranks.value('second/epoch')}/hello/1"
        first = asyncio.ensure_future(ranks.rank(1, "second", short))
        await ranks.wait(hello)
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(RendezvousError, match=r"ranks \[1\] of 3 did not come within 3 s"):
            await ranks.rank(2, "second", short)
        with pytest.raises(RendezvousError, match=r"ranks \[1\] of 3 did not come within 3 s"):
            await waiting


async def test_a_cancellation_that_is_cancelled_holds_no_rank_up() -> None:
    async with some_ranks() as ranks:
        for turns in range(0, 24, amount(2, 4)):
            tasks = [asyncio.ensure_future(ranks.rank(rank, "second", CommOptions(timeout=0.2))) for rank in range(2)]
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[1].cancel()
            await asyncio.sleep(0)
            tasks[1].cancel()
            async with asyncio.timeout(5):  # the rank that hosts the store would wait 10 s for a departure
                found = await asyncio.gather(*tasks, return_exceptions=True)
                await close(*(each for each in found if isinstance(each, Session)))
        await close(*await ranks.all("second"))


@pytest.mark.parametrize("rank", [0, 1])
async def test_ranks_of_several_hosts_do_not_wait_for_one_that_gives_up(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{HERE.get()}")
    exchange = bootstrap_module.exchange_addresses

    async def exchange_or_fail(room: Store, joined: Any, sockets: Any, me: int, *arguments: Any) -> Any:
        if me == rank and path_of(room).startswith("asynccomm/run/0/second/"):
            raise LookupError("no address")
        return await exchange(room, joined, sockets, me, *arguments)

    monkeypatch.setattr(bootstrap_module, "exchange_addresses", exchange_or_fail)
    hints = replace(OPTIONS, hints={"hostname": "127.0.0.1"})
    async with some_ranks(options=hints) as ranks:
        tasks = [asyncio.ensure_future(ranks.rank(each, "second", hints)) for each in range(2)]
        async with asyncio.timeout(8):  # not the time limit
            found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[rank], LookupError)
        assert isinstance(found[1 - rank], BackendError)
        assert str(found[1 - rank]) == f"rank {rank} of 2: it gave up connecting"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_attempt_that_ends_with_its_loop_leaves_the_meeting() -> None:
    async with some_ranks() as ranks:
        zero = asyncio.ensure_future(ranks.rank(0, "another"))
        while not await ranks.epoch_of("another"):
            await asyncio.sleep(0.01)

        def attempt_of_another_loop() -> None:
            loop = asyncio.new_event_loop()
            task = loop.create_task(ranks.rank(1, "second"))
            loop.run_until_complete(asyncio.sleep(0.1))  # it also asks the store by now
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.close()

        await asyncio.to_thread(attempt_of_another_loop)
        gc.collect()
        leases = {each.channel.rank: each for each in shared_channels._open}
        await until(lambda: leases[1].leases == 1)
        assert leases[0].leases == 2
        await close(await ranks.rank(1, "another"), await zero)
        await close(*await ranks.all("second"))


async def test_channels_of_pairs_are_not_shared() -> None:
    async with some_ranks() as ranks:
        where = [RendezvousSpec(rank, 2, "asynccomm/run", host="127.0.0.1", port=ranks.port) for rank in range(2)]
        channels_before = list(shared_channels._open)
        pair = await asyncio.gather(
            *(meet(where[rank], "pair/a/b", rank, 2, "gloo", "cpu", OPTIONS) for rank in range(2))
        )
        assert shared_channels._open == channels_before
        second = await ranks.all("second")
        assert channels(second) == channels(ranks.first)
        await close(*second)
        await asyncio.gather(*(comm.aclose() for comm in pair))


async def test_comms_of_a_given_store_share_a_channel_where_its_server_is_known() -> None:
    async with some_ranks() as ranks:
        client = await StoreClient.connect("127.0.0.1", ranks.port)
        address = f"127.0.0.1:{ranks.port}"
        for store, known in [(client, address), (client.prefix("a").prefix("b"), address), (MemoryStore(), "")]:
            given = await connect_store(RendezvousSpec(1, 2, "asynccomm/run/0", store=store), 10.0)
            assert given.address == known
            await given.aclose()
        await client.aclose()
