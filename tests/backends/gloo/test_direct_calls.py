"""Small all_reduces that are carried out in the call."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from asynccomm import AsyncCommError, CollectiveMismatchError, Comm, ReduceOp, new_comm
from asynccomm.backends.gloo import frame_exchange
from asynccomm.backends.gloo.direct_calls import CarriedCollectives
from asynccomm.core.native import CoreUnavailable
from tests.ordinary_path import noted
from tests.sampling import amount

REPEATED = 8

needs_c = pytest.mark.skipif(isinstance(frame_exchange._core, CoreUnavailable), reason="the frames in C are not built")


@needs_c
@pytest.mark.parametrize("name", ["SUM", "AVG", "MAX", "PRODUCT"])
@pytest.mark.ranks([2, 3], backend="gloo")
async def test_repeated_calls_are_direct(comm: Comm, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    submitted = noted(monkeypatch)
    reduction = getattr(ReduceOp, name)
    values = torch.arange(1.0, comm.size + 1)
    expected = {"SUM": values.sum(), "AVG": values.mean(), "MAX": values.max(), "PRODUCT": values.prod()}[name]
    before = comm.statistics().submitted
    works = []
    for number in range(REPEATED):
        tensor = torch.full((3,), 1.0 + comm.rank)
        works.append(comm.all_reduce(tensor, reduction))
        assert works[-1].seq == works[0].seq + number
        assert await works[-1] is tensor
        assert tensor.tolist() == [expected.item()] * 3
    assert comm.statistics()[:2] == (before + REPEATED, 0)
    assert isinstance(comm._fast, CarriedCollectives)
    assert submitted == works[:1]


@needs_c
@pytest.mark.ranks([2, 3], backend="gloo")
async def test_all_kinds_of_collectives_that_frames_carry(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, size = comm.rank, comm.size
    every, sums = [float(r) for r in range(size)], float(sum(range(size)))

    def mine() -> torch.Tensor:
        return torch.full((3,), float(rank))

    def list_of(count: int) -> list[torch.Tensor]:
        return [torch.full((3,), -1.0) for _ in range(count)]

    async def round_of(root: int) -> None:
        assert await comm.barrier() is None
        assert (await comm.broadcast(mine(), root)).tolist() == [float(root)] * 3
        reduced = mine()
        await comm.reduce(reduced, root)
        assert reduced.tolist() == [sums if rank == root else float(rank)] * 3
        out = torch.zeros(3)
        assert await comm.all_reduce(mine(), out=out) is out
        assert out.tolist() == [sums] * 3
        gathered = list_of(size)
        await comm.all_gather(gathered, mine())
        assert [each.tolist() for each in gathered] == [[value] * 3 for value in every]
        assert [each.tolist() for each in await comm.all_gather(None, mine())] == [[value] * 3 for value in every]
        whole = torch.zeros(3 * size)
        whole[3 * rank : 3 * rank + 3] = rank
        await comm.all_gather_single(whole, whole[3 * rank : 3 * rank + 3])  # in place
        assert whole.view(size, 3).tolist() == [[value] * 3 for value in every]
        at_root = list_of(size) if rank == root else None
        await comm.gather(at_root, mine(), root)
        if at_root is not None:
            assert [each.tolist() for each in at_root] == [[value] * 3 for value in every]
        part = torch.zeros(3)
        given = [torch.full((3,), 10.0 * r) for r in range(size)] if rank == root else None
        await comm.scatter(part, given, root)
        assert part.tolist() == [10.0 * rank] * 3
        sources = [torch.full((3,), 10.0 * r + rank) for r in range(size)]
        of_all = [10.0 * rank * size + sums] * 3
        assert (await comm.reduce_scatter(torch.zeros(3), sources)).tolist() == of_all
        assert (await comm.reduce_scatter(sources[rank], sources)).tolist() == of_all  # in place
        flat = torch.tensor([10.0 * r + rank for r in range(size) for _ in range(3)])
        assert (await comm.reduce_scatter_single(torch.zeros(3), flat)).tolist() == of_all
        from_each = [[10.0 * rank + r] * 3 for r in range(size)]
        assert (await comm.all_to_all_single(torch.zeros(3 * size), flat)).view(size, 3).tolist() == from_each
        assert (await comm.reduce_scatter_single(flat[:3], flat)).tolist() == of_all  # another rank's part

    for root in range(size):
        await round_of(root)
    submitted, before = noted(monkeypatch), comm.statistics().submitted
    rounds = 5
    for _ in range(rounds):
        for root in range(size):
            await round_of(root)
    calls = (comm.statistics().submitted - before) // rounds
    ordinary = Counter(work.seq % calls for work in submitted)  # by the place in all the calls of a round
    assert all(n < rounds for n in ordinary.values()), "a frame that arrives in part is left to the ordinary path"
    assert len(submitted) < rounds * calls / 4, "which is rare"


@pytest.mark.ranks(2, backend="gloo")
async def test_bytes_count_by_the_larger_side(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccomm.backends.gloo.collectives.SPIN_SECONDS", 0.0)
    part, whole = torch.ones(3), torch.zeros(6)
    for _ in range(3):
        await comm.all_gather_single(whole, part)
    async with new_comm("gloo", name="order", timeout=30) as order:
        if comm.rank == 0:
            work = comm.all_gather_single(whole, part)
            assert comm.statistics().bytes_in_flight == whole.nbytes
            await order.barrier()
            await work
        else:
            await order.barrier()
            await comm.all_gather_single(whole, part)


@pytest.mark.ranks(2, backend="gloo")
async def test_outputs_that_share_memory_take_the_ordinary_path(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(6)
    for _ in range(3):
        await comm.all_gather([memory[:3], memory[3:]], torch.full((3,), 1.0 + comm.rank))
    assert memory.tolist() == [1.0] * 3 + [2.0] * 3
    submitted = noted(monkeypatch)
    with contextlib.suppress(ValueError):  # it may be refused
        await comm.all_gather([memory[:3], memory[2:5]], torch.full((3,), 1.0 + comm.rank))
        assert len(submitted) == 1
    shifted = torch.arange(4.0)
    work = comm.all_reduce(shifted[:3], out=shifted[1:])
    assert work in submitted
    assert (await work).tolist() == [0.0, 2.0, 4.0]


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_the_other_rank_in_time_ends_it_in_the_call(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccomm.backends.gloo.collectives.SPIN_SECONDS", 20.0)
    monkeypatch.setattr("asynccomm.backends.gloo.collectives.SHORT_WAIT_SECONDS", 20.0)  # also after a long wait
    over = []
    for _ in range(REPEATED):
        work = comm.all_reduce(torch.ones(2))
        over.append(work.done())
        assert (await work).tolist() == [2.0, 2.0]
    assert all(over[2:]), "from the second one on, when both ranks know the kind of call, and their connections"


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_a_late_rank_makes_the_next_call_return_at_once(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    carry = frame_exchange.FrameExchange.carry

    def noting(*arguments: Any) -> bool | None:
        waits.append(arguments[-1])
        return carry(*arguments)

    monkeypatch.setattr(frame_exchange.FrameExchange, "carry", noting)
    for _ in range(3):
        await comm.all_reduce(torch.ones(2))
    if comm.rank == 1:
        await asyncio.sleep(0.1)
    await comm.all_reduce(torch.ones(2))
    await comm.all_reduce(torch.ones(2))
    assert 0.0 in waits or comm.rank == 1


@pytest.mark.ranks(2, backend="gloo")
async def test_works_not_awaited_at_once(comm: Comm) -> None:
    await comm.all_reduce(torch.zeros(2))
    for _ in range(REPEATED):
        tensor, other = torch.ones(2), torch.full((2,), 1.0 + comm.rank)
        works = [comm.all_reduce(tensor), comm.all_reduce(other), comm.all_reduce(tensor), comm.barrier()]
        for work in works:
            await work
        assert tensor.tolist() == [4.0, 4.0]
        assert other.tolist() == [3.0, 3.0]


@pytest.mark.ranks(2, backend="gloo")
async def test_unusual_tensors_take_the_ordinary_path(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        await comm.all_reduce(torch.zeros(4))
    submitted = noted(monkeypatch)
    negated = torch.complex(torch.zeros(4), torch.full((4,), -1.0)).conj().imag
    with torch.inference_mode():
        inferred = torch.ones(4)
    strided = torch.ones(8)[::2]
    works = [
        comm.all_reduce(strided),
        comm.all_reduce(negated),
        comm.all_reduce(inferred),
        comm.all_reduce(torch.ones(4), tag="named"),
        comm.all_reduce(torch.ones(4), timeout=20),
    ]
    for work in works:
        assert (await work).tolist() == [2.0] * 4
    assert strided.tolist() == negated.tolist() == inferred.tolist() == [2.0] * 4
    assert submitted == works
    graded = torch.ones(4, requires_grad=True)
    assert (await comm.all_reduce(graded)).tolist() == [2.0] * 4
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage was resized"):
        comm.all_reduce(freed)
    with pytest.raises(ValueError, match="dense"):
        comm.all_reduce(torch.zeros(4).to_sparse())


@pytest.mark.parametrize("odd", ["size", "dtype", "reduction", "operation"])
@pytest.mark.ranks(3, backend="gloo")
async def test_a_difference_after_equal_calls_is_named(comm: Comm, odd: str) -> None:
    for _ in range(REPEATED):
        await comm.all_reduce(torch.ones(3))
        await comm.all_reduce(torch.ones(4))
        await comm.all_reduce(torch.ones(3, dtype=torch.float64))
        await comm.all_reduce(torch.ones(3), ReduceOp.PRODUCT)
    with pytest.raises(CollectiveMismatchError) as caught:
        if comm.rank == 1 and odd == "operation":
            await comm.broadcast(torch.ones(3), 0)
        elif comm.rank == 1:
            dtype = torch.float64 if odd == "dtype" else torch.float32
            reduction = ReduceOp.PRODUCT if odd == "reduction" else ReduceOp.SUM
            await comm.all_reduce(torch.ones(4 if odd == "size" else 3, dtype=dtype), reduction)
        else:
            await comm.all_reduce(torch.ones(3))
    assert 1 in (caught.value.rank, caught.value.other_rank)
    assert "all_reduce(float32[3], SUM)" in (caught.value.op, caught.value.other_op)


@pytest.mark.ranks(2, backend="gloo")
async def test_a_direct_call_has_a_deadline(comm: Comm) -> None:
    for _ in range(3):
        await comm.all_reduce(torch.zeros(2))
    if comm.rank == 0:
        comm.set_timeout(0.5)
        with pytest.raises(AsyncCommError, match=r"not arrived: ranks \[1\]"):
            await comm.all_reduce(torch.zeros(2))
    else:
        with pytest.raises(AsyncCommError):
            await comm.recv(torch.zeros(1), 0)  # which is never sent


@pytest.mark.parametrize("waits", [0.0, 2e-4])
@pytest.mark.ranks([2, 3], backend="gloo")
async def test_messages_and_collectives_share_the_sockets(
    comm: Comm, monkeypatch: pytest.MonkeyPatch, waits: float
) -> None:
    """Frames, short and long messages in an order that all ranks know, and delays that they do not."""
    monkeypatch.setattr("asynccomm.backends.gloo.collectives.SPIN_SECONDS", waits)
    shared, own = random.Random(7), random.Random(comm.rank)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for number in range(amount(150, 80)):
        kind = shared.choice(["reduce", "reduce", "reduce", "message", "both", "large", "gather", "several"])
        n = shared.choice([1, 5, 1000, 20000, 100_000])
        if own.random() < 0.1:
            await asyncio.sleep(own.random() * 2e-3)
        works = []
        sums = [torch.full((n,), float(comm.rank + k)) for k in range(3 if kind == "several" else 1)]
        if kind in ("reduce", "both", "several"):
            works += [comm.all_reduce(each) for each in sums]
        if kind == "large":
            works.append(comm.all_reduce(sums[0].new_full((300_000,), 1.0)))
        if kind == "gather":
            works.append(
                comm.all_gather([torch.zeros(3) for _ in range(comm.size)], torch.full((3,), float(comm.rank)))
            )
        received = torch.zeros(n)
        if kind in ("message", "both"):
            works.append(comm.send(torch.full((n,), 100.0 * comm.rank + number), right))
            if own.random() < 0.5:
                await asyncio.sleep(0)
            works.append(comm.recv(received, left))
        for work in works:
            await work
        if kind in ("reduce", "both", "several"):
            for k, each in enumerate(sums):
                assert each.eq(sum(range(comm.size)) + k * comm.size).all()
        if kind in ("message", "both"):
            assert received.eq(100.0 * left + number).all()


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_calls_from_a_thread_and_from_tasks(comm: Comm) -> None:
    """A thread blocks on its calls while tasks of the loop exchange messages."""
    for _ in range(3):
        await comm.all_reduce(torch.ones(2))

    def reduce() -> list[float]:
        tensor = torch.ones(2)
        for _ in range(20):
            comm.all_reduce(tensor).wait()
        return tensor.tolist()

    async def exchange() -> None:
        for number in range(100):
            received = torch.zeros(100)
            sending = comm.send(torch.full((100,), float(number)), 1 - comm.rank)
            await comm.recv(received, 1 - comm.rank)
            await sending
            assert received.eq(number).all()

    result, _ = await asyncio.gather(asyncio.to_thread(reduce), exchange())
    assert result == [2.0**20] * 2


async def warmed_up(comm: Comm, n: int) -> None:
    """Open all connections, and make all_reduces of ``n`` elements direct."""
    for rank in range(comm.size):
        for peer in range(comm.size):
            if rank != peer and comm.rank == rank:
                await comm.send(torch.zeros(1), peer)
            elif rank != peer and comm.rank == peer:
                await comm.recv(torch.zeros(1), rank)
    for _ in range(4):
        await comm.all_reduce(torch.ones(n))


@pytest.mark.ranks(2, backend="gloo")
async def test_a_message_that_is_read_in_the_call_ends_its_receive(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank calls its all_reduce when the message is answered."""
    monkeypatch.setattr("asynccomm.backends.gloo.collectives.SPIN_SECONDS", 0.05)
    await warmed_up(comm, 2)
    for _ in range(REPEATED):
        if comm.rank == 0:

            async def answer() -> None:
                await comm.recv(torch.zeros(1), 1)
                await comm.send(torch.zeros(1), 1)

            answering = asyncio.create_task(answer())
            await asyncio.sleep(0)  # the receive is there
            work = comm.all_reduce(torch.ones(2))
            await answering
            await work
        else:
            await comm.send(torch.zeros(1), 0)
            await comm.recv(torch.zeros(1), 0)
            await comm.all_reduce(torch.ones(2))


@pytest.mark.timeout(60)
@pytest.mark.ranks(3, backend="gloo")
async def test_a_message_behind_a_frame_is_not_kept_in_c(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 sends its frame when rank 0 has answered a message that came together with the frame of rank 1."""
    monkeypatch.setattr("asynccomm.backends.gloo.p2p.SPIN_SECONDS", 1.0)
    await warmed_up(comm, 2)
    for _ in range(2):
        await comm.broadcast(torch.ones(100), 0)
    if comm.rank == 0:

        async def answer() -> None:
            await comm.recv(torch.zeros(1), 1)
            await comm.send(torch.zeros(1), 2)

        backend: Any = comm.unsafe_get_backend()
        backend._p2p._waited = 1.0  # no spin
        answering = asyncio.create_task(answer())
        await asyncio.sleep(0)
        backend._p2p._waited = 0.0
        endpoint, arrived = backend._endpoint, backend._frames._arrived[1]
        there = 0
        while there <= 100 and not arrived:  # a frame and a message, each with a header of 32 bytes
            with endpoint.lock, contextlib.suppress(BlockingIOError):
                endpoint.note_use()  # the endpoint's thread leaves the sockets alone, unless it is very late
                there = len(endpoint._inbound[1].sock.recv(1000, socket.MSG_PEEK))
        await comm.broadcast(torch.ones(100), 0)
        await answering
    elif comm.rank == 1:
        work = comm.broadcast(torch.ones(100), 0)
        await comm.send(torch.zeros(1), 0)
        await work
    else:
        await comm.recv(torch.zeros(1), 0)
        await comm.broadcast(torch.ones(100), 0)


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_memory_that_another_thread_takes_away_is_kept(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccomm.backends.gloo.collectives.SPIN_SECONDS", 0.3)
    await warmed_up(comm, 2048)
    if comm.rank == 0:
        tensor, began = torch.ones(2048), threading.Event()
        address, carry = tensor.data_ptr(), frame_exchange.FrameExchange.carry

        def noting(*arguments: Any) -> bool | None:
            began.set()
            return carry(*arguments)

        monkeypatch.setattr(frame_exchange.FrameExchange, "carry", noting)
        reducing = asyncio.create_task(asyncio.to_thread(lambda: comm.all_reduce(tensor).wait()))
        await asyncio.to_thread(began.wait)
        tensor.data = torch.zeros(1)
        others = [torch.full((2048,), 7.0) for _ in range(50)]
        assert all(other.data_ptr() != address for other in others)
        await comm.send(torch.zeros(1), 1)
        await reducing
        assert all(other.eq(7).all() for other in others)
        assert tensor.tolist() == [0.0]
    else:
        await comm.recv(torch.zeros(1), 0)
        await comm.all_reduce(torch.ones(2048))


@pytest.mark.ranks(2, backend="gloo")
async def test_a_call_under_vmap_fails_alone(comm: Comm) -> None:
    await warmed_up(comm, 4)

    def reduce(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ValueError, match="tensor has no memory"):
            comm.all_reduce(row)
        return row

    torch.vmap(reduce)(torch.ones(3, 4))
    assert (await comm.all_reduce(torch.ones(4))).tolist() == [2.0] * 4


@needs_c
@pytest.mark.ranks(2, backend="gloo")
async def test_nans_have_the_bits_of_torch(comm: Comm) -> None:
    """Each rank may end in C or in Python; the payload of a sum of two NaNs differs between them."""
    await warmed_up(comm, 4001)
    nans = torch.full((4001,), float("nan")).view(torch.int32) + comm.rank + 1
    mine, ordinary = nans.view(torch.float32).clone(), nans.view(torch.float32).clone()
    await comm.all_reduce(mine)
    await comm.all_reduce(ordinary, timeout=20)
    both = [torch.zeros_like(nans) for _ in range(2)]
    await comm.all_gather(both, mine.view(torch.int32))
    assert both[0].equal(both[1])
    assert mine.view(torch.int32).equal(ordinary.view(torch.int32))
