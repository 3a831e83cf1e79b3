"""From operations to batches: nothing that depends on one another in one batch, and the same batches on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.batching import plan as module
from asynccomm.batching.fusion import MERGED_BYTES, fusion_key
from asynccomm.batching.plan import Batch, BatchLimiter, Item, conflict, item_of, plan
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Op,
    Parcels,
    Recv,
    RecvParcel,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    Send,
    SendParcel,
    dims,
)
from asynccomm.ops import (
    lists as lists_module,
)
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.sampling import examples

CPU = torch.device("cpu")
F32 = torch.float32
MIXED: object = object()  # which rank passes ``out``


def group(rank: int = 0, size: int = 3) -> CommInfo:
    return CommInfo("t", rank, size, CPU)


def item(call: Call) -> Item:
    return item_of(call.op, call.inputs, call.outputs)


def items(*calls: Call) -> list[Item]:
    return [item(call) for call in calls]


def reduced(tensor: Tensor, op: object = ReduceOp.SUM, out: Tensor | None = None, rank: int = 0) -> Call:
    return AllReduce.of(group(rank), tensor, op, out)


def zeros(n: int = 4, dtype: torch.dtype = F32) -> Tensor:
    return torch.zeros(n, dtype=dtype)


def flat(batches: Sequence[Batch]) -> list[list[int]]:
    """Each batch as the numbers in it."""
    return [sorted(itertools.chain(*batch)) for batch in batches]


# -- programs: the same on all ranks, on memory that is shared alike


class Slice(NamedTuple):
    """A part of a buffer; several ranks have it in the same place of their own memory."""

    buffer: int
    start: int
    length: int
    step: int = 1

    def of(self, buffers: Sequence[Tensor]) -> Tensor:
        return buffers[self.buffer][self.start : self.start + self.length * self.step : self.step]


class Instruction(NamedTuple):
    kind: str
    root: int
    slices: tuple[Slice, ...]
    alike: bool = True  # what only the root needs is given by all who may

    def call(self, world: CommInfo, buffers: Sequence[Tensor]) -> Call:
        return _KINDS[self.kind](world, self.root, [part.of(buffers) for part in self.slices], self.alike)


BUFFER = 24
SHARE = 2


def _out(world: CommInfo, root: int, out: Tensor, alike: bool) -> Tensor | None:
    return out if alike or world.rank == root else None


def _at_root(world: CommInfo, root: int, tensors: list[Tensor]) -> list[Tensor] | None:
    return tensors if world.rank == root else None


def _pieces(world: CommInfo, tensor: Tensor) -> list[Tensor]:
    return list(tensor.chunk(world.size)) if tensor.numel() else [tensor] * world.size


# Each on slices of SHARE, SHARE and size * SHARE elements (or of none at all).
_KINDS: dict[str, Callable[[CommInfo, int, list[Tensor], bool], Call]] = {
    "all_reduce": lambda g, r, t, a: AllReduce.of(g, t[0], ReduceOp.SUM),
    "all_reduce into": lambda g, r, t, a: AllReduce.of(g, t[0], ReduceOp.SUM, t[1]),
    "all_reduce max": lambda g, r, t, a: AllReduce.of(g, t[2], ReduceOp.MAX),
    "reduce": lambda g, r, t, a: Reduce.of(g, t[0], r, ReduceOp.SUM),
    "reduce into": lambda g, r, t, a: Reduce.of(g, t[0], r, ReduceOp.SUM, _out(g, r, t[1], a)),
    "broadcast": lambda g, r, t, a: Broadcast.of(g, t[0], r),
    "broadcast several": lambda g, r, t, a: Broadcast.of_several(g, [t[0], t[2]], r),
    "all_gather": lambda g, r, t, a: AllGather.of(g, _pieces(g, t[2]), t[0]),
    "all_gather_single": lambda g, r, t, a: AllGatherSingle.of(g, t[2], t[0]),
    "reduce_scatter": lambda g, r, t, a: ReduceScatter.of(g, t[0], _pieces(g, t[2]), ReduceOp.SUM),
    "reduce_scatter_single": lambda g, r, t, a: ReduceScatterSingle.of(g, t[0], t[2], ReduceOp.SUM),
    "all_to_all_single": lambda g, r, t, a: AllToAllSingle.of(g, None, t[2]),
    "all_to_all": lambda g, r, t, a: AllToAll.of(g, _pieces(g, t[2]), [t[0]] * g.size),
    "gather": lambda g, r, t, a: Gather.of(g, _at_root(g, r, _pieces(g, t[2])), t[0], r),
    "scatter": lambda g, r, t, a: Scatter.of(g, t[0], _at_root(g, r, _pieces(g, t[2])), r),
    "barrier": lambda g, r, t, a: Barrier.of(g),
}


@st.composite
def instructions(draw: st.DrawFn, size: int, kinds: Sequence[str] = tuple(_KINDS)) -> Instruction:
    def part(length: int) -> Slice:
        step = draw(st.sampled_from([1, 1, 2]))
        start = draw(st.integers(0, BUFFER - length * step))
        return Slice(draw(st.integers(0, 3)), start, length, step)

    empty = draw(st.integers(0, 9)) == 0
    share = 0 if empty else SHARE
    slices = part(share), part(share), part(size * share)
    return Instruction(draw(st.sampled_from(kinds)), draw(st.integers(0, size - 1)), slices, draw(st.booleans()))


@st.composite
def programs(draw: st.DrawFn, kinds: Sequence[str] = tuple(_KINDS)) -> tuple[int, list[Instruction]]:
    size = draw(st.integers(1, 3))
    return size, draw(st.lists(instructions(size, kinds), min_size=1, max_size=12))


limits = st.fixed_dictionaries(
    {"max_ops": st.none() | st.integers(1, 4), "max_bytes": st.none() | st.sampled_from([1, 8, 16, 40])}
)


def run_on(rank: int, size: int, program: Sequence[Instruction]) -> list[Call]:
    """The calls of one rank, on memory of its own."""
    buffers = [torch.zeros(BUFFER) for _ in range(4)]
    world = group(rank, size)
    calls = []
    for step in program:
        try:
            calls.append(step.call(world, buffers))
        except ValueError as exc:  # outputs that overlap are refused, on some rank
            raise _RefusedError from exc
    return calls


class _RefusedError(Exception):
    pass


def elements(tensors: Sequence[Tensor]) -> set[int]:
    """Addresses that belong to the elements, without those between them."""
    found = set()
    for tensor in tensors:
        for index in itertools.product(*map(range, tensor.shape)):
            offset = sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
            found.add(tensor.data_ptr() + offset * tensor.itemsize)
    return found


def depend(one: Call, other: Call) -> bool:
    """Whether one of them writes what the other touches: by brute force."""
    mine, theirs = elements(one.outputs), elements(other.outputs)
    return bool(mine & theirs or mine & elements(other.inputs) or theirs & elements(one.inputs))


def copies_of_one_root(one: Call, other: Call) -> bool:
    return isinstance(one.op, Broadcast) and isinstance(other.op, Broadcast) and one.op.root == other.op.root


def batch_of_each(batches: Sequence[Batch]) -> dict[int, int]:
    return {i: number for number, batch in enumerate(batches) for fused in batch for i in fused}


def check_batches(calls: Sequence[Call], batches: Sequence[Batch]) -> None:
    """What holds on every rank, whatever the program."""
    numbers = [i for batch in batches for fused in batch for i in fused]
    assert sorted(numbers) == list(range(len(calls))), "each number once"
    ends = [(min(found), max(found)) for found in flat(batches)]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ends)), "batches follow one another"
    for batch in batches:
        assert all(fused == sorted(fused) for fused in batch)
        assert [fused[0] for fused in batch] == sorted(fused[0] for fused in batch), "by their first"
        for fused in batch:
            assert len({fusion_key(calls[i].op) for i in fused}) == 1
            assert len(fused) == 1 or fusion_key(calls[fused[0]].op) is not None
    where = batch_of_each(batches)
    for (i, one), (j, other) in itertools.combinations(enumerate(calls), 2):
        if depend(one, other) and not copies_of_one_root(one, other):
            assert where[i] < where[j], f"{i} {one.op} and {j} {other.op} depend on one another"


def generated(size: int, program: Sequence[Instruction]) -> list[list[Call]] | None:
    """The calls of all ranks; None: one of them is refused."""
    try:
        return [run_on(rank, size, program) for rank in range(size)]
    except _RefusedError:
        return None


@examples(400, 40)
@given(programs(), limits)
def test_nothing_that_depends_on_one_another_shares_a_batch(
    program: tuple[int, list[Instruction]], limits: dict[str, int | None]
) -> None:
    for calls in generated(*program) or []:
        check_batches(calls, plan(items(*calls), **limits))


def expect_one_plan(program: tuple[int, list[Instruction]], limits: dict[str, int | None]) -> None:
    ranks = generated(*program)
    if ranks is not None:
        plans = [plan(items(*calls), **limits) for calls in ranks]
        names = [[[[str(ranks[0][i].op) for i in fused] for fused in batch] for batch in found] for found in plans]
        assert all(found == plans[0] for found in plans), names


SYMMETRIC = [
    kind for kind in _KINDS if kind not in ("broadcast", "broadcast several", "reduce into", "gather", "scatter")
]


@examples(300, 30)
@given(programs(SYMMETRIC), limits)
def test_the_same_batches_on_all_ranks(program: tuple[int, list[Instruction]], limits: dict[str, int | None]) -> None:
    expect_one_plan(program, limits)


@examples(600, 60)
@given(programs(), limits)
def test_the_same_batches_on_all_ranks_whose_parts_differ(
    program: tuple[int, list[Instruction]], limits: dict[str, int | None]
) -> None:
    expect_one_plan(program, limits)


def on_each(size: int, program: Callable[[CommInfo, Sequence[Tensor]], Sequence[Call]]) -> list[list[list[int]]]:
    """The batches of each rank, for a program on buffers."""
    found = []
    for rank in range(size):
        buffers = [torch.zeros(12) for _ in range(4)]
        calls = program(group(rank, size), buffers)
        batches = plan(items(*calls))
        check_batches(calls, batches)
        found.append(flat(batches))
    return found


def parts(tensor: Tensor, size: int = 3) -> list[Tensor]:
    return list(tensor.chunk(size))


UNLIKE: dict[str, tuple[Callable[[CommInfo, Sequence[Tensor]], list[Call]], list[list[int]]]] = {
    "what was broadcast is read": (
        lambda g, b: [Broadcast.of(g, b[0][:4], 0), AllGatherSingle.of(g, b[1], b[0][:4])],
        [[0], [1]],
    ),
    "what was read is broadcast": (
        lambda g, b: [AllReduce.of(g, b[0], ReduceOp.SUM, b[1]), Broadcast.of(g, b[0], 0)],
        [[0], [1]],
    ),
    "reduce into what is used next": (
        lambda g, b: [Reduce.of(g, b[0], 0, ReduceOp.SUM, b[1]), AllReduce.of(g, b[1], ReduceOp.SUM)],
        [[0], [1]],
    ),
    "reduce into what the root alone knows": (
        lambda g, b: [
            Reduce.of(g, b[0], 0, ReduceOp.SUM, b[1] if g.rank == 0 else None),
            AllReduce.of(g, b[1], ReduceOp.SUM),
        ],
        [[0], [1]],
    ),
    "reduce into one output twice": (
        lambda g, b: [Reduce.of(g, b[n], 1, ReduceOp.SUM, b[2] if g.rank == 1 else None) for n in range(2)],
        [[0], [1]],
    ),
    "gather into one list twice": (
        lambda g, b: [Gather.of(g, parts(b[2]) if g.rank == 0 else None, b[n][:4], 0) for n in range(2)],
        [[0], [1]],
    ),
    "gather the root's list": (
        lambda g, b: [
            Gather.of(g, parts(b[2]) if g.rank == 0 else None, b[0][:4], 0),
            Gather.of(g, parts(b[3]) if g.rank == 0 else None, b[2][:4], 0),
        ],
        [[0], [1]],
    ),
    "scatter over the root's list": (
        lambda g, b: [
            Scatter.of(g, b[0][:4], parts(b[2]) if g.rank == 2 else None, 2),
            Scatter.of(g, b[2][:4], parts(b[3]) if g.rank == 2 else None, 2),
        ],
        [[0], [1]],
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_with_different_parts_come_to_the_same_batches(name: str) -> None:
    program, expected = UNLIKE[name]
    found = on_each(3, program)
    assert all(batches == found[0] for batches in found), found
    assert found[0] == expected


def test_uneven_shares_of_which_one_rank_has_none() -> None:
    """An empty tensor has no memory to compare; the others still see that the second reads what the first writes."""
    sizes = [2, 0, 3]
    found = []
    for rank in range(3):
        world = group(rank)
        share = torch.zeros(sizes[rank])
        calls = [
            dims.reduce_scatter_v(world, share, torch.zeros(5), sizes, ReduceOp.SUM, 0),
            dims.all_gather_v(world, torch.zeros(5), share, sizes, 0),
        ]
        found.append(flat(plan(items(*calls))))
    assert found == [[[0], [1]]] * 3


def test_uneven_shares_of_one_tensor() -> None:
    """Ranks use more or less of it, so only some of them see that another operation has the rest."""
    sizes = [2, 5, 3]
    found = []
    for rank in range(3):
        world, x = group(rank), torch.zeros(8)
        calls = [
            dims.all_gather_v(world, torch.zeros(10), x[: sizes[rank]], sizes, 0),
            AllReduce.of(world, x[4:], ReduceOp.SUM),
        ]
        found.append(flat(plan(items(*calls))))
    assert found == [found[0]] * 3


# -- the rules, one by one


def test_one_batch_of_what_is_apart() -> None:
    tensors = [zeros() for _ in range(5)]
    assert plan(items(*[reduced(t) for t in tensors])) == [[[0, 1, 2, 3, 4]]]
    assert plan([]) == []


def test_lots_stand_in_the_order_of_their_first() -> None:
    g = group()
    calls = [
        reduced(zeros()),
        Broadcast.of(g, zeros(), 1),
        reduced(zeros(4, torch.bfloat16)),
        reduced(zeros()),
        Barrier.of(g),
        Broadcast.of(g, zeros(3, torch.int8), 1),
        Broadcast.of(g, zeros(), 0),
        reduced(zeros(), ReduceOp.MAX),
    ]
    assert plan(items(*calls)) == [[[0, 3], [1, 5], [2], [4], [6], [7]]]


@pytest.mark.parametrize("separated", [False, True])
def test_what_touches_what_was_written_begins_a_batch(separated: bool) -> None:
    t = zeros(8)
    calls = [reduced(t[:4]), reduced(t[4:] if separated else t[3:]), reduced(zeros())]
    assert flat(plan(items(*calls))) == ([[0, 1, 2]] if separated else [[0], [1, 2]])


def test_reading_together_is_fine() -> None:
    t = zeros()
    calls = [reduced(t, out=zeros()), AllGatherSingle.of(group(), zeros(12), t), reduced(t, out=zeros())]
    assert flat(plan(items(*calls))) == [[0, 1, 2]]
    calls.append(reduced(t))
    assert flat(plan(items(*calls))) == [[0, 1, 2], [3]], "writing what others read is not"
    calls.append(reduced(t, out=zeros()))
    assert flat(plan(items(*calls))) == [[0, 1, 2], [3], [4]]


def test_memory_counts_anew_in_each_batch() -> None:
    a, b = zeros(), zeros()
    calls = [reduced(a), reduced(a), reduced(b), reduced(b), reduced(a)]
    assert flat(plan(items(*calls))) == [[0], [1, 2], [3, 4]]


def test_reduce_counts_as_writing_everywhere() -> None:
    for rank in range(3):
        t = zeros()
        g = group(rank)
        calls = [Reduce.of(g, t, 1, ReduceOp.SUM), Reduce.of(g, t, 1, ReduceOp.SUM)]
        assert flat(plan(items(*calls))) == [[0], [1]]
        calls = [Reduce.of(g, t, 1, ReduceOp.SUM), AllGatherSingle.of(g, zeros(12), t)]
        assert flat(plan(items(*calls))) == [[0], [1]]
        calls = [Reduce.of(g, zeros(), 1, ReduceOp.SUM) for _ in range(3)]
        assert flat(plan(items(*calls)))[0][0] == 0


def test_broadcasts_of_one_root_may_share_memory() -> None:
    for rank in range(3):
        t, g = zeros(), group(rank)
        calls = [Broadcast.of(g, t, 1), Broadcast.of(g, t, 1), Broadcast.of(g, t[1:], 1)]
        assert plan(items(*calls)) == [[[0, 1, 2]]]
        calls += [Broadcast.of(g, t, 2), Broadcast.of(g, t, 2)]
        assert flat(plan(items(*calls))) == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_gather_and_scatter_share_no_batch_with_others(kind: str) -> None:
    g = group(0)

    def one(root: int) -> Call:
        if kind == "gather":
            return Gather.of(g, None, zeros(), root)
        return Scatter.of(g, zeros(), [zeros() for _ in range(3)] if root == 0 else None, root)

    calls = [reduced(zeros()), one(0), one(1), reduced(zeros()), Barrier.of(g)]
    assert flat(plan(items(*calls))) == [[0], [1], [2], [3, 4]]


def test_strided_tensors_may_interleave() -> None:
    whole = torch.zeros(6, 4)
    calls = [reduced(whole[:, 0]), reduced(whole[:, 1])]
    assert flat(plan(items(*calls))) == [[0, 1]]
    calls = [reduced(whole[:, 0]), reduced(whole[2:, ::3])]
    assert flat(plan(items(*calls))) == [[0], [1]]
    calls = [reduced(whole[:3, 1]), reduced(whole[3:, 1])]
    assert flat(plan(items(*calls))) == [[0, 1]]


def test_empty_tensors_are_nowhere() -> None:
    t = zeros()
    for empty in (t[2:2], torch.zeros(0), torch.zeros(3, 0)):
        assert flat(plan(items(reduced(t), reduced(empty), reduced(t.view(2, 2)[:0])))) == [[0, 1, 2]]


def test_one_tensor_side_by_side_with_itself_in_one_operation() -> None:
    """What one operation does with its own tensors is its own business."""
    t = zeros(12)
    calls = [AllGatherSingle.of(group(1), t, t[4:8]), AllToAllSingle.of(group(1), t, t)]
    assert flat(plan(items(*calls))) == [[0], [1]]
    assert flat(plan(items(calls[0], reduced(zeros())))) == [[0, 1]]


# -- messages


def message(tensor: Tensor, *, receive: bool = False, tag: int = 0) -> Call:
    return Recv.of(group(), tensor, 1, tag) if receive else Send.of(group(), tensor, 1, tag)


def test_messages_neither_end_a_batch_nor_count() -> None:
    t = zeros()
    calls = [
        message(zeros()),
        reduced(t),
        message(zeros(), receive=True),
        message(zeros()),
        reduced(t),
        message(zeros(), receive=True),
        reduced(zeros()),
        message(zeros()),
    ]
    assert flat(plan(items(*calls))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert flat(plan(items(*calls[2:]), max_ops=1)) == [[0, 1, 2, 3], [4, 5]]
    assert flat(plan(items(*[message(zeros()) for _ in range(9)]), max_ops=1, max_bytes=1)) == [list(range(9))]


@examples(200, 20)
@given(programs(), st.data(), limits)
def test_messages_change_nothing_about_collectives(
    program: tuple[int, list[Instruction]], data: st.DataObject, limits: dict[str, int | None]
) -> None:
    ranks = generated(*program)
    if ranks is None:
        return
    for calls in ranks:
        messages = data.draw(st.lists(st.integers(0, len(calls)), max_size=6))
        mixed: list[Call] = []
        for i, call in enumerate(calls):
            mixed += [message(zeros(), receive=n % 2 == 0) for n in range(messages.count(i))]
            mixed.append(call)
        numbers = {id(call): i for i, call in enumerate(calls)}
        batches = plan(items(*mixed), **limits)
        alone = [
            [[numbers[id(mixed[i])] for i in fused if not mixed[i].op.p2p] for fused in batch] for batch in batches
        ]
        found = [[fused for fused in batch if fused] for batch in alone]
        assert [batch for batch in found if batch] == plan(items(*calls), **limits)
        where = batch_of_each(batches)
        order = [where[i] for i, call in enumerate(mixed) if call.op.p2p]
        assert order == sorted(order), "messages keep their order"
        for batch in batches:
            firsts = [fused[0] for fused in batch if mixed[fused[0]].op.p2p]
            assert firsts == sorted(firsts)


def test_a_message_shares_no_memory_with_others() -> None:
    t = zeros(8)
    for calls, named in [
        ([reduced(t), message(t[4:])], "all_reduce"),
        ([message(t), reduced(t)], "all_reduce"),
        ([message(t, receive=True), message(t)], "recv|send"),
        ([message(t, receive=True), message(t[7:], receive=True)], "recv"),
        ([message(t, receive=True), reduced(t[:1], out=zeros(1))], "all_reduce"),
        ([reduced(zeros()), message(t), reduced(zeros()), reduced(t[2:3])], "all_reduce"),
    ]:
        with pytest.raises(ValueError, match=f"shares memory with .*{named}.*await one of them"):
            plan(items(*calls))
    assert flat(plan(items(message(t), message(t), reduced(t, out=zeros(8))))) == [[0, 1, 2]], "reading is fine"
    assert flat(plan(items(message(t[:4]), reduced(t[4:]), message(t[2:2], receive=True)))) == [[0, 1, 2]]


# -- limits


@examples(300, 30)
@given(st.lists(st.integers(0, 6), max_size=20), limits)
def test_limits_are_counted_in_the_order_of_the_program(sizes: list[int], limits: dict[str, int | None]) -> None:
    most_ops, most_bytes = (limits[name] or 10**9 for name in ("max_ops", "max_bytes"))
    expected: list[list[int]] = []
    nbytes = 0
    for i, n in enumerate(sizes):
        if not expected or len(expected[-1]) == most_ops or nbytes + 4 * n > most_bytes:
            expected.append([])
            nbytes = 0
        expected[-1].append(i)
        nbytes += 4 * n
    assert flat(plan(items(*[reduced(zeros(n)) for n in sizes]), **limits)) == expected


def test_one_larger_than_the_limit_is_a_batch() -> None:
    calls = [reduced(zeros(n)) for n in (1, 100, 1)]
    assert flat(plan(items(*calls), max_bytes=8)) == [[0], [1], [2]]


def test_meter() -> None:
    small, large, sent = reduced(zeros(2)).op, reduced(zeros(10)).op, message(zeros(100)).op
    assert not BatchLimiter().limited
    assert BatchLimiter(max_ops=1).limited
    assert BatchLimiter(max_bytes=1).limited
    free = BatchLimiter()
    assert not any(free.count(large) for _ in range(100))
    assert free.admits(large)
    meter = BatchLimiter(max_ops=3, max_bytes=20)
    assert meter.admits(large), "a batch may be of one that is too large"
    assert not meter.count(small)
    assert meter.admits(small)
    assert not meter.admits(large)
    assert meter.admits(sent)
    assert not meter.count(sent)
    assert not meter.count(small)
    assert not meter.admits(large)
    assert meter.count(Barrier.of(group()).op), "three"
    assert not meter.admits(small)
    assert not meter.admits(Barrier.of(group()).op)
    assert meter.admits(sent)
    meter.clear()
    assert meter.admits(large)
    assert meter.count(large), "it is full"
    meter.clear()
    meter.count(Barrier.of(group()).op)
    assert not meter.admits(large), "nothing is empty that has one in it, of however few bytes"


def test_exactly_full_is_full() -> None:
    meter = BatchLimiter(max_bytes=16)
    assert not meter.count(reduced(zeros(2)).op)
    assert meter.admits(reduced(zeros(2)).op)
    assert meter.count(reduced(zeros(2)).op)


# -- one path for what is apart, and one for the rest


@examples(300, 30)
@given(programs(), limits)
def test_both_paths_come_to_the_same(program: tuple[int, list[Instruction]], limits: dict[str, int | None]) -> None:
    for calls in generated(*program) or []:
        found = items(*calls)
        fast = plan(found, **limits)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_disjoint", lambda items: False)
            assert plan(found, **limits) == fast


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)).map(lambda p: (p[0], p[0] + p[1], ())), max_size=3)


@examples(500, 50)
@given(st.lists(st.tuples(spans, spans), max_size=5))
def test_disjoint_says_no_to_every_conflict(drawn: list[tuple[Any, Any]]) -> None:
    op = Barrier.of(group()).op
    found: list[Item] = [(op, reads, writes) for reads, writes in drawn]
    clash = any(conflict(one, other) for one, other in itertools.combinations(found, 2))
    assert not (module._disjoint(found) and clash)


def test_conflict() -> None:
    t, u = zeros(8), zeros(8)
    assert conflict(item(reduced(t)), item(reduced(t[7:])))
    assert not conflict(item(reduced(t[:7])), item(reduced(t[7:])))
    assert not conflict(item(reduced(t, out=u)), item(reduced(t, out=zeros(8))))
    assert conflict(item(reduced(t, out=u)), item(reduced(t)))
    assert conflict(item(reduced(u)), item(reduced(t, out=u)))


# -- what moves as one


def every_call() -> Iterator[tuple[Call, object]]:
    """A call of each form, with its sort."""
    g, t, n = group(), zeros(3), ReduceOp.SUM
    lists = [zeros(3) for _ in range(3)]
    yield AllReduce.of(g, t, n), (AllReduce, F32, n.type)
    yield AllReduce.of(g, t, ReduceOp.MAX), (AllReduce, F32, ReduceOp.MAX.type)
    yield AllReduce.of(g, t.long(), n), (AllReduce, torch.int64, n.type)
    yield AllReduce.of_several(g, [zeros(3), zeros(1)], n), (AllReduce, F32, n.type)
    yield AllReduce.of(g, t, ReduceOp.PREMUL_SUM(2)), None
    yield Reduce.of(g, t, 0, n), None
    yield ReduceScatter.of(g, None, lists, n), (ReduceScatter, F32, n.type)
    yield ReduceScatterSingle.of(g, None, zeros(9), n), (ReduceScatter, F32, n.type)
    yield ReduceScatter.of(g, None, [zeros(k) for k in (1, 2, 3)], n), None
    yield ReduceScatter.of(g, None, lists, ReduceOp.PREMUL_SUM(2)), None
    yield ReduceScatterSingle.of(g, None, zeros(9), ReduceOp.PREMUL_SUM(2)), None
    yield lists_module.reduce_scatter(g, None, [zeros(3), zeros(6)], n)[0][0], (ReduceScatter, F32, n.type)
    yield Broadcast.of(g, t, 2), (Broadcast, 2)
    yield Broadcast.of(g, t.long(), 2), (Broadcast, 2)
    yield Broadcast.of_several(g, [t, t.long()], 0), (Broadcast, 0)
    yield AllGather.of(g, None, t), AllGather
    yield AllGather.of(g, [zeros(k) for k in (3, 2, 1)], t), None
    yield AllGatherSingle.of(g, None, t.long()), AllGather
    yield lists_module.all_gather(g, None, [t, t.long()]), AllGather
    yield Gather.of(g, None, t, 0), None
    yield Scatter.of(g, t, lists, 0), None
    yield AllToAllSingle.of(g, None, t), None
    yield AllToAll.of(g, lists, [zeros(3) for _ in range(3)]), None
    yield Barrier.of(g), None
    yield Send.of(g, t, 1, 0), None
    yield Recv.of(g, t, 1, 0), None


def test_sorts() -> None:
    for call, sort in every_call():
        assert fusion_key(call.op) == sort, call.op
    for op in (Parcels("x"), SendParcel("x", 1, 0), RecvParcel("x", 1, 0)):
        assert fusion_key(op) is None


def test_large_ones_go_by_themselves() -> None:
    numel = MERGED_BYTES // 4
    for make in (
        lambda n: AllReduce(F32, n, ReduceOp.SUM),
        lambda n: Broadcast(F32, n, 0),
        lambda n: AllGather(F32, n),
        lambda n: ReduceScatterSingle(F32, n, ReduceOp.SUM),
    ):
        assert fusion_key(make(numel)) is not None
        assert fusion_key(make(numel + 1)) is None
    large: Op = AllReduce(F32, numel + 1, ReduceOp.SUM)
    small: Op = AllReduce(F32, 1, ReduceOp.SUM)
    assert plan([(op, (), ()) for op in (small, large, small, large)]) == [[[0, 2], [1], [3]]]


def test_complex_reductions_are_of_their_own_sort() -> None:
    kinds = [torch.complex64, torch.float32, torch.complex64]
    assert plan(items(*[reduced(zeros(2, dtype)) for dtype in kinds])) == [[[0, 2], [1]]]


def test_labels_do_not_keep_apart() -> None:
    ops = [AllReduce(F32, 1, ReduceOp.SUM, label=label) for label in ("a", "b", "")]
    assert plan([(op, (), ()) for op in ops]) == [[[0, 1, 2]]]
