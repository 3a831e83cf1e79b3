"""Two words per collective: what they tell apart, and what they say."""

import itertools
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm import ops
from asynccomm.ops import Op
from asynccomm.ops.base import layout_of, layout_of_shares
from asynccomm.ops.dtypes import BY_NAME
from asynccomm.ops.reduce_op import RedOpType, ReduceOp
from asynccomm.ops.signature import REMEMBERED, describe, differing_layout, signature
from tests.cases import cases
from tests.sampling import examples

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
    ops.Parcels("a", form="b"),
    ops.AllGather(F, 3, method="dispatch"),
    ops.AllGatherSingle(F, 3, method="dispatch"),
    ops.ReduceScatter(F, 3, ReduceOp.SUM, method="combine"),
    ops.ReduceScatterSingle(F, 3, ReduceOp.SUM, method="combine"),
]


TAGGED = [replace(op, label=tag) for op in ALL for tag in ("layer3.bias", "layer4.bias")]


def test_differing_operations_have_differing_words() -> None:
    for one, other in itertools.combinations(ALL + TAGGED, 2):
        assert signature(one) != signature(other), f"{one}, {other}"


@cases("op", ALL + [op for op in TAGGED if getattr(op, "numel", 0) < 1 << 40], ids=str)
def test_words_describe_the_operation(op: Op) -> None:
    words = signature(op)
    assert all(0 <= word < 1 << 64 for word in words)
    assert describe(words) == str(op)


def test_of_sizes_only_one_rank_knows_nothing_is_said() -> None:
    one, other = (ops.AllToAll(F, sends, (1, 2)) for sends in ((1, 2), (1, 3)))
    assert signature(one) == signature(other) != signature(ops.AllToAll(I, (1, 2), (1, 2)))
    assert describe(signature(one)) == "all_to_all(float32)"


@pytest.mark.parametrize("method", ["dispatch", "combine"])
def test_an_all_to_all_with_a_method_is_told_apart_and_named(method: str) -> None:
    plain, named = ops.AllToAll(F, (1, 2), (1, 2)), ops.AllToAll(F, (1, 2), (1, 2), method=method)
    assert signature(plain) != signature(named)
    assert not plain.fits(named)
    assert not named.fits(plain)
    assert describe(signature(named)) == f"{method}(float32)"
    assert str(named) == f"{method}(float32, sends [1, 2], receives [1, 2])"
    assert named.of_sender(8, 1) == f"{method}(float32, sends 2 elements to rank 1)"


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
    assert "unknown" in describe((0xFF, (1 << 64) - 1))


# -- tags


def test_words_are_the_same_in_every_process() -> None:
    assert signature(ops.Barrier(label="layer3.bias")) == (128, 4011552780777947136)


def test_a_tag_that_is_not_known_here() -> None:
    known: list[Op] = [ops.Barrier(label="x"), ops.AllReduce(F, 3, ReduceOp.SUM, label="x")]
    code, second = signature(known[0])
    assert describe((code, second ^ 1 << 40)) == "barrier(tag unknown here)"
    code, second = signature(known[1])
    assert describe((code, second ^ 1 << 63)) == "all_reduce(float32[3], SUM, tag unknown here)"


def test_of_ever_new_tags_only_the_last_are_remembered() -> None:
    op = ops.Barrier(label="the first")
    words = signature(op)
    assert describe(words) == str(op)
    for i in range(REMEMBERED):
        signature(ops.Barrier(label=f"request {i}"))
    assert describe(words) == "barrier(tag unknown here)"
    last = ops.Barrier(label=f"request {REMEMBERED - 1}")
    assert describe(signature(last)) == str(last)
    assert signature(op) == words
    assert describe(words) == str(op)


def test_tags_of_what_has_no_size_are_told_apart() -> None:
    words = {signature(ops.AllToAll(F, (1, 2), (1, 2), label=str(i))) for i in range(1000)}
    assert len(words) == 1000
    assert describe(signature(ops.AllToAll(F, (1, 2), (1, 2), label="999"))) == "all_to_all(float32, tag='999')"


HUGE = [1 << 40, (1 << 40) + 1, 3 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 2]


def test_huge_sizes_are_told_apart_with_tags_too() -> None:
    for tag in ("", "layer3.bias"):
        words = [signature(ops.AllReduce(F, numel, ReduceOp.SUM, label=tag)) for numel in [0, 1, *HUGE]]
        assert len(set(words)) == len(words)
        assert all(0 <= word < 1 << 64 for pair in words for word in pair)
    for numel in HUGE:  # whatever a tag makes of a size, no untagged operation has these words
        tagged = signature(ops.AllReduce(F, numel, ReduceOp.SUM, label="layer3.bias"))
        assert tagged != signature(ops.AllReduce(F, tagged[1], ReduceOp.SUM))


def test_a_differing_tag_is_no_differing_layout() -> None:
    one, other = (ops.AllReduce(F, 3, ReduceOp.SUM, layout=5, label=tag) for tag in ("a", "b"))
    assert not differing_layout(signature(one), signature(other))
    assert differing_layout(signature(one), signature(replace(one, layout=6)))


# -- any operations

KINDS = [
    *(ops.Barrier, ops.AllReduce, ops.Reduce, ops.Broadcast, ops.Scatter, ops.Gather, ops.AllGather, ops.AllToAll),
    *(ops.AllGatherSingle, ops.AllToAllSingle, ops.ReduceScatter, ops.ReduceScatterSingle, ops.Parcels),
]
REDUCTIONS = [ReduceOp(kind) for kind in RedOpType if kind is not RedOpType.PREMUL_SUM]
REDUCTIONS += [ReduceOp.PREMUL_SUM(2.0), ReduceOp.PREMUL_SUM(3.0)]
ranks = st.integers(0, 3) | st.integers(0, (1 << 20) - 2)
# so few of each that two operations are often equal
VALUES: dict[str, st.SearchStrategy[object]] = {
    "dtype": st.sampled_from(list(BY_NAME.values())),
    "numel": st.integers(0, 3) | st.sampled_from(HUGE),
    "layout": st.sampled_from([0, 1, 0xFFFFFF]),
    "counts": st.lists(st.integers(0, 2), max_size=2).map(tuple),
    "reduction": st.sampled_from(REDUCTIONS),
    "root": ranks,
    "shared": st.booleans(),
    "giver": st.none() | ranks,
    "taker": st.none() | ranks,
    "sends": st.lists(st.integers(0, 2), max_size=2).map(tuple),
    "receives": st.lists(st.integers(0, 2), max_size=2).map(tuple),
    "label": st.sampled_from(["", "a", "b", "layer3.bias", "ü"]),
    "form": st.sampled_from(["", "a"]),
}
METHODS: dict[type[Op], list[str]] = {
    ops.Parcels: ["all_gather_v", "gather_object"],
    ops.AllGather: ["", "dispatch"],
    ops.AllGatherSingle: ["", "dispatch"],
    ops.AllToAll: ["", "dispatch", "combine"],
    ops.ReduceScatter: ["", "combine"],
    ops.ReduceScatterSingle: ["", "combine"],
}


def values_of(kind: type[Op]) -> dict[str, st.SearchStrategy[object]]:
    """The values of each field of ``kind``."""
    return {**VALUES, "method": st.sampled_from(METHODS.get(kind, [""]))}


def consistent(op: Op) -> Op:
    """Shares of each rank's own size have a layout that says so."""
    if isinstance(op, ops.AllGather | ops.ReduceScatter) and op.counts:
        return replace(op, layout=layout_of_shares(op.counts))
    return op


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Op, Op]:
    """Two operations, mostly alike but for a field or two."""
    kind = draw(st.sampled_from(KINDS))
    values = values_of(kind)
    one: Op = kind(**{field.name: draw(values[field.name]) for field in fields(kind)})
    names = draw(st.lists(st.sampled_from([field.name for field in fields(kind)]), max_size=2))
    other = replace(one, **{name: draw(values[name]) for name in names})
    if draw(st.integers(0, 9)) == 0:
        another = draw(st.sampled_from(KINDS))
        known = {f.name for f in fields(one)} - {"method"}
        values = values_of(another)
        same = {f.name: getattr(one, f.name) if f.name in known else draw(values[f.name]) for f in fields(another)}
        other = another(**same)
    return consistent(one), consistent(other)


@examples(2000)
@given(pairs())
def test_words_are_equal_where_operations_fit(pair: tuple[Op, Op]) -> None:
    one, other = pair
    words = signature(one), signature(other)
    assert all(0 <= word < 1 << 64 for pair in words for word in pair)
    assert (words[0] == words[1]) is one.fits(other) is other.fits(one)


def test_any_operations_are_of_every_kind() -> None:
    collectives = {cls for cls in vars(ops).values() if isinstance(cls, type) and issubclass(cls, Op) and not cls.p2p}
    assert set(KINDS) == collectives - {Op, ops.TensorOp, ops.GroupedOp}


@examples(500)
@given(pairs())
def test_any_operation_can_be_described(pair: tuple[Op, Op]) -> None:
    text = describe(signature(pair[0]))
    assert "something unknown" not in text
    if pair[0].label and not getattr(pair[0], "numel", 0) >> 40:
        assert text.endswith(f"tag={pair[0].label!r})")
