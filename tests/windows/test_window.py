"""Windows on real ranks: the conformance checks, failures, threads and lifetimes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from asynccomm import (
    AbortedError,
    BrokenError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    SignalCmpOp,
    Window,
    new_comm,
)
from asynccomm.testing import check_backend, loopback_world
from asynccomm.testing.conformance import windows
from asynccomm.testing.conformance.suite import _checks
from tests.forkserver import Nursery
from tests.sampling import some
from tests.waiting import until

CHECKS = [check.__name__ for check in _checks(windows)]
BACKENDS = pytest.mark.parametrize("backend", ["shm", "gloo"])


@pytest.mark.ranks(some([3, 1, 2], 1))
@BACKENDS
async def test_conformance(backend: str) -> None:
    await check_backend(lambda name: new_comm(backend, name=name, timeout=20), only=CHECKS)


@pytest.mark.ranks(3)
async def test_conformance_without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "reference")
    await check_backend(lambda name: new_comm("shm", name=name, timeout=20), only=CHECKS)


@pytest.mark.ranks(3)
async def test_ranks_with_and_without_c_share_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    async with new_comm("shm", name="mixed", timeout=20) as comm:
        if comm.rank == 1:
            monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "reference")
        async with await comm.window(64, signals=1) as window:
            for _ in range(200):
                for target in range(comm.size):
                    window.signal(target, add=True)
                    window.accumulate(torch.ones(3), target)
            await window.wait_signal(0, 200 * comm.size, SignalCmpOp.EQ)
            await window.fence()
            await comm.barrier()
            assert window.tensor(None, (3,), torch.float32).tolist() == [200.0 * comm.size] * 3


@pytest.mark.ranks(2)
@BACKENDS
async def test_a_blocked_event_loop_is_served(backend: str) -> None:
    async with new_comm(backend, name="blocked", timeout=20) as comm, await comm.window(1 << 23) as window:
        if comm.rank == 1:
            await comm.barrier()
            end = time.monotonic() + 10
            while window.tensor(None, (1,), torch.float32).item() != 2.0:  # the loop does not run
                assert time.monotonic() < end
        else:
            await comm.barrier()
            await window.put(torch.ones(1 << 20), 1, 1)
            await window.accumulate(torch.ones(1 << 20), 1, 1)
            out = torch.empty(1 << 20)
            assert torch.equal(await window.get(out, 1, 1), torch.full((1 << 20,), 2.0))
            await window.put(torch.full((1,), 2.0), 1)
            await window.fence()


@pytest.mark.ranks(2)
@BACKENDS
async def test_threads_wait_for_signals_without_the_loop(backend: str) -> None:
    async with new_comm(backend, name="threads", timeout=20) as comm, await comm.window(8) as window:
        peer = 1 - comm.rank
        results: list[object] = []

        def run() -> None:
            for turn in range(1, 20):
                window.signal(peer, 0, turn).wait()
                window.wait_signal(0, turn).wait()
            results.append(window.signal_value())

        thread = threading.Thread(target=run)
        thread.start()
        if comm.rank == 0:
            thread.join(10)  # blocks the loop
        while thread.is_alive():
            await asyncio.sleep(0.001)
        assert results == [19]


@pytest.mark.ranks(2)
@BACKENDS
async def test_waiting_for_a_late_signal_costs_no_cpu(backend: str) -> None:
    async with new_comm(backend, name="idle", timeout=20) as comm, await comm.window(8) as window:
        await comm.barrier()
        if comm.rank == 0:
            await asyncio.sleep(0.5)
            await window.signal(1)
        else:
            before = time.process_time()
            await window.wait_signal()
            assert time.process_time() - before < 0.1


@pytest.mark.ranks(2)
@BACKENDS
async def test_an_overdue_wait_breaks_the_comm_and_names_the_signal(backend: str) -> None:
    with pytest.raises(BrokenError):
        async with new_comm(backend, name="late", timeout=20) as comm:
            window = await comm.window(8)
            if comm.rank == 0:
                with pytest.raises(CollectiveTimeoutError, match=r"wait_signal\(slot=3 >= 7, window=0\).*test_window"):
                    await window.wait_signal(3, 7, timeout=0.1)
                with pytest.raises(BrokenError):
                    window.signal(1)
                raise comm._session.error  # type: ignore[misc]
            await window.wait_signal()


@pytest.mark.ranks(2)
@BACKENDS
async def test_a_mismatch_names_the_place_where_the_window_was_closed(backend: str) -> None:
    async def closes(window: Window) -> None:
        await window.aclose()

    async with new_comm(backend, name="differs", timeout=20) as comm:
        window = await comm.window(8)
        with pytest.raises(CollectiveMismatchError, match=r"end of window 0'\) at \S+test_window\.py:\d+ in closes"):
            if comm.rank == 1:
                await closes(window)
                await comm.barrier()
            else:
                await comm.all_reduce(torch.ones(1))


@pytest.mark.ranks(2)
@BACKENDS
async def test_an_abort_ends_waits_and_puts(backend: str) -> None:
    comm = await new_comm(backend, name="aborted", timeout=20)
    window = await comm.window(3 << 22)
    view = window.tensor()
    waits = [window.wait_signal(slot) for slot in range(3)]
    await comm.barrier()
    if comm.rank == 0:
        tensor = torch.ones(3 << 20)
        puts = [window.put(tensor, 1) for _ in range(8)]
        comm.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await puts[-1]
    for wait in waits:
        with pytest.raises(AbortedError, match="enough"):
            await wait
    with pytest.raises(AbortedError):
        await window.put(torch.ones(1), 0)
    await window.aclose()
    await comm.aclose()
    del window, comm
    gc.collect()
    view.fill_(1)  # still memory


async def lose_a_rank(rank: int, backend: str, operation: str, signal_number: int) -> list[object]:
    """The last rank dies or stops in an operation; the others wait for its signal."""
    comm = await new_comm(backend, name="loss", timeout=20)
    window = await comm.window(1 << 24)
    view = window.tensor()
    tensor = torch.ones(1 << 22)
    await comm.barrier()
    error = ""
    try:
        if rank == comm.size - 1:
            threading.Timer(0.005, os.kill, (os.getpid(), signal_number)).start()
            while True:
                await (window.accumulate(tensor, 0) if operation == "accumulate" else window.put(tensor, 0))
        if operation == "accumulate":
            await comm.all_reduce(torch.ones(1), timeout=1)  # for which the victim does not come
        await window.wait_signal(timeout=1)
    except BrokenError as exc:
        error = type(exc).__name__
    try:
        window.accumulate(tensor, 0)
    except BrokenError:
        error += " again"
    await comm.aclose()
    view.fill_(1)  # still memory
    return [error]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery(__file__)
    yield found
    found.close()


@BACKENDS
@pytest.mark.parametrize("operation", ["put", "accumulate"])
def test_the_death_of_a_rank_fails_the_waits_of_the_others(nursery: Nursery, backend: str, operation: str) -> None:
    found = nursery.run(lose_a_rank, 3, backend, operation, signal.SIGKILL)
    assert found == {rank: ["PeerLostError again"] for rank in range(2)}


def test_a_stopped_rank_is_the_business_of_the_deadline(nursery: Nursery) -> None:
    found = nursery.run(lose_a_rank, 3, "shm", "accumulate", signal.SIGSTOP)
    errors = {"CollectiveTimeoutError again", "AbortedError again"}
    assert {found[rank][0] for rank in range(2)} <= errors


async def test_cancelling_abandons_only_the_wait() -> None:
    async with loopback_world(2) as comms:
        one, other = await asyncio.gather(*(comm.window(8) for comm in comms))
        work = other.wait_signal()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await work
        assert not work.done()
        await one.signal(1)
        await work
        await asyncio.gather(one.aclose(), other.aclose())


async def test_closing_fails_waits_and_later_calls_and_is_repeatable() -> None:
    async with loopback_world(2) as comms:
        one, other = await asyncio.gather(*(comm.window(8) for comm in comms))
        work = one.wait_signal()
        await asyncio.gather(one.aclose(), one.aclose(), other.aclose())
        with pytest.raises(ClosedError, match="window 0 of comm 'test' is closed"):
            await work
        for call in (one.fence, one.wait_signal, one.tensor, one.signal_value, lambda: one.signal(0)):
            with pytest.raises(ClosedError, match="window 0"):
                call()
        assert "closed" in repr(one)
        assert [comm.statistics().in_flight for comm in comms] == [0, 0]


@pytest.mark.ranks(2)
@BACKENDS
async def test_closing_the_comm_ends_the_waits_of_threads_and_completes_transfers(backend: str) -> None:
    async with new_comm(backend, name="closing", timeout=20) as comm:
        window = await comm.window(1 << 23)
        errors: list[BaseException] = []

        def run() -> None:
            try:
                window.wait_signal(timeout=3600).wait()
            except BaseException as exc:
                errors.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        await until(lambda: comm.statistics().in_flight == 1)
        await comm.barrier()
        if comm.rank == 0:
            put = window.put(torch.ones(1 << 21), 1)
            received = comm.recv(torch.zeros(1), 1)
            await comm.aclose()
            assert (await received).item() == 1
            await put
        else:
            await until(lambda: window.tensor(None, (1 << 21,), torch.float32)[-1].item() == 1)
            await comm.send(torch.ones(1), 0)
    await asyncio.to_thread(thread.join, 20)
    assert [str(error) for error in errors] == ["comm 'closing' was closed before the signal came"]


async def test_calls_after_the_comm_has_closed_raise_its_error() -> None:
    async with loopback_world(1) as (comm,):
        window = await comm.window(8)
        await comm.aclose()
        with pytest.raises(ClosedError, match="comm 'test' is closed"):
            window.put(torch.zeros(1), 0)
        await window.aclose()


async def test_bad_arguments_are_named() -> None:
    async with loopback_world(1) as (comm,):
        window = await comm.window(like=torch.zeros(4, dtype=torch.int16), signals=2)
        cases = [
            (lambda: window.put(torch.zeros(3), 0), ValueError, "offset must leave room .* end at byte 12, .* 8 bytes"),
            (lambda: window.put(torch.zeros(1), 0, -1), ValueError, "offset .* from offset -1"),
            (lambda: window.get(torch.zeros(1), 0, 1.5), TypeError, "offset must be an integer, got 1.5"),  # type: ignore[arg-type]
            (lambda: window.put(torch.zeros(1), 1), ValueError, "rank must be in"),
            (lambda: window.put([1.0], 0), TypeError, "tensor must be a torch.Tensor"),  # type: ignore[arg-type]
            (lambda: window.get(torch.zeros(1).expand(2), 0), ValueError, "tensor overlaps itself"),
            (lambda: window.accumulate(torch.zeros(1, device="meta"), 0), ValueError, "tensor is on meta"),
            (lambda: window.signal(0, 2), ValueError, r"slot must be in \[0, 2\)"),
            (lambda: window.signal(0, 0, 2**64), ValueError, "value must be in"),
            (lambda: window.signal(0, 0, -1), ValueError, "value must be in"),
            (lambda: window.signal(0, add=1), TypeError, "add must be True or False"),  # type: ignore[arg-type]
            (lambda: window.wait_signal(0, 1, ">="), TypeError, "cmp must be a SignalCmpOp"),  # type: ignore[arg-type]
            (lambda: window.tensor(0, (3,), torch.float32), ValueError, "offset must leave room"),
            (lambda: window.tensor(0, (1 << 32, 1 << 32), torch.float32), ValueError, "offset must leave room"),
            (lambda: window.tensor(0, (-1,)), ValueError, "shape must not be negative"),
            (lambda: window.tensor(0, "44"), TypeError, "shape must be a list or tuple"),  # type: ignore[arg-type]
            (lambda: window.tensor(0, (1,), int), TypeError, "dtype must be a torch.dtype"),  # type: ignore[arg-type]
            (lambda: window.tensor(0, (1,), torch.qint8), ValueError, "dtype must be one that torch can copy, got"),
            (lambda: window.put(torch.zeros(1), 0, timeout=-1), ValueError, "timeout"),
        ]
        for call, kind, text in cases:
            with pytest.raises(kind, match=text):
                call()
        assert window.tensor().shape == (4,)
        assert window.tensor(dtype=torch.int16, shape=(2,), offset=2).dtype == torch.int16
        await window.aclose()


async def test_parts_of_one_window_may_be_source_and_target() -> None:
    async with loopback_world(1) as (comm,):
        window = await comm.window(40)
        memory = window.tensor(dtype=torch.float32)
        memory.copy_(torch.arange(10.0))
        await window.put(memory[:8], 0, 2)
        assert memory.tolist() == [0, 1, *range(8)]
        await window.get(memory[1:9], 0)
        assert memory.tolist() == [0, 0, 1, *range(6), 7]
        await window.accumulate(memory[:9], 0, 1)
        assert memory.tolist() == [0, 0, 1, 1, 1, 3, 5, 7, 9, 12]
        await window.aclose()


async def test_the_parameters_of_a_module_may_lie_in_a_window() -> None:
    async with loopback_world(2) as comms:
        models = [torch.nn.Linear(3, 2) for _ in comms]
        one, other = await asyncio.gather(*(comm.window(4 * 8) for comm in comms))
        for model, window in zip(models, (one, other), strict=True):
            offset = 0
            for parameter in model.parameters():
                parameter.data = window.tensor(None, parameter.shape, parameter.dtype, offset).copy_(parameter.data)
                offset += parameter.numel()
        await one.put(one.tensor(None, (8,), torch.float32), 1)
        await asyncio.gather(one.aclose(), other.aclose())
        found = models[1](torch.ones(3))
        assert torch.equal(found, models[0](torch.ones(3)))
        found.sum().backward()
        assert models[1].weight.grad is not None


async def test_operations_are_sent_at_once_in_a_scope_and_with_agreed_ordering() -> None:
    async with loopback_world(1, ordering="agreed") as (comm,):
        window = await comm.window(8)
        async with comm.coalesce():
            held = comm.all_reduce(torch.ones(1), tag="x")
            assert window.put(torch.ones(1), 0).done()
            assert not held.done()
        await window.aclose()


async def test_operations_of_one_origin_keep_their_order_while_the_transport_is_held_up() -> None:
    async with loopback_world(2) as comms:
        one, other = await asyncio.gather(*(comm.window(8) for comm in comms))
        hub = comms[0].unsafe_get_backend().hub  # type: ignore[attr-defined]
        hub.hold()
        works = [one.put(torch.ones(1), 1), one.signal(1), one.fence(1)]
        wait = other.wait_signal()
        hub.release(1)
        assert [work.done() for work in (*works, wait)] == [True, False, False, False]
        hub.release(1)
        assert wait.done()
        hub.release()
        await asyncio.gather(*works, wait, one.aclose(), other.aclose())


@pytest.mark.ranks(2)
async def test_a_forked_child_cannot_use_a_window_and_harms_none() -> None:
    async with new_comm("shm", name="fork", timeout=20) as comm, await comm.window(64) as window:
        view = window.tensor()
        child = os.fork()
        if not child:
            code = 1
            try:
                window.put(torch.ones(1), 0)
            except ClosedError:
                await window.aclose()
                code = 0 if not view.count_nonzero() else 2
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await comm.barrier()  # the other rank's child has looked at its memory
        await window.put(torch.ones(1), 1 - comm.rank)
        await window.signal(1 - comm.rank)
        await window.wait_signal()


@pytest.mark.ranks(2)
@BACKENDS
async def test_windows_leave_no_descriptor_behind(backend: str) -> None:
    async with new_comm(backend, name="descriptors", timeout=20) as comm:
        counts = []
        for _ in range(4):
            async with await comm.window(1 << 13) as window:
                await window.put(torch.ones(1), 1 - comm.rank)
            del window
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[3] <= counts[1], counts  # others may have closed meanwhile
