"""Checks of batches of sends and receives."""

from __future__ import annotations

import asyncio

import torch

from asynccomm.comm.comm import Comm
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.data import (
    DTYPES,
    GuardedOutput,
    everyones,
    expect_all_equal,
    expect_equal,
    reduced,
    sample,
    sentinel,
    strided,
)


async def ring_exchange_of_large_tensors(comm: Comm) -> None:
    rank, size = comm.rank, comm.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    shape = (300_011,)
    for order in ("send first", "receive first"):
        batch = comm.batch_op_create()
        mine, theirs = sample(rank, shape), sentinel(shape)
        if order == "send first":
            batch.send(mine, following)
        batch.recv(theirs, previous)
        if order == "receive first":
            batch.send(mine, following)
        tensors = await batch.issue()
        assert tensors[0] is (mine if order == "send first" else theirs), "a batch gives its tensors in their order"
        expect_equal(theirs, sample(previous, shape), f"ring exchange, {order}")
        expect_equal(mine, sample(rank, shape), f"ring exchange, {order}: input")


async def everybody_with_everybody(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    batch = comm.batch_op_create()
    outputs = []
    for peer in range(size):  # including this rank
        for tag in (2, 1):
            for i, dtype in enumerate(DTYPES[:: 3 + tag]):
                batch.send(sample(rank, (2, 3), dtype, salt=peer + tag + i), peer, tag)
    for peer in reversed(range(size)):
        for tag in (1, 2):
            for i, dtype in enumerate(DTYPES[:: 3 + tag]):
                frame = GuardedOutput((2, 3), dtype)
                batch.recv(frame.output, peer, tag)
                outputs.append((frame, sample(peer, (2, 3), dtype, salt=rank + tag + i)))
    assert len(batch.ops) == 2 * len(outputs)
    await batch.issue()
    for frame, expected in outputs:
        frame.expect(expected, "batch of everybody with everybody")


async def several_messages_to_one_peer_keep_their_order(comm: Comm) -> None:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    shapes = [(3,), (0,), (50_000,), (1,), (3,), (700,)]
    sends, receives = comm.batch_op_create(), comm.batch_op_create()
    outputs = [strided(sentinel(shape)) for shape in shapes]
    for i, shape in enumerate(shapes):
        sends.send(sample(comm.rank, shape, salt=i), following)
        receives.recv(outputs[i], previous)
    works = [receives.issue(), sends.issue()]
    expected = [sample(previous, shape, salt=i) for i, shape in enumerate(shapes)]
    expect_all_equal(await works[0], expected, "several messages of one batch")
    await works[1]


async def batches_of_some_while_others_do_something_else(comm: Comm) -> None:
    size, rank = comm.size, comm.rank
    pair = (0, size - 1)
    tensors = [sample(rank, (40,), salt=i) for i in range(6)]
    works = [comm.all_reduce(tensor) for tensor in tensors[:3]]
    received = sentinel((100_003,))
    exchanges = []
    if rank in pair:
        batch = comm.batch_op_create()
        peer = pair[1] if rank == pair[0] else pair[0]
        batch.recv(received, peer, 4)
        batch.send(sample(rank, (100_003,)), peer, 4)
        exchanges.append(batch.issue())
    works += [comm.all_reduce(tensor) for tensor in tensors[3:]]
    await asyncio.gather(*works, *exchanges)
    for i, tensor in enumerate(tensors):
        expected = reduced(everyones(size, (40,), salt=i), ReduceOp.SUM)
        expect_equal(tensor, expected, "all_reduce beside a batch of two ranks")
    if rank in pair:
        peer = pair[1] if rank == pair[0] else pair[0]
        expect_equal(received, sample(peer, (100_003,)), "batch of two ranks beside collectives")


async def a_batch_meets_single_sends_and_receives(comm: Comm) -> None:
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    single = comm.recv(sentinel((5,)), previous, 6)
    batch = comm.batch_op_create()
    batch.send(sample(comm.rank, (5,)), following, 6)
    batch.send(sample(comm.rank, (6,)), following, 6)
    done = batch.issue()
    expect_equal(await single, sample(previous, (5,)), "a single receive of what a batch sent")
    batch = comm.batch_op_create()
    batch.recv(torch.zeros(6), previous, 6)
    expect_all_equal(await batch.issue(), [sample(previous, (6,))], "a batch of one receive")
    await done
    try:
        comm.batch_op_create().issue()
    except ValueError:
        pass
    else:
        raise AssertionError("an empty batch was issued")
