"""How a session connects and ends. On loopback where one process is enough, else on gloo."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asynccomm import (
    AbortedError,
    BackendError,
    BrokenError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Comm,
    MemoryStore,
    PeerLostError,
    ReduceOp,
    Work,
    new_comm,
    wrap,
)
from asynccomm.backends.base import Backend
from asynccomm.backends.loopback import Hub, LoopbackBackend
from asynccomm.blocking.portal import awaited
from asynccomm.comm.connecting import connect_session
from asynccomm.control.channel import ControlChannel
from asynccomm.control.diagnosis import RankState
from asynccomm.control.timing import SILENT_SECONDS
from asynccomm.interop.torch_work import TorchWork
from asynccomm.observe.watchers import Watcher
from asynccomm.ops import Barrier, Recv
from asynccomm.testing.local import loopback_world
from tests.comm.sessions import alone
from tests.forking import fork
from tests.sampling import amount
from tests.waiting import until


def hub_of(comm: Comm) -> Hub:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, LoopbackBackend)
    return backend.hub


def channel_of(comm: Comm) -> ControlChannel:
    channel = comm._session.identity.job.channel
    assert channel is not None
    return channel


# -- alone, with one rank and without a control channel


async def test_a_failure_settles_works_aborts_the_backend_and_notifies_the_observer() -> None:
    session = alone(MemoryStore())
    await connect_session(session, {"loopback": LoopbackBackend}, 10)
    observed: list[BrokenError] = []

    class Observer(Watcher):
        def broke(self, error: BrokenError) -> None:
            observed.append(error)

    session.submitter.watch(Observer())
    work = session.submitter.submit(Recv.of(session.group, torch.ones(1), 0, 0), None, None)
    error = BackendError("cut")
    session.submitter.on_failure(error)
    assert work.exception() is error
    assert observed == [error]
    session.submitter.on_failure(BackendError("again"))
    assert observed == [error], "the first error is final"
    assert session.error is error
    await session.aclose()


async def test_a_new_time_limit_shows_in_the_options() -> None:
    session = alone(MemoryStore(), timeout=30)
    session.set_timeout(5)
    assert (session.options.timeout, session.in_flight.counts.limit) == (5, 5)
    await session.aclose()


async def test_an_operation_aside_is_settled_by_its_steps() -> None:
    session = alone(MemoryStore())

    async def steps(work: Work[Any]) -> None:
        await asyncio.sleep(0)
        raise BackendError("failed")

    async def hang(work: Work[Any]) -> None:
        await asyncio.sleep(60)

    failed, hanging = session.run_aside(Barrier(), steps, None), session.run_aside(Barrier(), hang, None)
    with pytest.raises(BackendError, match="failed"):
        await failed
    session.abort("enough")
    with pytest.raises(AbortedError, match="enough"):
        await hanging
    await session.aclose()


# -- on several ranks


async def test_mismatched_collectives_fail_everywhere_with_both_descriptions() -> None:
    async with loopback_world(3) as comms:
        works = [
            comms[0].all_reduce(torch.ones(3)),
            comms[1].all_reduce(torch.ones(4)),
            comms[2].all_reduce(torch.ones(3)),
        ]
        for work in works:
            with pytest.raises(CollectiveMismatchError) as caught:
                await work
            assert "all_reduce(float32[3], SUM)" in str(caught.value)
            assert "rank 1 has all_reduce(float32[4], SUM)" in str(caught.value)


async def test_premul_factors_may_differ_but_ops_may_not() -> None:
    async with loopback_world(2) as (a, b):
        tensor = torch.ones(1)
        works = [a.all_reduce(tensor, ReduceOp.PREMUL_SUM(2)), b.all_reduce(torch.ones(1), ReduceOp.PREMUL_SUM(5))]
        await asyncio.gather(*works)
        assert tensor.item() == 7
        bad = [a.all_reduce(tensor, ReduceOp.MAX), b.all_reduce(torch.ones(1), ReduceOp.MIN)]
        for work in bad:
            with pytest.raises(CollectiveMismatchError):
                await work


async def test_message_of_another_size_fails_with_both_descriptions() -> None:
    async with loopback_world(2) as (a, b):
        works = [a.send(torch.ones(4), 1), b.recv(torch.ones(3), 0)]
        for work in works:
            with pytest.raises(CollectiveMismatchError, match=r"send\(float32\[4\].*recv\(float32\[3\]"):
                await work


async def test_transport_errors_break_the_comm() -> None:
    async with loopback_world(2) as (a, b):
        work = a.barrier()
        hub_of(a).fail("the cable was cut")
        with pytest.raises(BackendError, match="cable"):
            await work
        await until(lambda: "broken" in repr(b))
        with pytest.raises(BrokenError, match="cable"):
            b.barrier()


async def test_deadline_names_the_ranks_that_did_not_come() -> None:
    async with loopback_world(4) as comms:
        works = [comms[r].all_reduce(torch.ones(2), timeout=0.05 if r == 0 else None) for r in (0, 2)]
        with pytest.raises(CollectiveTimeoutError) as caught:
            await works[0]
        assert caught.value.missing == (1, 3)
        assert caught.value.seq == 0
        assert caught.value.timeout == 0.05
        with pytest.raises(AbortedError, match=r"CollectiveTimeoutError.*not arrived: ranks \[1, 3\]"):
            await works[1]
        with pytest.raises(CollectiveTimeoutError):
            comms[0].barrier()


async def test_deadline_of_a_message_names_the_peer() -> None:
    async with loopback_world(3) as comms:
        with pytest.raises(CollectiveTimeoutError) as caught:
            await comms[0].recv(torch.ones(1), 2, timeout=0.05)
        assert caught.value.missing == (2,)


async def test_deadline_of_a_receive_from_any_source_names_all_others() -> None:
    async with loopback_world(3) as comms:
        with pytest.raises(CollectiveTimeoutError, match="src=any") as caught:
            await comms[1].recv(torch.ones(1), timeout=0.05)
        assert caught.value.missing == (0, 2)


async def test_an_operation_that_completes_during_the_roll_call_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2) as (a, b):
        asked, released = asyncio.Event(), asyncio.Event()
        reporter = a._session.reporter
        assert reporter is not None
        states = reporter.states

        async def late_states(*args: Any, **kwargs: Any) -> dict[int, RankState]:
            asked.set()
            await released.wait()
            return await states(*args, **kwargs)

        monkeypatch.setattr(reporter, "states", late_states)
        hub_of(a).hold()
        work = a.barrier(timeout=0.05)
        b.barrier()
        await asked.wait()
        hub_of(a).release()
        released.set()
        await work
        hub_of(a).hold()
        asked.clear()
        b.barrier()
        with pytest.raises(CollectiveTimeoutError):
            await a.barrier(timeout=0.05)
        assert work.exception() is None


async def test_abort_fails_this_rank_at_once_and_the_others_soon() -> None:
    async with loopback_world(3) as comms:
        works = [comm.barrier() for comm in comms[:2]]
        comms[1].abort("I have seen enough")
        assert works[1].done()
        with pytest.raises(AbortedError, match="aborted by rank 1: I have seen enough"):
            await works[0]
        await until(lambda: "broken" in repr(comms[2]))


async def test_abort_from_another_thread() -> None:
    async with loopback_world(2) as (a, b):
        work = a.barrier()
        await asyncio.to_thread(a.abort, "from a thread")
        assert work.done()
        await until(lambda: "broken" in repr(b))


async def test_one_failure_among_tasks_ends_the_others() -> None:
    store = MemoryStore()

    async def rank(r: int) -> None:
        async with new_comm("loopback", name="t", store=store, rank=r, size=3) as comm:
            await comm.barrier()
            if r == 1:
                raise ZeroDivisionError("rank 1 cannot divide")
            await comm.barrier()

    results = await asyncio.gather(*(rank(r) for r in range(3)), return_exceptions=True)
    assert isinstance(results[1], ZeroDivisionError)
    for r in (0, 2):
        assert isinstance(results[r], AbortedError)
        assert str(results[r]) == "aborted by rank 1: ZeroDivisionError: rank 1 cannot divide"


async def test_unretrieved_errors_are_reported_once() -> None:
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    async with loopback_world(2) as (a, b):
        for _ in range(5):
            a.barrier()
        b.abort("nobody listens")
        await until(lambda: "broken" in repr(a))
        gc.collect()
        await until(lambda: len(reports) > 0)
    gc.collect()
    await asyncio.sleep(0)
    assert len(reports) == 1
    assert "nobody listens" in str(reports[0]["exception"])


async def test_aclose_waits_for_operations_in_flight_and_refuses_calls() -> None:
    async with loopback_world(2) as (a, b):
        work = a.barrier()
        closing = asyncio.ensure_future(a.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        with pytest.raises(ClosedError, match="'test' is closed"):
            a.barrier()
        b.barrier()
        await closing
        assert work.exception() is None
        await a.aclose()


async def test_a_deadline_also_ends_aclose() -> None:
    async with loopback_world(2) as (a, _):
        work = a.barrier(timeout=0.05)
        await a.aclose()
        assert isinstance(work.exception(), CollectiveTimeoutError)


async def test_cancelling_aclose_aborts() -> None:
    async with loopback_world(2) as (a, b):
        work = a.barrier()
        closing = asyncio.ensure_future(a.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert isinstance(work.exception(), AbortedError)
        await until(lambda: "broken" in repr(b))


def test_dropping_a_comm_of_a_closed_loop_ends_the_control_channel() -> None:
    async def make() -> list[Comm]:
        store = MemoryStore()
        return list(await asyncio.gather(*(new_comm("loopback", store=store, rank=r, size=3) for r in range(3))))

    comms = asyncio.run(make())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "asynccomm control"]
    with pytest.warns(ResourceWarning, match="never closed"):
        del comms
        gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_a_dropped_comm_ends_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    async def make() -> Comm:
        return await new_comm("loopback", store=MemoryStore(), rank=0, size=1)

    comm = asyncio.run(make())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "asynccomm control"]
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_type))
        del comm
        gc.collect()
    assert seen == [ResourceWarning]
    thread.join(20)
    assert not thread.is_alive()


def test_dropping_a_comm_at_the_end_of_its_loop_ends_the_control_channel() -> None:
    """What it puts on the loop is not done any more."""

    async def make() -> Comm:
        return await new_comm("loopback", store=MemoryStore(), rank=0, size=1)

    loop = asyncio.new_event_loop()
    comm = loop.run_until_complete(make())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "asynccomm control"]
    with pytest.warns(ResourceWarning, match="never closed"):
        del comm
        gc.collect()
    loop.close()
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_a_comm_that_is_dropped_in_the_last_turns_of_its_loop_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def make() -> list[Comm]:
        store = MemoryStore()
        return list(await asyncio.gather(*(new_comm("loopback", store=store, rank=r, size=2) for r in range(2))))

    async def turns(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    for count in range(1, 5):
        loop = asyncio.new_event_loop()
        comms = loop.run_until_complete(make())
        with pytest.warns(ResourceWarning, match="never closed"):
            del comms
            gc.collect()
        loop.run_until_complete(turns(count))
        loop.close()
        gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_forgetting_to_close_warns() -> None:
    store = MemoryStore()
    comm = await new_comm("loopback", name="t", store=store, rank=0, size=1)
    with pytest.warns(ResourceWarning, match="never closed"):
        del comm
        gc.collect()
    async with new_comm("loopback", name="t", store=store, rank=0, size=1) as again:  # and the name is free again
        await again.barrier()


async def test_calls_in_a_forked_child_raise() -> None:
    async with loopback_world(2) as (comm, other):
        pending = comm.barrier()
        read, write = os.pipe()
        pid = fork()
        if pid == 0:
            try:
                comm.abort("in the child")
                comm.barrier()
            except ClosedError as exc:
                os.write(write, str(exc).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert b"before this process was forked" in os.read(read, 1000)
        os.close(read)
        os.close(write)
        await asyncio.gather(pending, other.barrier())


@pytest.mark.parametrize("numel", [1, 300_000])
@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_a_forked_child_waits_for_no_operation_of_its_parent(numel: int, comm: Comm) -> None:
    """Which goes on in the parent, and loses nothing."""
    for _ in range(2):
        tensor = torch.zeros(numel)
        await (comm.send(torch.ones(numel), 1) if comm.rank == 0 else comm.recv(tensor, 0))
    await comm.barrier()
    if comm.rank == 0:
        await comm.recv(torch.zeros(1), 1, tag=1)
        await comm.send(torch.full((numel,), 7.0), 1)
        return
    callbacks: list[int] = []
    pending = comm.recv(tensor, 0)
    pending.add_done_callback(lambda _: callbacks.append(1))
    read, write = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # ends it if it waits
            pending.wait()
        except BaseException as exc:
            os.write(write, f"{exc!r} {callbacks}".encode())
        finally:
            os._exit(0)
    await asyncio.to_thread(os.waitpid, pid, 0)
    os.close(write)
    said = os.read(read, 1000)
    os.close(read)
    assert b"before this process was forked" in said
    assert said.endswith(b"[]")
    await comm.send(torch.zeros(1), 0, tag=1)
    await pending
    assert tensor.eq(7).all()


async def awaited_as_of_torch(work: Work[Any]) -> None:
    await wrap(TorchWork([work], []))


@pytest.mark.parametrize("error", [None, LookupError])
@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_a_forked_child_leaves_the_comm_to_its_parent(error: type[Exception] | None, comm: Comm) -> None:
    """With an operation in flight, for which the child does not wait."""
    await comm.barrier()
    received = comm.recv(torch.zeros(1), 1 - comm.rank)
    pid = fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # ends it if it waits
            async with comm:
                with pytest.raises(ClosedError, match="before this process was forked"):
                    await received
                with pytest.raises(ClosedError, match="before this process was forked"):
                    asyncio.run(awaited(received))
                with pytest.raises(ClosedError, match="before this process was forked"):
                    asyncio.run(awaited_as_of_torch(received))
                if error is not None:
                    raise error
            code = 0
        except LookupError:
            code = 0
        finally:
            os._exit(code)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    await comm.send(torch.ones(1), 1 - comm.rank)
    assert (await received).item() == 1
    await comm.barrier()


async def test_calls_on_a_loop_of_a_forked_child_raise() -> None:
    async with loopback_world(1) as (comm,):
        pid = fork()
        if pid == 0:
            code = 1
            try:
                with asyncio.Runner() as runner:
                    for call in (comm.barrier, comm.ready, comm.diagnose, comm.dup):
                        with pytest.raises(ClosedError, match="before this process was forked"):
                            runner.run(_called(call))
                    runner.run(comm.aclose())
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        await comm.barrier()


async def _called(call: Callable[[], Awaitable[Any]]) -> None:
    await call()


# -- on processes -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3, backend="gloo")
async def test_a_rank_that_raises_ends_the_others_with_its_reason() -> None:
    rank = int(os.environ["RANK"])
    with pytest.raises(ZeroDivisionError if rank == 1 else AbortedError) as caught:
        async with new_comm("gloo", name="inner") as comm:
            if rank == 1:
                raise ZeroDivisionError("rank 1 cannot divide")
            await comm.all_reduce(torch.ones(1 << 20))
    if rank != 1:
        assert str(caught.value) == "aborted by rank 1: ZeroDivisionError: rank 1 cannot divide"


@pytest.mark.ranks(3, backend="gloo")
async def test_a_deadline_on_processes_names_the_absent_rank(comm: Comm) -> None:
    if comm.rank == 2:
        while True:  # never comes, and hears that the others have given up
            try:
                await comm.ready()
                await asyncio.sleep(0.01)
            except BrokenError as exc:
                assert "all_reduce" in str(exc)
                return
    with pytest.raises((CollectiveTimeoutError, AbortedError), match=r"not arrived: ranks \[2\]"):
        await comm.all_reduce(torch.ones(4), timeout=0.3)


@pytest.mark.ranks(2, backend="gloo")
async def test_a_stopped_rank_is_found_by_a_deadline(comm: Comm) -> None:
    """SIGSTOP: the connection stays, nothing answers."""
    if comm.rank == 1:
        with pytest.raises(BrokenError):
            await comm.all_gather(None, torch.tensor(os.getpid()))  # it may be stopped before it has heard of its end
            while True:
                await comm.barrier()
        return
    pids = await comm.all_gather(None, torch.tensor(os.getpid()))
    os.kill(int(pids[1]), signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError) as caught:
            while True:  # it may have called some before it was stopped
                await comm.barrier(timeout=0.3)
        assert caught.value.missing == (1,)
        assert time.monotonic() - start < 10
    finally:
        os.kill(int(pids[1]), signal.SIGCONT)


@pytest.mark.ranks(3, backend="gloo")
async def test_a_killed_rank_fails_the_pending_operations_of_the_others() -> None:
    rank = int(os.environ["RANK"])
    comm = await new_comm("gloo", name="inner")
    pids = await comm.all_gather(None, torch.tensor(os.getpid()))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) if rank == 0 else None
    del pids, child
    if rank == 2:
        comm.unsafe_get_backend().abort()  # what the kernel does to a killed process: its connections close
        with pytest.raises(BrokenError):
            await comm.barrier()
    else:
        with pytest.raises(BrokenError):
            await comm.all_reduce(torch.ones(1 << 20))
    await comm.aclose()


@pytest.mark.ranks(2, backend="gloo")
async def test_thousand_operations_leak_nothing(comm: Comm) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    for _ in range(50):
        await comm.all_reduce(torch.ones(16))
    held, threads = descriptors(), threading.active_count()
    for _ in range(1000):
        await comm.all_reduce(torch.ones(16))
    assert comm.statistics().in_flight == 0
    # some of an earlier test may just be ending, and somebody who looks at what goes on here may just be connected
    await until(lambda: descriptors() <= held and threading.active_count() <= threads)


async def test_by_option_a_broken_comm_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(os, "abort", lambda: ended.append(True))
    async with loopback_world(2, abort_process_on_timeout_or_error=True) as (a, b):
        with pytest.raises(CollectiveTimeoutError):
            await a.barrier(timeout=0.05)
        await until(lambda: "broken" in repr(b))
    assert ended == [True], "the rank whose operation failed ends, not those that only hear of it"


async def test_ranks_that_do_not_answer_do_not_hold_up_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2) as (a, b):
        monkeypatch.setattr(channel_of(b)._requests, "on_request", lambda source, request: None)
        with pytest.raises(CollectiveTimeoutError) as caught:
            await a.barrier(timeout=0.05)
        assert caught.value.missing == (1,)
        assert "rank 1: does not answer" in str(caught.value)


async def test_ranks_behind_one_that_does_not_answer_are_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(4) as world:
        inner, other = await asyncio.gather(*(world[rank].split([1, 2], "inner") for rank in (1, 2)))
        monkeypatch.setattr(channel_of(world[0])._router, "received", lambda link, data: None)
        with pytest.raises(CollectiveTimeoutError) as caught:
            await world[2].barrier(timeout=0.05)
        assert caught.value.missing == (0,)
        assert caught.value.arrived == (2,)
        assert "ranks [1, 3] could not be asked, as it passes messages on to them" in str(caught.value)
        found = await world[3].diagnose(timeout=0.2)
        assert found.behind == (0,)
        assert "rank 1 could not be asked: rank 0, which passes messages on to it, does not answer" in str(found)
        monkeypatch.setattr(channel_of(inner), "silence", {0: SILENT_SECONDS + 1}.get)
        found = await inner.diagnose(timeout=0.2)
        assert found.behind == ()
        assert "rank 1 could not be asked: a rank outside this comm, which passes" in str(found)
        monkeypatch.undo()
        await asyncio.gather(inner.aclose(), other.aclose())


async def test_a_deadline_without_a_control_channel_names_no_rank() -> None:
    async with loopback_world(2, hints={"control": "off"}) as (a, b):
        with pytest.raises(CollectiveTimeoutError) as caught:
            await a.barrier(timeout=0.05)
        assert (caught.value.missing, caught.value.arrived) == ((), ())
        b.abort("nobody has told it")


async def cancel_closing(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Cancel ``aclose`` while it cleans up; the event lets that go on."""
    held, entered = asyncio.Event(), asyncio.Event()
    close = channel_of(comm).aclose

    async def slow_close() -> None:
        entered.set()
        await held.wait()
        await close()

    monkeypatch.setattr(channel_of(comm), "aclose", slow_close)
    closing = asyncio.ensure_future(comm.aclose())
    await entered.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    return held


async def test_cancelled_while_cleaning_up_aclose_can_be_awaited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as (comm,):
        held = await cancel_closing(comm, monkeypatch)
        held.set()
        async with asyncio.timeout(10):
            await comm.aclose()


async def test_the_name_is_free_once_closing_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    comm = await new_comm("loopback", name="t", store=store, rank=0, size=1)
    held = await cancel_closing(comm, monkeypatch)
    async with new_comm("loopback", name="t", store=store, rank=0, size=1) as other:
        await other.barrier()
        held.set()
        await comm.aclose()
        with pytest.raises(ValueError, match="name 't' is in use by an open comm"):  # the other comm's now
            await new_comm("loopback", name="t", store=store, rank=0, size=1)


async def test_closing_frees_everything_also_when_the_channel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    comm = await new_comm("loopback", name="t", store=store, rank=0, size=1)
    channel = channel_of(comm)
    close = channel.aclose

    async def fail() -> None:
        await close()
        raise ZeroDivisionError("cannot divide")

    monkeypatch.setattr(channel, "aclose", fail)
    with pytest.raises(ZeroDivisionError):
        await comm.aclose()
    async with new_comm("loopback", name="t", store=store, rank=0, size=1) as again:
        await again.barrier()


def test_threads_on_several_ranks_do_not_lock_each_other_out() -> None:
    async def main() -> None:
        async with loopback_world(2) as comms:

            def calls(comm: Comm) -> None:
                for _ in range(amount(2000, 800)):
                    comm.all_reduce(torch.ones(1))

            async with asyncio.timeout(60):
                await asyncio.gather(*(asyncio.to_thread(calls, comm) for comm in comms))

    asyncio.run(main())


class Stuck:
    """In place of a backend: a call of it does not come back until it is told to."""

    def __init__(self, backend: Backend) -> None:
        self.inside, self.release = threading.Event(), threading.Event()
        self.aborted = False
        self._backend = backend

    def submit(self, batch: object) -> None:
        self.inside.set()
        self.release.wait(30)

    def abort(self) -> None:
        self.aborted = True
        self._backend.abort()

    def before_await(self, work: object) -> None:
        pass

    def withdraw_tensors(self) -> None:
        pass


async def test_abort_while_another_thread_is_stuck_in_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the lock of the comm, and abort must not wait for it."""
    async with loopback_world(2) as (a, b):
        backend = a._session.backend
        assert backend is not None
        pending = a.barrier()
        stuck = Stuck(backend)
        monkeypatch.setattr(a._submitter, "backend", stuck)
        calling = asyncio.ensure_future(asyncio.to_thread(a.all_reduce, torch.ones(1)))
        assert await asyncio.to_thread(stuck.inside.wait, 10)
        await asyncio.wait_for(asyncio.to_thread(a.abort, "from a third thread"), 10)
        assert isinstance(pending.exception(), AbortedError)
        await until(lambda: "broken" in repr(b))
        with pytest.raises(AbortedError, match="from a third thread"):
            b.barrier()
        assert not calling.done()
        await until(lambda: stuck.aborted)
        stuck.release.set()
        work = await calling
        assert isinstance(work.exception(), AbortedError), "also what was just being submitted"
        monkeypatch.undo()


async def test_no_call_made_while_the_comm_breaks_stays_pending() -> None:
    for turn in range(amount(40, 12)):
        async with loopback_world(2) as (a, b):
            works: list[Work[Any]] = []
            started = threading.Event()

            def calls(comm: Comm = a, works: list[Work[Any]] = works, started: threading.Event = started) -> None:
                with contextlib.suppress(AbortedError):
                    while True:
                        works.append(comm.all_reduce(torch.ones(1)))
                        started.set()
                        if len(works) % 7 == 0:
                            with comm.coalesce():
                                works.append(comm.all_reduce(torch.ones(1)))

            threads = [asyncio.ensure_future(asyncio.to_thread(calls)) for _ in range(2)]
            assert await asyncio.to_thread(started.wait, 10)
            (a if turn % 2 else b).abort("enough")
            await asyncio.wait_for(asyncio.gather(*threads), 20)
            await until(lambda works=works: all(work.done() for work in works))
            assert all(isinstance(work.exception(), AbortedError) for work in works)


async def test_a_forked_child_does_not_wait_for_threads_that_are_not_in_it() -> None:
    async with loopback_world(1) as (comm,):
        with warnings.catch_warnings(), comm._session._breaking:  # as if another thread was at it
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if pid == 0:  # pragma: no cover
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)  # ends it if it waits
                try:
                    comm.abort("in vain")
                    os._exit(0)
                finally:
                    os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


async def test_a_loss_breaks_the_comm_even_if_draining_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def drain_before_failure(backend: Backend) -> None:
        raise ValueError("oh")

    monkeypatch.setattr(LoopbackBackend, "drain_before_failure", drain_before_failure)
    async with loopback_world(2) as (a, _):
        work = a.barrier()
        a._session.break_by(PeerLostError(1, "a test says so"))
        with pytest.raises(PeerLostError):
            await work
    assert "ValueError: oh" in caplog.text


async def test_the_death_of_a_rank_that_closed_a_child_does_not_break_the_child() -> None:
    async with loopback_world(2) as (a, b):
        one, other = await asyncio.gather(a.dup("child"), b.dup("child"))
        await other.aclose()
        channel = channel_of(b)
        channel._thread.call(channel._begin_closing)  # as if it was killed
        await until(lambda: "broken" in repr(a))
        with pytest.raises(PeerLostError, match="rank 1 was lost"):
            a.barrier()
        assert "broken" not in repr(one)
        await one.aclose()
        b.abort("it is gone")


EXITS_IN_FLIGHT = """
import asyncio, asynccomm, torch, sys
async def main():
    comm = await asynccomm.new_comm("gloo", name="t", timeout=30)
    await comm.barrier()
    if comm.rank == 0:
        comm.all_reduce(torch.ones(1 << 20))  # nobody joins in, nobody awaits, nobody closes
        print("leaving", flush=True)
        return
    try:
        await comm.recv(torch.ones(1), 0)
    except asynccomm.BrokenError as exc:
        print("heard", flush=True)
    await comm.aclose()
asyncio.run(main())
"""


@pytest.mark.real_end
def test_a_process_that_leaves_with_operations_in_flight_exits_cleanly(tmp_path: Path) -> None:
    """gloo's own threads would end the process by std::terminate."""
    script = tmp_path / "script.py"
    script.write_text(EXITS_IN_FLIGHT)
    store = f"file://{tmp_path}/store"
    code = EXITS_IN_FLIGHT.replace('name="t"', f'name="t", store="{store}"')
    script.write_text(code)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "leaving" in outputs[0][0]
    assert "heard" in outputs[1][0]


IDLE_AND_OPEN = """
import asyncio, asynccomm
async def main():
    global comm
    comm = await asynccomm.new_comm("gloo", name="t", store=STORE, timeout=30)
    await comm.barrier()
asyncio.run(main())
"""


@pytest.mark.real_end
def test_a_process_that_leaves_with_an_idle_comm_exits_cleanly(tmp_path: Path) -> None:
    for attempt in range(amount(8, 1)):  # it took several to see the end of the interpreter overtake gloo's threads
        script = tmp_path / f"script{attempt}.py"
        script.write_text(IDLE_AND_OPEN.replace("STORE", repr(f"file://{tmp_path}/store{attempt}")))
        processes = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [process.communicate(timeout=60)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], errors


async def test_unreachable_ranks_do_not_count_as_missing() -> None:
    store = MemoryStore()
    off = {"control": "off"}
    comms = await asyncio.gather(
        *(
            new_comm("loopback", store=store, rank=rank, size=3, timeout=20, hints=off if rank == 2 else None)
            for rank in range(3)
        )
    )
    works = [comm.barrier(timeout=0.3) for comm in comms[:2]]
    with pytest.raises(BrokenError):
        await works[1]
    error = works[0].exception()
    if not isinstance(error, CollectiveTimeoutError):  # the other one was quicker
        error = works[1].exception()
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == ()
    assert error.arrived == (0, 1)
    for comm in comms:
        comm.abort()
        await comm.aclose()
