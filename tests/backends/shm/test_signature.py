"""Two words per collective: what they tell apart, and what they say."""

import itertools

import pytest
import torch

from asynccomm import ops
from asynccomm.backends.shm.signature import describe, signature
from asynccomm.ops import Op
from asynccomm.reduce_op import ReduceOp

F, I = torch.float32, torch.int64  # noqa: E741
ALL: list[Op] = [
    ops.Barrier(),
    *(ops.AllReduce(d, n, r) for d in (F, I) for n in (0, 3) for r in (ReduceOp.SUM, ReduceOp.BXOR)),
    *(ops.Reduce(F, 3, root, ReduceOp.MAX) for root in (0, 300)),
    *(ops.Broadcast(torch.float8_e4m3fn, 3, root) for root in (0, 1)),
    *(ops.Scatter(F, 3, root) for root in (0, 1)),
    *(ops.Gather(F, 3, root) for root in (0, 1)),
    ops.AllGather(F, 3),
    ops.AllGatherSingle(F, 3),
    ops.AllToAllSingle(F, 3),
    ops.ReduceScatter(F, 3, ReduceOp.SUM),
    ops.ReduceScatterSingle(F, 3, ReduceOp.SUM),
    ops.AllReduce(F, 1 << 40, ReduceOp.SUM),
]


def test_differing_operations_have_differing_words() -> None:
    for one, other in itertools.combinations(ALL, 2):
        assert signature(one) != signature(other), f"{one}, {other}"


@pytest.mark.parametrize("op", ALL, ids=str)
def test_words_describe_the_operation(op: Op) -> None:
    words = signature(op)
    assert all(0 <= word < 1 << 64 for word in words)
    assert describe(words) == str(op)


def test_factors_are_each_ranks_own() -> None:
    one = ops.AllReduce(F, 3, ReduceOp.PREMUL_SUM(2.0))
    other = ops.AllReduce(F, 3, ReduceOp.PREMUL_SUM(3.0))
    assert signature(one) == signature(other) != signature(ops.AllReduce(F, 3, ReduceOp.SUM))
    assert "PREMUL_SUM" in describe(signature(one))


def test_nonsense_is_described_too() -> None:
    assert "unknown" in describe((0xFF, 1))
    assert "unknown" in describe((1 | 0xFF << 8, 1))
