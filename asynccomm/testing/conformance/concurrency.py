"""Checks of many operations of all kinds in flight at once."""

from __future__ import annotations

import random
from typing import Any

import torch

from asynccomm.comm.comm import Comm
from asynccomm.core.work import Work
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.argument_forms import Forms, StartedOp, expect_finished
from asynccomm.testing.conformance.data import sample
from asynccomm.testing.conformance.objects import expect_same

KINDS = [
    ((3, 4), torch.float32),
    ((0,), torch.int64),
    ((20_011,), torch.float32),
    ((), torch.bfloat16),
    ((7, 3), torch.complex64),
    ((257,), torch.uint8),
]


async def two_hundred_operations_of_all_kinds_in_flight(comm: Comm) -> None:
    started: list[StartedOp] = []
    others: list[tuple[Work[Any], object]] = []
    all_forms = []
    for i, (shape, dtype) in enumerate(KINDS):
        forms = Forms(comm, shape, dtype, torch.clone)
        all_forms.append(forms)
        op = ReduceOp.AVG if i % 2 else ReduceOp.SUM
        parts = [forms.lists(), forms.copies(), forms.singles(), forms.messages()]
        parts += [forms.reductions(op), forms.scattered_reductions(op)]
        random.Random(i).shuffle(parts)  # the same on all ranks
        for part in parts:
            started += part
            others += _objects(comm, i)
    assert len(started) + len(others) > 200
    chaos = random.Random(comm.rank)  # each rank awaits in a different order
    chaos.shuffle(started)
    chaos.shuffle(others)
    await expect_finished(started[:100], "in a crowd")
    for work, expected in others:
        expect_same(await work, expected, f"{work.op} in a crowd")
    await expect_finished(started[100:], "in a crowd")
    for forms in all_forms:
        forms.expect_inputs_untouched("in a crowd")


def _objects(comm: Comm, i: int) -> list[tuple[Work[Any], object]]:
    """Operations with objects, and their expected results."""
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    tensors = {"a": sample(i, (5, i)), "b": [sample(i, (i * 1000,)), i]}
    return [
        (comm.all_gather_object((rank, "x" * 100 * i)), [(r, "x" * 100 * i) for r in range(size)]),
        (comm.broadcast_tensor_dict(tensors if rank == i % size else None, i % size), tensors),
        (comm.send_object((rank, i), following, i), None),
        (comm.recv_object(previous, i), (previous, i)),
        (comm.barrier(), None),
    ]


async def crowds_of_small_operations(comm: Comm) -> None:
    """More operations than any transport has slots for, all in flight before the first await."""
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    works: list[tuple[Work[Any], object]] = []
    for i in range(150):
        total = torch.tensor([float(sum(range(size)) + size * i)])
        works.append((comm.all_reduce(torch.tensor([float(rank + i)])), total))
        works.append((comm.recv(torch.zeros(1), previous, i % 3), torch.tensor([float(previous * i)])))
        works.append((comm.send(torch.tensor([float(rank * i)]), following, i % 3), torch.tensor([float(rank * i)])))
        works.append((comm.broadcast_object(i if rank == i % size else None, i % size), i))
    for work, expected in reversed(works):
        expect_same(await work, expected, f"{work.op} in a crowd of small ones")
