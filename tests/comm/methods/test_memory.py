"""Tensors in shared memory on real ranks: conformance, what is made there, and failures while ranks read them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from asynccomm import BrokenError, ClosedError, Comm, MemoryStore, blocking, new_comm
from asynccomm.backends.shm import lowering
from asynccomm.backends.shm.arena import NOT_LENT, arena
from asynccomm.testing import check_backend, loopback_world
from asynccomm.testing.conformance import memory
from asynccomm.testing.conformance.suite import _checks
from tests.forkserver import Nursery
from tests.pretended_hosts import HINTS, pretend
from tests.sampling import some

CHECKS = [check.__name__ for check in _checks(memory)]
LARGE = 1 << 20  # elements


def is_shared(tensor: torch.Tensor) -> bool:
    return arena().find(tensor.data_ptr()) != NOT_LENT


@pytest.mark.ranks(some([3, 2], 1))
@pytest.mark.parametrize("executor", ["core", pytest.param("reference", marks=pytest.mark.exhaustive), "mixed"])
async def test_conformance_of_shm(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    reference = executor == "reference" or (executor == "mixed" and os.environ["RANK"] == "1")
    monkeypatch.setenv("ASYNCCOMM_EXECUTOR", "reference" if reference else "core")
    monkeypatch.setattr(lowering, "LENT_BYTES", 4000)
    hints = {"whole_bytes": "4000"}
    await check_backend(lambda name: new_comm("shm", name=name, timeout=20, hints=hints), only=CHECKS)


@pytest.mark.ranks(3)
async def test_conformance_on_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "aab")
    await check_backend(lambda name: new_comm("hierarchical", name=name, timeout=20, hints=HINTS), only=CHECKS)


async def test_conformance_of_loopback() -> None:
    async with loopback_world(3) as comms:
        for check in CHECKS:
            await asyncio.gather(*[getattr(memory, check)(comm) for comm in comms])


@pytest.mark.ranks(1)
async def test_what_is_made_in_shared_memory() -> None:
    async with new_comm("shm", name="made", timeout=20) as comm:
        elsewhere = torch.ones(3)
        with comm.memory():
            made = [torch.zeros(3), torch.tensor([1, 2]), torch.rand(2, 3), torch.full((2,), 7.0), torch.arange(4)]
            made += [torch.ones_like(elsewhere), elsewhere.clone(), elsewhere.to(torch.float64), torch.empty(3, 4)]
            made += [
                elsewhere.new_zeros(2),
                torch.eye(3),
                torch.zeros(2, 3).t().clone(),
                torch.randn(3, 1).expand(3, 3),
            ]
            others = [elsewhere + 1, elsewhere[1:], torch.zeros(0), torch.empty(2, device="meta")]
            other_task = asyncio.create_task(asyncio.sleep(0, "ran"))
        assert [is_shared(tensor) for tensor in made] == [True] * len(made)
        assert not any(is_shared(tensor) for tensor in others[:3])
        assert (made[1].tolist(), made[5].tolist(), made[11].stride()) == ([1, 2], [1.0] * 3, (1, 3))
        assert not is_shared(torch.zeros(3)), "the context is over"
        assert await other_task == "ran"
        kept = comm.empty((2, 3), dtype=torch.int8)
        assert (kept.shape, kept.dtype, comm.empty(5).dtype) == ((2, 3), torch.int8, torch.float32)
    assert is_shared(kept.fill_(1)), "it outlives the comm"
    with pytest.raises(ClosedError):
        comm.empty(3)
    with pytest.raises(ClosedError):
        comm.memory()


async def test_tensors_without_elements_have_the_strides_of_torch() -> None:
    async with new_comm("shm", store=MemoryStore(), rank=0, size=1) as comm:
        for shape in [(3, 0), (0,), (0, 3), (2, 0, 4), ()]:
            assert comm.empty(shape).stride() == torch.empty(shape).stride(), shape


async def test_arguments() -> None:
    async with loopback_world(1) as (comm,):
        for shape, dtype, error in [
            ("3", None, "shape must be a list or tuple"),
            ((1.5,), None, "shape must be integers"),
            ((-1,), None, "shape must not be negative"),
            ((1 << 64, 0), None, "shape must have sizes below 2\\*\\*63, got"),
            ((1,), "float32", "dtype must be a torch.dtype, got 'float32'"),
        ]:
            with pytest.raises((TypeError, ValueError), match=error):
                comm.empty(shape, dtype=dtype)  # type: ignore[arg-type]
        with comm.memory():
            assert not is_shared(torch.zeros(3))
        assert not is_shared(comm.empty(3))


@pytest.mark.ranks(2)
async def test_a_comm_that_blocks_and_its_splits_share_tensors() -> None:
    await asyncio.to_thread(blocks)


def blocks() -> None:
    with blocking.new_comm("shm", name="blocking", timeout=20) as comm:
        tensor = comm.empty(LARGE).fill_(comm.rank + 1)
        comm.all_reduce(tensor).wait()
        assert bool((tensor == 3).all())
        part = comm.split(range(2), "part")
        assert part is not None
        with part:
            part.broadcast(tensor.fill_(comm.rank + 5), 1).wait()
        assert bool((tensor == 6).all())


# -- failures: the program changes its tensor at once, and no other rank may take the change for data -----------------


@pytest.mark.parametrize("way", ["abort", "timeout", "peer"])
async def test_tensors_are_withdrawn_before_an_operation_fails(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    async with loopback_world(2) as comms:
        work = comms[0].all_reduce(torch.ones(1), timeout=0.01 if way == "timeout" else None)
        seen: list[bool] = []
        backend = comms[0].unsafe_get_backend()
        monkeypatch.setattr(backend, "withdraw_tensors", lambda: seen.append(work.done()))
        if way != "timeout":
            comms[way == "peer"].abort()
        with pytest.raises(BrokenError):
            await work
        assert seen[0] is False


async def broadcasts(comm: Comm, tensor: torch.Tensor) -> None:
    """Broadcasts of rank 0 until one fails. A receiver checks each that did not."""
    for number in itertools.count():
        if comm.rank == 0:
            tensor.fill_(number)
            try:
                await comm.broadcast(tensor, 0)
            finally:
                tensor.fill_(-1)
        else:
            await comm.broadcast(tensor, 0)
            assert bool((tensor == number).all()), f"broadcast {number} took {tensor.unique().tolist()}"


@pytest.mark.ranks(2)
async def test_a_tensor_changed_after_an_abort_is_not_taken_for_data() -> None:
    for turn in range(6):
        hints = {"inline_bytes": "67108864" if turn % 2 else "0"}
        comm = await new_comm("shm", name=f"changed {turn}", timeout=20, hints=hints)
        tensor = comm.empty(LARGE)
        await comm.barrier()
        if comm.rank == 0:
            threading.Timer(0.003 + 0.002 * turn, comm.abort).start()
        with pytest.raises(BrokenError):
            await broadcasts(comm, tensor)
        await comm.aclose()


async def lose_a_rank(rank: int, way: int) -> list[object]:
    """The last rank dies or stops while the others read its tensor."""
    comm = await new_comm("shm", name="loss", timeout=20)
    tensor = comm.empty(4 * LARGE).fill_(rank)
    await comm.barrier()
    error = ""
    if rank == comm.size - 1:
        threading.Timer(0.02, os.kill, (os.getpid(), way)).start()
    try:
        while True:
            await comm.all_reduce(tensor.fill_(rank), timeout=2)
            assert bool((tensor == 3).all())
    except BrokenError as exc:
        error = type(exc).__name__
    tensor.fill_(1)
    await comm.aclose()
    del tensor
    gc.collect()
    return [error, arena().nbytes]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery(__file__)
    yield found
    found.close()


def test_the_death_of_a_rank_fails_the_others_and_leaves_no_memory(nursery: Nursery) -> None:
    assert nursery.run(lose_a_rank, 3, signal.SIGKILL) == {rank: ["PeerLostError", 0] for rank in range(2)}


def test_a_stopped_rank_is_the_business_of_the_deadline(nursery: Nursery) -> None:
    found = nursery.run(lose_a_rank, 3, signal.SIGSTOP)
    assert all(found[rank][0] in ("CollectiveTimeoutError", "AbortedError") for rank in range(2)), found
