"""Ranks come to share a segment: several in one process mostly, real ones where death matters."""

import asyncio
import dataclasses
import errno
import gc
import json
import os
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop

from asynccomm import BackendError, MemoryStore, PeerLostError, StoreClient
from asynccomm.backends.base import UnsuitableError
from asynccomm.backends.shm import bootstrap, handshake
from asynccomm.backends.shm.bootstrap import (
    PeerMapping,
    bootstrap_segment,
    report_unsupported,
    unsupported,
)
from tests.forking import fork
from tests.waiting import until

from .segment_world import (
    SETTINGS,
    World,
    check_mappings,
    context_of,
    ended,
    layout_of,
)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
async def test_everybody_shares_all(world_of: Callable[[int], World], size: int) -> None:
    world = world_of(size)
    check_mappings(await world.all(), world.bells)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_uvloop(world_of: Callable[[int], World], size: int) -> None:
    world = world_of(size)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        check_mappings(runner.run(world.all()), world.bells)


async def test_descriptors_may_take_several_messages(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MESSAGE_DESCRIPTORS", 4)
    world = world_of(6)
    check_mappings(await world.all(), world.bells)


async def test_alone_without_sockets(world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(1)
    monkeypatch.setattr(socket, "socket", None)
    check_mappings(await world.all(), world.bells)


async def test_late_ranks(world_of: Callable[[int], World]) -> None:
    world = world_of(3)
    tasks = []
    for rank in (2, 0, 1):
        tasks.append(asyncio.ensure_future(world.rank(rank)))
        await asyncio.sleep(0.02)
    two, zero, one = await asyncio.gather(*tasks)
    check_mappings([zero, one, two], world.bells)


def all_unsuitable(outcomes: Sequence[object], message: str) -> None:
    assert [type(outcome) for outcome in outcomes] == [UnsuitableError] * len(outcomes), outcomes
    assert {str(outcome) for outcome in outcomes} == {message}
    for outcome in outcomes:
        assert isinstance(outcome, UnsuitableError)
        outcome.__traceback__ = None  # it holds what was under way


async def test_other_settings_are_named(world_of: Callable[[int], World]) -> None:
    world = world_of(3)
    outcomes = await asyncio.gather(
        world.rank(0), world.rank(1), world.rank(2, chunk_bytes=65536), return_exceptions=True
    )
    all_unsuitable(outcomes, "comm 'test': hint 'chunk_bytes' differs: rank 0 has 4096, rank 2 has 65536")


async def test_a_rank_that_cannot_connect(world_of: Callable[[int], World]) -> None:
    """As from another host or network namespace, where nobody has rank 0's address."""
    world = world_of(3)

    class Elsewhere(MemoryStore):  # type: ignore[misc]
        async def get(self, key: str, timeout: float | None = None) -> bytes:
            value = await world.store.get(key, timeout)
            return json.dumps({**json.loads(value), "name": "nobody"}).encode() if key == "address" else value

        async def set(self, key: str, value: bytes | str) -> None:
            await world.store.set(key, value)

        async def multi_get(self, keys: Sequence[str], timeout: float | None = None) -> list[bytes]:
            return await world.store.multi_get(keys, timeout)

        async def check(self, keys: Sequence[str]) -> bool:
            return await world.store.check(keys)

    away = context_of(Elsewhere(), 1, 3, hosts=["alpha", "beta", "alpha"])
    outcomes = await asyncio.gather(
        world.rank(0),
        bootstrap_segment(away, SETTINGS, layout_of(3), world.bells[1]),
        world.rank(2),
        return_exceptions=True,
    )
    reason = "cannot reach rank 0 on host 'alpha' by a local socket: Connection refused"
    all_unsuitable(outcomes, f"comm 'test': rank 1 on host 'beta' {reason}")


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_declines(world_of: Callable[[int], World], rank: int) -> None:
    world = world_of(2)
    outcomes = await asyncio.gather(
        report_unsupported(context_of(world.store, rank, 2), "needs Linux, and this is plan9"),
        world.rank(1 - rank),
        return_exceptions=True,
    )
    all_unsuitable(outcomes, f"comm 'test': rank {rank} cannot share memory: needs Linux, and this is plan9")


async def test_another_system(world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported() == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    outcomes = await world_of(2).outcomes()
    all_unsuitable(outcomes, "comm 'test': rank 0 cannot share memory: needs Linux, and this is darwin")


@pytest.mark.parametrize("size", [1, 3])
async def test_no_memory_is_rank_0s_reason_on_all(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def no_memory(nbytes: int) -> int:
        raise BackendError(f"no {nbytes} bytes")

    monkeypatch.setattr(bootstrap, "create", no_memory)
    outcomes = await world_of(size).outcomes()
    all_unsuitable(outcomes, f"comm 'test': rank 0 cannot share memory: no {layout_of(size).total} bytes")


async def test_a_rank_that_cannot_map(world_of: Callable[[int], World]) -> None:
    world = world_of(3)
    smaller = dataclasses.replace(layout_of(3), ring=512)
    odd = bootstrap_segment(context_of(world.store, 2, 3), SETTINGS, smaller, world.bells[2])
    outcomes = await asyncio.gather(world.rank(0), world.rank(1), odd, return_exceptions=True)
    sizes = f"has {layout_of(3).total} bytes instead of {smaller.total}"
    all_unsuitable(outcomes, f"comm 'test': rank 2 cannot share memory: the shared segment {sizes}")


async def test_no_socket_to_be_had(world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(2)

    def no_more(*args: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_more)
    all_unsuitable(await world.outcomes(), "comm 'test': rank 0 cannot share memory: Too many open files")


async def test_connections_cannot_be_taken(world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(3)

    def no_more(self: socket.socket) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", no_more)
    reason = "rank 0 cannot share memory: it cannot take connections: Too many open files"
    all_unsuitable(await world.outcomes(), f"comm 'test': {reason}")


async def test_other_users_are_dropped_on_both_sides(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.geteuid()
    users = iter([real + 1, real, real])

    async def outcomes(world: World) -> list[object]:
        zero = asyncio.ensure_future(world.rank(0))
        one = asyncio.ensure_future(world.rank(1))
        return list(await asyncio.gather(zero, one, return_exceptions=True))

    monkeypatch.setattr(handshake, "peer_user", lambda sock: next(users))
    reason = "rank 1 on host 'here' cannot reach rank 0 on host 'here' by a local socket"
    found = await outcomes(world_of(2))
    all_unsuitable(found, f"comm 'test': {reason}: it runs as user {real + 1}, this rank as user {real}")
    users = iter([real, real + 1])
    all_unsuitable(await outcomes(world_of(2)), f"comm 'test': {reason}: it closed the connection")


# -- without the store ------------------------------------------------------------------------------------------------


class NoStore(MemoryStore):  # type: ignore[misc]
    """A store that nobody may need."""

    async def set(self, key: str, value: bytes | str) -> None:
        raise AssertionError(f"{key} was set")

    async def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        raise AssertionError(f"{keys} were awaited")


class Loudspeaker:
    """Announcements within a process."""

    def __init__(self) -> None:
        self.text = asyncio.get_running_loop().create_future()
        self.listeners = 0

    def announce(self, text: str) -> None:
        self.text.set_result(text)

    async def announced(self) -> str:
        self.listeners += 1
        return str(await asyncio.shield(self.text))


@pytest.fixture
def late_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to the store during a test."""
    monkeypatch.setattr("asynccomm.backends.base.SOON_SECONDS", 60)
    monkeypatch.setattr(bootstrap, "SOON_SECONDS", 60)


@pytest.mark.usefixtures("late_store")
async def test_ranks_that_hear_announcements_need_no_store(world_of: Callable[[int], World]) -> None:
    world = world_of(3)
    speaker = Loudspeaker()
    contexts = [dataclasses.replace(context_of(NoStore(), rank, 3), announcements=speaker) for rank in range(3)]
    joining = [bootstrap_segment(context, SETTINGS, layout_of(3), world.bells[i]) for i, context in enumerate(contexts)]
    check_mappings(await asyncio.gather(*joining), world.bells)


async def test_a_secret_saves_the_announcement(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "AT_ONCE_SECONDS", 60)
    world = world_of(3)
    zero, *others = world.trusting(NoStore())
    coming = [asyncio.ensure_future(world.joining(context)) for context in others]  # before rank 0
    await asyncio.sleep(0)
    check_mappings(await asyncio.gather(world.joining(zero), *coming), world.bells)


async def test_ranks_with_a_secret_wait_for_rank_0(world_of: Callable[[int], World]) -> None:
    world = world_of(3)
    silent = Loudspeaker()
    zero, *others = [dataclasses.replace(each, announcements=silent) for each in world.trusting(NoStore())]
    coming = [asyncio.ensure_future(world.joining(context)) for context in others]
    await until(lambda: silent.listeners == 2)
    check_mappings(await asyncio.gather(world.joining(zero), *coming), world.bells)


async def test_late_ranks_hear_the_address_that_they_could_derive(world_of: Callable[[int], World]) -> None:
    """A rank whose settings differ derives another address: only the announcement can say so."""
    world = world_of(3)
    one, two, three = world.trusting()
    odd = bootstrap_segment(three, {**SETTINGS, "chunk_bytes": 8192}, layout_of(3), world.bells[2])
    outcomes = await asyncio.gather(world.joining(one), world.joining(two), odd, return_exceptions=True)
    all_unsuitable(outcomes, "comm 'test': hint 'chunk_bytes' differs: rank 0 has 4096, rank 2 has 8192")


@pytest.mark.usefixtures("late_store")
async def test_ranks_of_other_networks_hear_the_announcement_at_once(world_of: Callable[[int], World]) -> None:
    world = world_of(3)
    speaker = Loudspeaker()
    contexts = [
        dataclasses.replace(
            context,
            announcements=speaker,
            members=[dataclasses.replace(each, network=str(each.rank // 2)) for each in context.members],
        )
        for context in world.trusting(NoStore())
    ]
    check_mappings(await asyncio.gather(*map(world.joining, contexts)), world.bells)
    assert speaker.listeners == 1


async def test_segments_with_the_same_secret_do_not_meet(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "AT_ONCE_SECONDS", 60)
    worlds = [world_of(2), world_of(2)]
    rooms = NoStore().prefix("a"), NoStore().prefix("b")
    contexts = [context for world, room in zip(worlds, rooms, strict=True) for context in world.trusting(room)]
    mappings = await asyncio.gather(*(worlds[i // 2].joining(context) for i, context in enumerate(contexts)))
    check_mappings(mappings[:2], worlds[0].bells)
    check_mappings(mappings[2:], worlds[1].bells)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_declines_where_ranks_share_a_secret(world_of: Callable[[int], World], rank: int) -> None:
    """The other ranks may have connected to rank 0 by then."""
    world = world_of(3)
    contexts = world.trusting()
    declining = contexts.pop(rank)
    coming = [asyncio.ensure_future(world.joining(context)) for context in contexts]
    for _ in range(10):
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*coming, report_unsupported(declining, "no"), return_exceptions=True)
    all_unsuitable(outcomes, f"comm 'test': rank {rank} cannot share memory: no")


async def test_a_rank_0_of_another_user(world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "peer_user", lambda sock: 12345)
    world = world_of(2)
    outcomes = await asyncio.gather(*map(world.joining, world.trusting()), return_exceptions=True)
    reason = "rank 1 on host 'here' cannot reach rank 0 on host 'here' by a local socket: it runs as user 12345, "
    all_unsuitable(outcomes, f"comm 'test': {reason}this rank as user {os.geteuid()}")


# -- between mapping and verdict --------------------------------------------------------------------------------------


async def test_a_rank_goes_on_before_all_ranks_have_mapped(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(2)
    ran: list[int] = []
    report = handshake.PeerSide.report

    async def unfit(self: handshake.PeerSide, problem: str) -> None:
        await report(self, "it does not fit")

    monkeypatch.setattr(handshake.PeerSide, "report", unfit)

    def rank(number: int) -> Awaitable[PeerMapping]:
        context, bells = context_of(world.store, number, 2), world.bells[number]
        return bootstrap_segment(
            context, SETTINGS, layout_of(2), bells, on_mapped=lambda mapping: ran.append(len(mapping.bells))
        )

    outcomes = await asyncio.gather(rank(0), rank(1), return_exceptions=True)
    all_unsuitable(outcomes, "comm 'test': it does not fit")
    assert ran == [2, 2]


async def test_an_error_before_the_verdict_is_the_loss_of_the_rank(world_of: Callable[[int], World]) -> None:
    world = world_of(3)
    before = len(os.listdir("/proc/self/fd"))

    def fail(mapping: PeerMapping) -> None:
        del mapping  # else the traceback has it
        raise LookupError("not here")

    def rank(number: int) -> Awaitable[PeerMapping]:
        context, bells = context_of(world.store, number, 3), world.bells[number]
        return bootstrap_segment(context, SETTINGS, layout_of(3), bells, on_mapped=None if number else fail)

    outcomes = await asyncio.gather(*map(rank, range(3)), return_exceptions=True)
    assert isinstance(outcomes[0], LookupError)
    assert [(type(each), getattr(each, "rank", None)) for each in outcomes[1:]] == [(PeerLostError, 0)] * 2
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_rank_that_hears_no_announcement_looks_in_the_store(
    world_of: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynccomm.backends.base.ANNOUNCE_SECONDS", 0.01)
    world = world_of(3)
    speakers = Loudspeaker(), Loudspeaker(), None  # the second rank is deaf, the third has no channel
    contexts = [
        dataclasses.replace(context_of(world.store, rank, 3), announcements=speaker)
        for rank, speaker in enumerate(speakers)
    ]
    joining = [bootstrap_segment(context, SETTINGS, layout_of(3), world.bells[i]) for i, context in enumerate(contexts)]
    check_mappings(await asyncio.gather(*joining), world.bells)


async def test_a_rank_that_comes_after_a_problem_hears_of_it(world_of: Callable[[int], World]) -> None:
    world = world_of(3)
    zero = asyncio.ensure_future(world.rank(0))
    one = asyncio.ensure_future(report_unsupported(context_of(world.store, 1, 3), "no"))
    await world.store.wait(["reach/0"])  # rank 0 has seen the problem
    outcomes = await asyncio.gather(zero, one, world.rank(2), return_exceptions=True)
    all_unsuitable(outcomes, "comm 'test': rank 1 cannot share memory: no")


# -- cancelling and dying ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_cancelling_at_any_point_closes_all(
    world_of: Callable[[int], World], loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """All ranks are cancelled after so many turns of the loop, from none to more than a meeting takes."""
    world = world_of(3)

    async def attempt(turns: int) -> bool:
        world.store = MemoryStore()
        before = len(os.listdir("/proc/self/fd"))
        tasks = [asyncio.ensure_future(world.rank(rank)) for rank in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, PeerMapping):
                outcome.close()
            elif outcome is not None:
                assert isinstance(outcome, (asyncio.CancelledError, PeerLostError)), outcome
        finished = all(isinstance(outcome, PeerMapping) for outcome in outcomes)
        del task, tasks, outcome, outcomes  # with the frames that hold a segment
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) == before, turns
        return finished

    async def main() -> None:
        await asyncio.sleep(0.01)
        turns = 0
        while not await attempt(turns):
            turns += 1
            assert turns < 500
        assert turns > 5

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


@pytest.mark.parametrize("quitter", [0, 1, 2])
async def test_a_rank_that_gives_up_is_named_on_the_others(world_of: Callable[[int], World], quitter: int) -> None:
    """Cancelled after so many turns; the others must either hear of it or not have come so far as to know it."""
    world = world_of(3)
    named = 0
    for turns in range(60):
        world.store = MemoryStore()
        tasks = [asyncio.ensure_future(world.rank(rank)) for rank in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        if tasks[quitter].done():
            for task in tasks:
                (await task).close()
            break
        tasks[quitter].cancel()
        await asyncio.wait(tasks, timeout=0.1)
        for rank, task in enumerate(tasks):
            if rank != quitter and task.done():
                if task.exception() is None:
                    task.result().close()  # it knew already that all had mapped
                    continue
                with pytest.raises(
                    PeerLostError, match=f"rank {quitter} was lost: it left while the ranks were connecting"
                ):
                    await task
                named += 1
            task.cancel()
        await asyncio.wait(tasks)
        tasks.clear()
    else:
        pytest.fail("the meeting never ended")
    assert named > 4


async def test_a_timeout_works(world_of: Callable[[int], World]) -> None:
    world = world_of(2)
    for rank in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await world.rank(rank)
        world.store = MemoryStore()


async def test_a_forked_child_does_not_keep_its_parent_alive(world_of: Callable[[int], World]) -> None:
    world = world_of(2)
    one, other = await world.all()
    (read, write), (up, down) = os.pipe(), os.pipe()
    pid = fork()
    if pid == 0:
        os.close(write)
        os.write(down, b"x")
        os.read(read, 1)  # stays until told
        one.close()
        os._exit(0)
    assert os.read(up, 1) == b"x"
    for fd in (up, down, read):
        os.close(fd)
    assert not ended(other.liveness_fds[0])
    one.close()
    assert ended(other.liveness_fds[0]), "the child holds no copy of the pipe"
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0
    other.close()


@pytest.mark.ranks(3, backend="gloo")
async def test_on_processes() -> None:
    rank = int(os.environ["RANK"])
    store = await StoreClient.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=20)
    room = store.prefix(os.environ["TORCHELASTIC_RUN_ID"])
    bells = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    async with asyncio.timeout(20):
        mapping = await bootstrap_segment(context_of(room, rank, 3), SETTINGS, layout_of(3), bells)
        mapping.segment.words[rank] = os.getpid()
        os.eventfd_write(mapping.bells[(rank + 1) % 3][1], 1)
        while not (all(mapping.segment.words[:3]) and select.select([bells[1]], [], [], 0)[0]):
            await asyncio.sleep(0.001)
        child = None
        if rank == 1:  # leaves; a program that it started stays
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
            mapping.close()
        else:
            while not ended(mapping.liveness_fds[1]):
                await asyncio.sleep(0.001)
            assert not ended(mapping.liveness_fds[2 - rank])
        await room.add("done", 1)
        while await room.add("done", 0) < 3:
            await asyncio.sleep(0.001)
    mapping.close()
    for fd in bells:
        os.close(fd)
    if child is not None:
        child.communicate(b"\n", timeout=20)
    await store.aclose()


@pytest.mark.ranks(2, backend="gloo")
async def test_a_rank_that_runs_out_of_descriptors_says_so() -> None:
    rank = int(os.environ["RANK"])
    store = await StoreClient.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=20)
    room = store.prefix(os.environ["TORCHELASTIC_RUN_ID"])
    bells = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    context = context_of(room, rank, 2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:  # enough for its pipe and socket, not for what comes
        free = [os.dup(0) for _ in range(5)]
        for fd in free:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, limits[1]))
    try:
        async with asyncio.timeout(20):
            with pytest.raises(UnsuitableError, match=r"rank 1 cannot .*: Too many open files: 6 more .*ulimit -n"):
                await bootstrap_segment(context, SETTINGS, layout_of(2), bells)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for fd in bells:
        os.close(fd)
    await store.aclose()


async def test_an_error_keeps_no_mapping() -> None:
    """Its traceback keeps the frames of the bootstrap for as long as the program keeps the error."""
    gc.collect()  # the mappings of earlier tests
    bells = os.eventfd(0), os.eventfd(0)
    connecting = asyncio.ensure_future(
        bootstrap_segment(context_of(MemoryStore(), 0, 2), SETTINGS, layout_of(2), bells)  # rank 1 never comes
    )
    while "memfd:asynccomm (deleted)" not in Path("/proc/self/maps").read_text():
        await asyncio.sleep(0)
    connecting.cancel()
    try:
        await connecting
    except asyncio.CancelledError as exc:
        error = exc
    assert error.__traceback__ is not None
    assert "memfd:asynccomm (deleted)" not in Path("/proc/self/maps").read_text()
    for bell in bells:
        os.close(bell)
