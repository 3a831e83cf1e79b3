"""The events of a comm: streams, hooks, and what a slow reader loses."""

import asyncio
import contextlib
import time
from typing import Any

import pytest
import torch

from asynccomm import (
    AbortedError,
    BrokenError,
    CollectiveTimeoutError,
    Comm,
    MemoryStore,
    SignalCmpOp,
    join_comm,
    new_comm,
)
from asynccomm.observe.events import Event, EventStream
from asynccomm.observe.watchers import NOTED
from asynccomm.ops import Barrier
from asynccomm.testing.local import loopback_world
from tests.waiting import until


async def read(stream: EventStream) -> list[Event]:
    """The events so far, at least one."""
    stream.close()
    return [event async for event in stream]


def kinds(events: list[Event]) -> list[tuple[str, int]]:
    return [(event.kind, event.seq) for event in events]


async def test_a_call_gives_call_send_and_completion() -> None:
    async with loopback_world(2) as (a, b):
        stream = a.events()
        before = time.monotonic()
        first = a.all_reduce(torch.ones(4), tag="grads")
        assert [(event.kind, event.seq) for event in [await anext(stream), await anext(stream)]] == [
            ("call", 0),
            ("send", 0),
        ]
        await asyncio.gather(first, b.all_reduce(torch.ones(4), tag="grads"))
        done = await anext(stream)
        assert (done.kind, done.seq, done.tag, done.nbytes, str(done.op)) == (
            "completion",
            0,
            "grads",
            16,
            "all_reduce(float32[4], SUM, tag='grads')",
        )
        assert __file__ in done.site
        assert done.started is not None
        assert before <= done.started <= done.time <= time.monotonic()


async def test_a_deferred_call_is_sent_at_the_end_of_its_scope() -> None:
    async with loopback_world(1) as (comm,):
        stream = comm.events()
        async with comm.coalesce():
            works = [comm.all_reduce(torch.ones(2)), comm.all_reduce(torch.ones(2))]
        await asyncio.gather(*works)
        events = await read(stream)
        assert [event.kind for event in events] == ["call", "call"] + ["send", "completion"] * 2
        assert [event.seq for event in events if event.kind == "call"] == [-1, -1]
        assert [event.seq for event in events if event.kind == "completion"] == [0, 1]
        assert [event.time for event in events[2:4]] == sorted(event.time for event in events[2:4])
        assert [event.time for event in events[4:]] == sorted(event.time for event in events[4:])


async def test_operations_beside_the_sequence_give_events_and_metrics() -> None:
    async with loopback_world(2, hints={"metrics": "on"}) as (a, b):
        stream, ended = a.events(), list[Event]()
        a.add_hook(post=ended.append)
        await asyncio.gather(a.monitored_barrier(), b.monitored_barrier())
        windows = await asyncio.gather(a.window(8), b.window(8))
        await asyncio.gather(*(window.aclose() for window in windows))
        events = [event for event in await read(stream) if event.op is not None and event.op.p2p]
        calls = [("monitored_barrier", 0), ("window", 1), ("fence", 0)]
        for kind in ("call", "send", "completion"):
            assert [(event.op.kind, event.seq) for event in events if event.op and event.kind == kind] == calls
        assert [event.op.kind for event in ended if event.op and event.op.p2p] == [kind for kind, _ in calls]
        assert __file__ in events[0].site
        measured = a.statistics().measured
        assert measured is not None
        assert measured.metrics.kinds["monitored_barrier"].completed == 1


async def test_a_hook_refuses_an_operation_beside_the_sequence() -> None:
    def refuse(event: Event) -> None:
        raise PermissionError(str(event.op))

    async with loopback_world(1) as (comm,):
        hook = comm.add_hook(pre=refuse)
        with pytest.raises(PermissionError, match=r"monitored_barrier\(\)"):
            comm.monitored_barrier()
        assert comm.statistics().in_flight == 0
        hook.remove()
        await comm.monitored_barrier()


async def test_a_failure_an_abort_and_the_departure_of_a_rank() -> None:
    async with loopback_world(2) as (a, b):
        stream = a.events()
        work = a.all_reduce(torch.ones(2))
        b.abort("enough")
        with pytest.raises(AbortedError):
            await work
        await until(lambda: len(stream._notes) >= 4)
        events = await read(stream)
        assert {event.kind for event in events} == {"call", "send", "failure", "abort"}
        failure, abort = (next(event for event in events if event.kind == kind) for kind in ("failure", "abort"))
        assert isinstance(failure.error, AbortedError)
        assert (failure.seq, abort.rank, abort.reason) == (0, 1, "enough")


async def test_a_rank_that_closes_is_a_change_of_members() -> None:
    async with loopback_world(2) as (a, b):
        stream = a.events()
        await b.aclose()
        event = await asyncio.wait_for(anext(stream), 10)
        assert (event.kind, event.rank, event.reason) == ("membership", 1, "")


async def test_a_rank_that_is_lost_and_the_comm_of_the_others_are_changes_of_members() -> None:
    async with loopback_world(3) as comms:
        seen: list[Event] = []
        stream = comms[0].events()
        hook = comms[0].add_hook(membership=seen.append)
        channel = comms[1]._session.identity.job.channel
        assert channel is not None
        channel.call(channel._begin_closing)  # the connections end as those of a killed process
        await until(lambda: seen)
        async with asyncio.timeout(20):
            new = await asyncio.gather(comms[0].shrink(), comms[2].shrink())
            await asyncio.gather(*(comm.aclose() for comm in new))
        changes = [event for event in await read(stream) if event.kind == "membership"]
        hook.remove()
    assert [(event.rank, event.members) for event in changes] == [(1, None), (None, (0, 2))]
    assert changes[0].reason
    assert [event[2:] for event in seen] == [event[2:] for event in changes]


async def test_newcomers_of_a_reconfigured_comm_are_members_without_a_rank() -> None:
    store = MemoryStore()
    comm = await new_comm("gloo", store=store, rank=0, size=1)
    stream = comm.events()
    async with asyncio.timeout(20):
        joining = asyncio.ensure_future(_joined(store))
        while not (waiting := await comm.newcomers()):
            await asyncio.sleep(0)
        new = await asyncio.gather(comm.reconfigure([*waiting, 0]), joining)
        await asyncio.gather(*(each.aclose() for each in new))
    changes = [event.members for event in await read(stream) if event.members is not None]
    assert changes == [(-1, 0)]


async def _joined(store: MemoryStore) -> Comm:
    return await join_comm("gloo", store=store, timeout=20)


async def test_a_slow_reader_loses_the_oldest_and_their_number_is_known() -> None:
    async with loopback_world(1) as (comm,):
        stream = comm.events(size=3)
        for _ in range(4):
            await comm.barrier()
        assert stream.dropped == 9
        assert kinds(await read(stream)) == [("call", 3), ("send", 3), ("completion", 3)]


async def test_the_stream_ends_with_the_comm() -> None:
    async with loopback_world(1) as (comm,):
        stream = comm.events()
        reading = asyncio.create_task(read_all(stream))
        await comm.barrier()
    assert [event.kind for event in await reading] == ["call", "send", "completion"]
    assert [event async for event in stream] == []


async def read_all(stream: EventStream) -> list[Event]:
    return [event async for event in stream]


async def test_cancelling_the_reader_loses_no_event() -> None:
    async with loopback_world(1) as (comm,):
        stream = comm.events()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                await anext(stream)
        await comm.barrier()
        assert (await anext(stream)).kind == "call"


async def test_hooks_are_called_before_and_after() -> None:
    async with loopback_world(1) as (comm,):
        seen: list[tuple[str, str]] = []
        hook = comm.add_hook(
            pre=lambda event: seen.append(("pre", event.kind)), post=lambda event: seen.append(("post", event.kind))
        )
        await comm.barrier()
        assert seen == [("pre", "call"), ("post", "completion")]
        hook.remove()
        hook.remove()
        await comm.barrier()
        assert len(seen) == 2
        assert comm._submitter.counts.detours == 0


async def test_an_operation_in_flight_is_no_event_for_a_hook_that_was_removed_and_a_stream_that_was_closed() -> None:
    async with loopback_world(2) as (a, b):
        seen: list[str] = []
        hook, stream = a.add_hook(post=lambda event: seen.append(event.kind)), a.events()
        work = a.all_reduce(torch.ones(2))
        hook.remove()
        stream.close()
        await asyncio.gather(work, b.all_reduce(torch.ones(2)))
        assert not seen
        assert [event.kind async for event in stream] == ["call", "send"]


async def test_an_event_that_another_thread_has_begun_to_report_does_not_reach_a_removed_hook() -> None:
    async with loopback_world(1) as (comm,):
        seen: list[object] = []
        hook = comm.add_hook(pre=seen.append, abort=seen.append, membership=seen.append)
        hook.remove()
        hook.before(Barrier())
        hook.departed(1, "")
        hook.broke(BrokenError("test"))
        assert not seen


async def test_an_exception_of_a_pre_hook_refuses_the_call() -> None:
    async with loopback_world(1) as (comm,):

        def refuse(event: Event) -> None:
            raise ValueError("not now")

        hook = comm.add_hook(pre=refuse)
        with pytest.raises(ValueError, match="not now"):
            comm.barrier()
        assert comm.statistics().submitted == 0
        hook.remove()
        await comm.barrier()


async def test_an_exception_of_a_post_hook_hurts_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr("threading.excepthook", said.append)
    async with loopback_world(1) as (comm,):
        comm.add_hook(post=lambda event: 1 / 0)
        assert (await comm.all_reduce(torch.ones(1))).item() == 1
    assert [args.exc_type for args in said] == [ZeroDivisionError]


async def test_the_abort_hook_gets_the_error() -> None:
    async with loopback_world(2) as (a, b):
        seen: list[BaseException] = []
        a.add_hook(abort=seen.append)
        work = a.all_reduce(torch.ones(1), timeout=0.05)
        with pytest.raises(CollectiveTimeoutError):
            await work
        await until(lambda: seen)
        assert isinstance(seen[0], CollectiveTimeoutError)
        del b


async def test_arguments_are_checked() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(ValueError, match="size must be a positive integer, got 0"):
            comm.events(size=0)
        with pytest.raises(TypeError, match="pre must be callable, got 3"):
            comm.add_hook(pre=3)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
async def test_calls_of_the_fast_path_have_their_events(comm: Comm) -> None:
    tensor = torch.ones(2)
    await comm.all_reduce(tensor)
    stream = comm.events()
    assert comm._submitter.counts.detours == 0, "the fast path goes on"
    await comm.all_reduce(tensor)
    if comm.rank == 0:
        await comm.send(tensor, 1, tag=7)
    else:
        await comm.recv(tensor, 0, tag=7)
    events = await read(stream)
    assert sorted(kinds(events)) == sorted([(kind, seq) for seq in (1, 0) for kind in ("call", "send", "completion")])
    assert {event.tag for event in events if event.seq == 0} == {"7"}
    assert all(__file__ in event.site for event in events)
    async with comm.coalesce():
        stream = comm.events()
        works = [comm.all_reduce(torch.ones(2)) for _ in range(3)]
    await asyncio.gather(*works)
    assert sorted({event.seq for event in await read(stream) if event.kind == "completion"}) == [2, 3, 4]
    assert comm._submitter.counts.noted_calls == 0


@pytest.mark.ranks(1)
async def test_a_reader_that_waits_gets_a_call_of_the_fast_path_at_once(comm: Comm) -> None:
    tensor, counts = torch.ones(2), comm._submitter.counts
    stream = comm.events()
    for turn in range(3):
        first = asyncio.create_task(anext(stream))
        await until(lambda: counts.noted_calls == 1)
        await comm.all_reduce(tensor)  # the only one
        async with asyncio.timeout(10):
            event = await first
        assert (event.kind, event.seq) == ("call", turn)
        assert counts.noted_calls == NOTED
        assert [(await anext(stream)).kind for _ in range(2)] == ["send", "completion"]
    for _ in range(NOTED + 5):
        await comm.all_reduce(tensor)
    events = await read(stream)
    assert [event.seq for event in events if event.kind == "completion"] == list(range(3, NOTED + 8))


@pytest.mark.ranks(1)
async def test_a_slow_reader_loses_the_oldest_calls_of_the_fast_path(comm: Comm) -> None:
    tensor = torch.ones(2)
    await comm.all_reduce(tensor)
    stream = comm.events(size=8)
    for _ in range(3 * NOTED):
        await comm.all_reduce(tensor)
    events = await read(stream)
    assert [event.seq for event in events if event.kind == "completion"] == list(range(3 * NOTED - 7, 3 * NOTED + 1))
    assert stream.dropped == 3 * NOTED - 8


@pytest.mark.ranks(1)
async def test_calls_that_the_fast_path_has_held_and_python_sends_or_drops(comm: Comm) -> None:
    tensors = [torch.ones(2) for _ in range(3)]
    async with comm.coalesce():
        comm.all_reduce(tensors[0])  # from now on the fast path holds such calls
    stream = comm.events()
    async with comm.coalesce():
        comm.all_reduce(tensors[0])
        comm.all_reduce(tensors[1])
        comm.all_reduce(tensors[2], timeout=5)  # which Python holds, so it sends all three
    with contextlib.suppress(ZeroDivisionError):
        async with comm.coalesce():
            comm.all_reduce(tensors[0])
            raise ZeroDivisionError
    events = await read(stream)
    assert sorted(kinds(events)) == sorted(
        [("call", -1)] * 4 + [(kind, seq) for kind in ("send", "completion") for seq in (1, 2, 3)] + [("failure", -1)]
    )


async def test_a_stream_has_one_reader() -> None:
    async with loopback_world(1) as (comm,):
        stream = comm.events()
        first = asyncio.create_task(anext(stream))
        await until(lambda: stream._waiter is not None)
        with pytest.raises(RuntimeError, match="each reader needs a stream of its own"):
            await anext(stream)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        await comm.barrier()
        assert (await anext(stream)).kind == "call"


@pytest.mark.ranks(1)
async def test_operations_on_windows_are_events(comm: Comm) -> None:
    async with await comm.window(64, signals=1) as window:
        stream = comm.events()
        await window.put(torch.ones(4), 0)
        await window.put(torch.ones(4, 2)[:, 0], 0)  # not contiguous: the ordinary path
        await window.accumulate(torch.ones(4), 0)
        await window.wait_signal(0, 0, SignalCmpOp.EQ)
        events = await read(stream)
    done = [(event.op.kind, event.seq, event.nbytes) for event in events if event.op and event.kind == "completion"]
    assert done == [("put", 0, 16), ("put", 1, 16), ("accumulate", 2, 16), ("wait_signal", 3, 0)]
    assert len([event for event in events if event.kind == "call"]) == 4
