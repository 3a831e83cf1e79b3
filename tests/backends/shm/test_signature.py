"""Two words per collective: what they tell apart, and what they say."""

import itertools

import pytest
import torch

from asynccomm import ops
from asynccomm.backends.shm.signature import describe, differing_layout, signature
from asynccomm.ops import Op
from asynccomm.ops.base import layout_of
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
    *(ops.AllReduce(F, 3, ReduceOp.SUM, layout=layout) for layout in (1, 0xFFFFFF)),
    *(ops.Broadcast(F, 3, 300, layout=layout) for layout in (1, 0xFFFFFF)),
    *(ops.Parcels("gather_object", taker=rank) for rank in (0, 300)),
    *(ops.Parcels(what, shared, giver=rank) for what in ("a", "b") for shared in (True, False) for rank in (0, 300)),
    ops.Parcels("gather_object", giver=0),
    ops.Parcels("gather_object"),
    ops.Parcels("gather_object", giver=1, taker=2),
]


def test_differing_operations_have_differing_words() -> None:
    for one, other in itertools.combinations(ALL, 2):
        assert signature(one) != signature(other), f"{one}, {other}"


@pytest.mark.parametrize("op", ALL, ids=str)
def test_words_describe_the_operation(op: Op) -> None:
    words = signature(op)
    assert all(0 <= word < 1 << 64 for word in words)
    assert describe(words) == str(op)


def test_of_sizes_only_one_rank_knows_nothing_is_said() -> None:
    one, other = (ops.AllToAll(F, sends, (1, 2)) for sends in ((1, 2), (1, 3)))
    assert signature(one) == signature(other) != signature(ops.AllToAll(I, (1, 2), (1, 2)))
    assert describe(signature(one)) == "all_to_all(float32)"


def test_shares_of_each_ranks_own_size_are_told_apart() -> None:
    one, other = (ops.AllGather(F, 4, layout=layout_of(counts), counts=counts) for counts in ((1, 4), (2, 4)))
    assert signature(one) != signature(other)
    assert differing_layout(signature(one), signature(other))
    assert describe(signature(one)) == "all_gather(float32[4] in pieces)"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (ops.AllReduce(F, 3, ReduceOp.SUM), ops.AllReduce(F, 3, ReduceOp.SUM), False),
        (ops.AllReduce(F, 3, ReduceOp.SUM), ops.AllReduce(F, 3, ReduceOp.SUM, layout=5), True),
        (ops.AllReduce(F, 3, ReduceOp.SUM), ops.AllReduce(I, 3, ReduceOp.SUM, layout=5), False),
        (ops.AllReduce(F, 3, ReduceOp.SUM), ops.AllReduce(F, 4, ReduceOp.SUM, layout=5), False),
        (ops.Parcels("a", taker=0), ops.Parcels("a", taker=1), False),
    ],
)
def test_differing_layout(one: Op, other: Op, same: bool) -> None:
    assert differing_layout(signature(one), signature(other)) is same


def test_parcels_of_a_method_that_was_never_called_here() -> None:
    code, _ = signature(ops.Parcels("never", giver=3))
    assert describe((code, 12345)) == "another method for objects or uneven tensors(root=3)"


def test_factors_are_each_ranks_own() -> None:
    one = ops.AllReduce(F, 3, ReduceOp.PREMUL_SUM(2.0))
    other = ops.AllReduce(F, 3, ReduceOp.PREMUL_SUM(3.0))
    assert signature(one) == signature(other) != signature(ops.AllReduce(F, 3, ReduceOp.SUM))
    assert "PREMUL_SUM" in describe(signature(one))


def test_nonsense_is_described_too() -> None:
    assert "unknown" in describe((0xFF, 1))
    assert "unknown" in describe((1 | 0xFF << 8, 1))
