"""Checks of Works, of many operations in flight, and of point-to-point messages."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import torch

from asynccomm.comm.comm import Comm
from asynccomm.core.work import Work
from asynccomm.errors import WouldBlockError
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import DTYPES, SHAPES, expect_equal, layouts, reduced, sample, sentinel


async def hundred_operations_in_flight(comm: Comm) -> None:
    tensors = [sample(comm.rank, (1 + 17 * i,), salt=i) for i in range(100)]
    works = [comm.all_reduce(tensor) for tensor in tensors]
    assert [work.seq for work in works] == list(range(works[0].seq, works[0].seq + 100))
    for work in reversed(works):  # any order of awaiting
        await work
    for i, tensor in enumerate(tensors):
        expected = reduced([sample(r, (1 + 17 * i,), salt=i) for r in range(comm.size)], ReduceOp.SUM)
        expect_equal(tensor, expected, f"operation {i} of 100 in flight")


async def mixed_operations_in_flight(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    total = sample(rank, (11,))
    copy = sample(rank, (7,))
    works: list[Work[Any]] = [
        comm.all_reduce(total),
        comm.broadcast(copy, size - 1),
        comm.all_gather_single(None, sample(rank, (3,))),
        comm.reduce_scatter_single(None, sample(rank, (2 * size,))),
        comm.all_to_all_single(None, sample(rank, (size,))),
        comm.barrier(),
    ]
    results = await asyncio.gather(*works)
    expect_equal(total, reduced([sample(r, (11,)) for r in range(size)], ReduceOp.SUM), "mixed: all_reduce")
    expect_equal(copy, sample(size - 1, (7,)), "mixed: broadcast")
    expect_equal(results[2], torch.cat([sample(r, (3,)) for r in range(size)]), "mixed: all_gather_single")
    chunk = reduced([sample(r, (2 * size,)) for r in range(size)], ReduceOp.SUM).view(size, 2)[rank]
    expect_equal(results[3], chunk, "mixed: reduce_scatter_single")
    expect_equal(results[4], torch.stack([sample(r, (size,))[rank] for r in range(size)]), "mixed: all_to_all_single")


async def works_can_be_awaited_by_many(comm: Comm) -> None:
    tensor = sample(comm.rank, (5,))
    work = comm.all_reduce(tensor)
    waiters = [asyncio.ensure_future(_again(work)) for _ in range(3)]
    assert await work is tensor
    for waiter in waiters:
        assert await waiter is tensor
    assert await work is tensor
    assert work.done()
    assert work.is_completed()
    assert work.result() is tensor
    assert work.exception() is None
    assert work.duration is not None
    assert work.duration >= 0
    called: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    work.add_done_callback(called.set_result)
    assert await called is work


async def _again(work: Work[Any]) -> Any:
    return await work


async def cancelling_an_await_leaves_the_operation(comm: Comm) -> None:
    tensor = sample(comm.rank, (9,))
    if comm.rank == 0:
        work = comm.all_reduce(tensor)
        waiter = asyncio.ensure_future(_again(work))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])
        try:
            async with asyncio.timeout(0):
                await work
        except TimeoutError:
            pass
        await work
    else:
        await comm.all_reduce(tensor)
    expect_equal(
        tensor, reduced([sample(r, (9,)) for r in range(comm.size)], ReduceOp.SUM), "all_reduce after a cancelled await"
    )


async def dropped_works_run_on(comm: Comm) -> None:
    tensors = [sample(comm.rank, (1000,), salt=i) for i in range(10)]
    for tensor in tensors:
        comm.all_reduce(tensor)
    comm.all_reduce(torch.ones(1000))  # no reference to this tensor or its Work
    gc.collect()
    await comm.barrier()
    for i, tensor in enumerate(tensors):
        expected = reduced([sample(r, (1000,), salt=i) for r in range(comm.size)], ReduceOp.SUM)
        expect_equal(tensor, expected, "all_reduce whose Work was dropped")


class Memory(bytearray):
    """Memory of a tensor, which supports weak references: they show when it is freed."""


async def works_let_go_of_tensors(comm: Comm) -> None:
    if comm.device.type != "cpu":
        return  # GPU memory supports no weak references
    memory = Memory(4 * 64)
    reference = weakref.ref(memory)  # not to the tensor: a backend may hold its memory by another tensor
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    del memory
    out = await comm.all_gather_single(None, tensor)
    await comm.barrier()
    del tensor
    for _ in range(200):  # the thread that completed the operation may not have returned yet
        if reference() is None:
            break
        await asyncio.sleep(0.005)
    assert reference() is None, "a finished operation still holds its input"
    assert out.numel() == 64 * comm.size


async def copies_of_handles_are_the_handles(comm: Comm) -> None:
    tensor, kept = sample(comm.rank, (5,)), sample(comm.rank, (3,), salt=1)
    messages = comm.batch_op_create()
    messages.recv(kept, (comm.rank - 1) % comm.size, 7)
    messages.send(sample(comm.rank, (3,)), (comm.rank + 1) % comm.size, 7)
    sink, stream = comm.sink((comm.rank + 1) % comm.size, 8), comm.stream((comm.rank - 1) % comm.size, 8)
    async with comm.coalesce() as scope:
        work = comm.all_reduce(tensor)
        for handle in (comm, work, scope, messages, sink, stream, comm.dup("never"), comm.unsafe_get_backend()):
            _expect_no_copy(handle)
    gc.collect()
    await work
    expect_equal(tensor, reduced([sample(r, (5,)) for r in range(comm.size)], ReduceOp.SUM), "after copies went")
    await messages.issue()
    expect_equal(kept, sample((comm.rank - 1) % comm.size, (3,)), "received after copies went")
    sent = sink.put(comm.rank), sink.close()
    assert [item async for item in stream] == [(comm.rank - 1) % comm.size], "a stream after copies went"
    await asyncio.gather(*sent)
    await comm.barrier()


def _expect_no_copy(handle: object) -> None:
    assert copy.copy(handle) is handle, f"{handle!r} was copied"
    assert copy.deepcopy({"held": [handle]})["held"][0] is handle, f"{handle!r} was copied deeply"
    try:
        pickle.dumps(handle)
    except TypeError as exc:
        assert "cannot be pickled" in str(exc), exc
    else:
        raise AssertionError(f"{handle!r} was pickled")


async def operations_keep_the_memory_they_were_given(comm: Comm) -> None:
    await comm.barrier()
    for shape in ((5,), (1 << 18,)):
        tensor = sample(comm.rank, shape)
        memory = tensor.data
        work = comm.all_reduce(tensor)
        tensor.data = torch.zeros(2)  # as in a swap of weights
        await work
        expected = reduced([sample(r, shape) for r in range(comm.size)], ReduceOp.SUM)
        expect_equal(memory, expected, "the memory that the tensor had at the call")
        assert tensor.tolist() == [0.0, 0.0], "the memory it got later was written to"


async def wait_blocks_threads_but_never_the_loop(comm: Comm) -> None:
    tensor = sample(comm.rank, (5,))
    work = comm.all_reduce(tensor)
    if work.order is None:  # on a GPU the host does not wait
        try:
            work.wait()
        except WouldBlockError:
            pass
        else:
            raise AssertionError("wait() on the loop's thread must raise WouldBlockError")
    assert await asyncio.to_thread(work.wait) is tensor
    assert await asyncio.to_thread(work.wait, 1.0) is tensor


async def calls_from_another_thread(comm: Comm) -> None:
    tensors = [sample(comm.rank, (33,), salt=i) for i in range(20)]

    def call_all() -> None:
        for tensor in tensors:
            comm.all_reduce(tensor).wait(30.0)

    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def run() -> None:
        call_all()
        loop.call_soon_threadsafe(done.set)

    thread = threading.Thread(target=run)
    thread.start()
    await done.wait()
    thread.join()
    for i, tensor in enumerate(tensors):
        expected = reduced([sample(r, (33,), salt=i) for r in range(comm.size)], ReduceOp.SUM)
        expect_equal(tensor, expected, "all_reduce from a thread")


async def send_and_recv_in_a_ring(comm: Comm) -> None:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype in DTYPES:
        received = sentinel((3, 4), dtype)
        recv = comm.recv(received, previous)
        send = comm.send(sample(comm.rank, (3, 4), dtype), following)
        assert await recv is received
        await send
        expect_equal(received, sample(previous, (3, 4), dtype), f"ring {dtype}")
    for shape in (*SHAPES, (1 << 20,)):
        for layout, received in layouts(sentinel(shape)):
            recv = comm.recv(received, previous)
            source = next(t for name, t in layouts(sample(comm.rank, shape)) if name == layout)
            await comm.send(source, following)
            await recv
            expect_equal(received, sample(previous, shape), f"ring {shape} {layout}")


async def messages_keep_their_order_and_tags(comm: Comm) -> None:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    tags = [3, 0, 7]
    sends = [comm.send(sample(comm.rank, (4,), salt=100 * tag + i), following, tag) for tag in tags for i in range(5)]
    for tag in sorted(tags):  # not in the order of sending
        for i in range(5):
            received = sentinel((4,))
            await comm.recv(received, previous, tag)
            expect_equal(received, sample(previous, (4,), salt=100 * tag + i), f"message {i} under tag {tag}")
    await asyncio.gather(*sends)


async def messages_do_not_disturb_collectives(comm: Comm) -> None:
    received = sentinel((4,))
    # posted long before the send; only one pair takes part
    recv = comm.recv(received, comm.size - 1, 5) if comm.rank == 0 else None
    for i in range(5):
        tensor = sample(comm.rank, (8,), salt=i)
        await comm.all_reduce(tensor)
        expected = reduced([sample(r, (8,), salt=i) for r in range(comm.size)], ReduceOp.SUM)
        expect_equal(tensor, expected, "all_reduce beside a pending receive")
    if comm.rank == comm.size - 1:
        await comm.send(sample(comm.rank, (4,)), 0, 5)
    if recv is not None:
        await recv
        expect_equal(received, sample(comm.size - 1, (4,)), "a receive that waited long")


async def messages_to_oneself(comm: Comm) -> None:
    received = sentinel((2, 3))
    recv = comm.recv(received, comm.rank, 1)
    await comm.send(sample(comm.rank, (2, 3)), comm.rank, 1)
    await recv
    expect_equal(received, sample(comm.rank, (2, 3)), "message to oneself")


async def messages_to_oneself_of_any_size_and_tag(comm: Comm) -> None:
    sends, receives = [], []
    for i, count in enumerate((0, 1, 1000, 1 << 18)):
        sends.append(comm.send(sample(comm.rank, (count,), salt=i), comm.rank, i))
    for i, count in reversed(list(enumerate((0, 1, 1000, 1 << 18)))):  # sent before the receives
        receives.append((comm.recv(sentinel((count,)), comm.rank, i), sample(comm.rank, (count,), salt=i)))
    for work, expected in receives:
        expect_equal(await work, expected, f"message to oneself of {expected.numel()} elements")
        assert work.source == comm.rank, f"source is {work.source}"
    await asyncio.gather(*sends)


async def messages_of_sizes_around_limits(comm: Comm) -> None:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    # transports change protocols at powers of two
    sizes = [0, *(max(1, (1 << power) + by) for power in (5, 12, 15, 16, 17, 19) for by in (-33, 0, 1))]
    for early in (False, True):
        outputs = [torch.zeros(count, dtype=torch.uint8) for count in sizes]
        works = [] if early else [comm.recv(output, previous) for output in outputs]
        sends = [comm.send(sample(comm.rank, (n,), torch.uint8, salt=n), following) for n in sizes]
        if early:
            await comm.barrier()
            works = [comm.recv(output, previous) for output in outputs]
        for count, work in zip(sizes, works, strict=True):
            expect_equal(await work, sample(previous, (count,), torch.uint8, salt=count), f"message of {count} bytes")
            assert work.source == previous, f"source is {work.source}, not {previous}"
        await asyncio.gather(*sends)


async def hundred_messages_in_another_order(comm: Comm) -> None:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    tags = [4, 0, 99, 7, 12345]
    shapes = [(1 + (7919 * i) % 5000,) for i in range(20)]
    sends = [comm.send(sample(comm.rank, s, salt=i), following, tag) for i, s in enumerate(shapes) for tag in tags]
    for tag in sorted(tags):
        outputs = [sentinel(shape) for shape in shapes]
        await asyncio.gather(*(comm.recv(output, previous, tag) for output in outputs))
        for i, output in enumerate(outputs):
            expect_equal(output, sample(previous, shapes[i], salt=i), f"message {i} of 20 under tag {tag}")
    await asyncio.gather(*sends)


async def long_messages_both_ways_at_once(comm: Comm) -> None:
    shape = (1 << 18,)
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [comm.send(sample(comm.rank, shape, salt=tag), peer, tag) for peer in peers for tag in (1, 2)]
    receives = [(peer, tag, comm.recv(sentinel(shape), peer, tag)) for peer in peers for tag in (2, 1)]
    for peer, tag, work in receives:
        expect_equal(await work, sample(peer, shape, salt=tag), f"1 MiB from {peer} under tag {tag}")
    await asyncio.gather(*sends)


async def receives_from_any_source(comm: Comm) -> None:
    try:
        receives = [comm.recv(sentinel((5,)), None, 11)]
    except ValueError as exc:  # a backend may lack this, but must raise at the call
        assert "any source" in str(exc), f"recv(src=None) was refused for another reason: {exc}"
        return
    receives += [comm.recv(sentinel((5,)), tag=11) for _ in range(comm.size - 1)]
    sends = [comm.send(sample(comm.rank, (5,)), peer, 11) for peer in range(comm.size)]
    for work in receives:
        out = await work
        assert work.source is not None, "a receive must say whose message it got"
        expect_equal(out, sample(work.source, (5,)), f"message from any source, of {work.source}")
    assert sorted(work.source or 0 for work in receives) == list(range(comm.size)), "a rank's message was not taken"
    await asyncio.gather(*sends)
    # receives with and without a source match messages in the order of posting
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for early in (False, True):
        works = [] if early else [comm.recv(sentinel((9,)), src, 12) for src in (None, previous, None, previous)]
        sends = [comm.send(sample(comm.rank, (9,), salt=i), following, 12) for i in range(4)]
        if early:
            works = [comm.recv(sentinel((9,)), src, 12) for src in (previous, None, previous, None)]
        for i, work in enumerate(works):
            expect_equal(await work, sample(previous, (9,), salt=i), f"message {i} of 4, from {previous} or any")
            assert work.source == previous, f"source is {work.source}, not {previous}"
        await asyncio.gather(*sends)


async def ready_lets_pass_when_little_is_in_flight(comm: Comm) -> None:
    await comm.ready()
    for _ in range(10):
        comm.all_reduce(torch.ones(4))
        await comm.ready()
    await comm.barrier()
    assert comm.statistics().submitted >= 11
