"""Comms that block: every method, ways to end, and programs that are interrupted."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import asynccomm
from asynccomm import Comm, blocking
from asynccomm.blocking.comm import BlockingComm
from asynccomm.comm import flight
from tests.waiting import until

ELSEWHERE = {"aclose": "close", "loop": "loop"}  # methods of Comm with another name


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if name[0] != "_"}


def test_every_method_of_a_comm_is_there_with_its_arguments() -> None:
    ours = public(BlockingComm)
    assert {ELSEWHERE.get(name, name) for name in public(Comm)} <= ours
    assert ours - public(Comm) == {"close", "comm", "end_of_process"} & ours
    for name in public(Comm) - set(ELSEWHERE):
        theirs, mine = getattr(Comm, name), getattr(BlockingComm, name)
        if inspect.isfunction(theirs):
            assert list(inspect.signature(mine).parameters) == list(inspect.signature(theirs).parameters), name
            assert not inspect.iscoroutinefunction(mine), name


@pytest.mark.parametrize("name", ["new_comm", "join_comm", "pair_comm"])
def test_comms_are_made_with_the_same_arguments(name: str) -> None:
    theirs, mine = inspect.signature(getattr(asynccomm, name)), inspect.signature(getattr(blocking, name))
    assert list(mine.parameters.values()) == list(theirs.parameters.values())
    assert "blocking twin" in getattr(blocking, name).__doc__


def test_a_signal_writes_the_dump_also_while_a_wait_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flight.DIRECTORY, str(tmp_path))
    monkeypatch.setenv(flight.SIGNAL, "USR2")
    before = signal.getsignal(signal.SIGUSR2)
    dumped = threading.Event()

    def send() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        asyncio.run(until(lambda: (tmp_path / "rank_0").exists()))
        dumped.set()
        comm.send(torch.ones(1), 0)

    try:
        with blocking.new_comm(alone=True) as comm:
            work = comm.recv(torch.ones(1), 0)
            thread = threading.Thread(target=send)
            thread.start()
            work.wait()
            assert dumped.is_set()
            thread.join()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Future[float]()
    answer.set_result(1.5)
    with blocking.new_comm(alone=True) as comm:
        # shm cannot estimate
        monkeypatch.setattr(type(comm.unsafe_get_backend()), "estimate", lambda self, batch: answer)
        with comm.time_estimator() as estimate:
            comm.barrier()
        assert estimate.seconds == 1.5


def program(backend: str) -> None:
    with blocking.new_comm(backend, name="sync", timeout=40) as comm:
        rank, other = comm.rank, 1 - comm.rank
        assert comm.all_reduce(torch.ones(2)).wait().tolist() == [2, 2]
        assert comm.all_gather_object(rank).wait() == [0, 1]
        with comm.coalesce() as batch:
            comm.all_reduce(torch.ones(1))
            comm.all_gather_single(None, torch.tensor([rank]))
        assert [tensor.tolist() for tensor in batch.wait()] == [[2], [0, 1]]
        if rank == 0:
            with comm.sink(1) as sink:
                for number in range(3):
                    sink.put(number).wait()
            with pytest.raises(ZeroDivisionError), comm.sink(1, 1):
                raise ZeroDivisionError("here")
        else:
            stream = comm.stream(0)
            assert list(stream) == [0, 1, 2]
            assert list(stream) == []
            with pytest.raises(asynccomm.PayloadError, match="ZeroDivisionError: here"):
                next(comm.stream(0, 1))
        batched = comm.batch_op_create()
        arrived = torch.zeros(1)
        batched.send(torch.tensor([float(rank)]), other)
        batched.recv(arrived, other)
        batched.issue().wait()
        assert arrived.item() == other
        tokens = torch.full((rank + 1, 2), float(rank))
        sent = comm.dispatch(tokens, extras=[torch.arange(rank + 1)]).wait()
        assert (sent.rank_counts, sent.extras[0].tolist()) == ([1, 2], [0, 0, 1])
        assert comm.combine(sent.hidden, sent).wait().equal(2 * tokens)
        sent = comm.dispatch(tokens, asynccomm.Routing(torch.full((rank + 1, 1), other), 2)).wait()
        assert sent.hidden.equal(torch.full((other + 1, 2), float(other)))
        comm.monitored_barrier(20).wait()
        comm.ready()
        assert comm.preempted() is False
        assert comm.newcomers() == []
        assert not comm.diagnose(timeout=5).ranks[other].pending


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_a_program_without_a_loop(comm: Comm) -> None:
    await asyncio.to_thread(program, comm.backend)


def test_stacks_show_the_program_as_the_main_thread() -> None:
    with blocking.new_comm(name="stacks", alone=True, timeout=20) as comm:
        (state,) = comm.diagnose(stacks=True).ranks
    main, loop = state.stacks.split("event loop's thread:\n")
    assert main.startswith("main thread:\n")
    assert "comm.diagnose(stacks=True)" in main
    assert "in diagnose" in loop


def groups(backend: str) -> None:
    with blocking.new_comm(backend, name="groups", timeout=40) as comm:
        pair = [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1]
        with comm.split(pair, "pair") as half:
            assert isinstance(half, BlockingComm)
            assert half.parent_ranks == tuple(pair)
            assert half.all_reduce(torch.tensor(comm.rank)).wait().item() == sum(pair)
            column = comm.split([comm.rank % 2, comm.rank % 2 + 2], "column")
            assert column is not None
            received: Any
            with column:
                with blocking.coalesce(half, column) as both:
                    half.barrier()
                    column.barrier()
                both.wait()
                if comm.rank < 2:
                    column.send_tensor_dict({"t": torch.arange(4)}, 1, all_gather_group=half).wait()
                else:
                    received = column.recv_tensor_dict(0, all_gather_group=half).wait(20)
                    assert received["t"].tolist() == [0, 1, 2, 3]
        assert comm.split([], "none") is None
        one = comm.inter_node()
        assert (one is None) == (comm.rank > 0)
        if one is not None:
            one.close()
        if comm.rank == 3:
            for other in range(3):
                comm.send(torch.ones(1), other).wait()
        else:
            comm.recv(torch.empty(1), 3).wait()  # the shrink aborts the calls of rank 3
            with comm.shrink(exclude=[3]) as fewer:
                assert fewer.size == 3


@pytest.mark.ranks(2)
async def test_works_of_other_threads_and_errors(comm: Comm) -> None:
    def threads() -> None:
        with blocking.new_comm(name="threads", timeout=40, ordering="agreed") as shared:
            results: list[float] = []

            def one(number: int) -> None:
                results.append(shared.all_reduce(torch.tensor(float(number)), tag=str(number)).wait().item())

            several = [threading.Thread(target=one, args=[number]) for number in range(4)]
            for thread in several if comm.rank else reversed(several):
                thread.start()
            for thread in several:
                thread.join()
            assert sorted(results) == [0, 2, 4, 6]
            with pytest.raises(ValueError, match="ranks must include this rank"):
                shared.split([1 - comm.rank], "wrong")
            with pytest.raises(TypeError, match="reason must be a str"):
                shared.abort(7)  # type: ignore[arg-type]

    await asyncio.to_thread(threads)


async def test_a_loop_is_never_blocked() -> None:
    with pytest.raises(asynccomm.WouldBlockError, match="event loop of this thread"):
        blocking.new_comm(alone=True)
    comm = await asyncio.to_thread(lambda: blocking.new_comm(alone=True, name="apart"))
    with pytest.raises(asynccomm.WouldBlockError):
        comm.ready()
    await asyncio.to_thread(comm.close)


def test_closing_is_idempotent_and_ends_the_loop() -> None:
    comm = blocking.new_comm(alone=True)
    loop = comm.loop
    comm.close()
    comm.close()
    assert loop.is_closed()
    with pytest.raises(asynccomm.ClosedError):
        comm.barrier()
    with pytest.raises(asynccomm.ClosedError):
        comm.ready()


def test_a_forgotten_comm_warns_and_its_loop_ends() -> None:
    comm = blocking.new_comm(alone=True)
    loop = comm.loop
    with pytest.warns(ResourceWarning, match="was never closed"):
        del comm
        gc.collect()
    asyncio.run(until(loop.is_closed))


def test_a_forked_child_gets_errors_and_closes_nothing() -> None:
    with blocking.new_comm(alone=True) as comm:
        child = os.fork()
        if child == 0:
            fine = False
            try:
                with pytest.raises(asynccomm.ClosedError):
                    comm.ready()
                with pytest.raises(asynccomm.ClosedError):
                    comm.barrier()
                with comm:
                    pass
                comm.close()
                with blocking.new_comm(alone=True, name="own") as own:
                    fine = own.all_reduce(torch.ones(1)).wait().item() == 1
            finally:
                os._exit(0 if fine else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        comm.barrier().wait()


ENDS = """
import sys, torch
from asynccomm import blocking

comm = blocking.new_comm(alone=True)
comm.all_reduce(torch.ones(1)).wait()
{end}
"""


@pytest.mark.real_end
@pytest.mark.parametrize(
    "end", [pytest.param("", marks=pytest.mark.exhaustive), "sys.exit(0)", "comm.recv(torch.ones(1), 0, timeout=1)"]
)
def test_a_program_may_end_with_open_comms(end: str) -> None:
    command = [sys.executable, "-c", ENDS.format(end=end)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


INTERRUPTED = """
import signal, sys, threading, torch
from asynccomm import blocking
from asynccomm.errors import AbortedError

with blocking.new_comm("{backend}", timeout=30, store="file://{path}", rank=int(sys.argv[1]), size=2) as comm:
    comm.barrier().wait()
    if comm.rank == 0:
        interrupt = lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        comm.loop.call_soon_threadsafe(comm.loop.call_later, {later}, interrupt)
        {call}
    try:
        comm.recv(torch.zeros(1), 0).wait()
    except AbortedError as error:
        print(error, flush=True)
"""
CALLS = {
    "wait": ("comm.recv(torch.zeros(1), 1).wait()", "KeyboardInterrupt"),
    "twin": ("comm.split([0, 1], 'never')", "KeyboardInterrupt"),
    "exit": ("sys.exit(7)", "SystemExit"),
}


@pytest.mark.real_end
@pytest.mark.parametrize("case", CALLS)
def test_interrupts_end_cleanly(tmp_path: Path, case: str) -> None:
    call, error = CALLS[case]
    script = tmp_path / "script.py"
    script.write_text(
        INTERRUPTED.format(backend="shm", path=tmp_path / "store", call=call, later=100 if case == "exit" else 0.2)
    )
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank)], stdout=-1, stderr=-1, text=True) for rank in range(2)
    ]
    began = time.monotonic()
    (_, first), (other, trouble) = [rank.communicate(timeout=40) for rank in ranks]
    assert time.monotonic() - began < 15
    assert ranks[0].returncode == (7 if case == "exit" else -signal.SIGINT), first
    assert (ranks[1].returncode, trouble) == (0, "")
    assert error in other


def test_a_loop_survives_an_exit_in_a_coroutine() -> None:
    with blocking.new_comm(alone=True) as comm:

        async def leave() -> None:
            raise SystemExit(3)

        with pytest.raises(SystemExit, match="3"):
            comm._portal.call(leave)
        comm.ready()


def test_errors_of_connecting_release_the_loop() -> None:
    with pytest.raises(asynccomm.RendezvousError):
        blocking.new_comm(store="tcp://127.0.0.1:9", rank=1, size=2, timeout=0.1)
    assert not [thread for thread in threading.enumerate() if "portal" in thread.name]


@pytest.mark.ranks(4, backend=["shm", "gloo"])
async def test_groups_without_a_loop(comm: Comm) -> None:
    await asyncio.to_thread(groups, comm.backend)
