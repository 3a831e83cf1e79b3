"""One operation of several: computes what they would one by one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends import loopback
from asynccomm.backends.base import Submission
from asynccomm.backends.regions import bytes_of
from asynccomm.batching.fusion import fuse, fusion_key
from asynccomm.core.mailbox import Mailbox
from asynccomm.core.work import UNNUMBERED, Work
from asynccomm.errors import CollectiveMismatchError
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    Broadcast,
    Call,
    Op,
    ReduceScatter,
    ReduceScatterSingle,
)
from asynccomm.ops import (
    lists as lists_module,
)
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from asynccomm.testing.conformance.data import COMPLEX, DTYPES, layouts, sample, sentinel
from asynccomm.testing.local import loopback_world
from tests.cases import cases
from tests.sampling import examples, some

CPU = torch.device("cpu")
SHAPES = [(), (3,), (0,), (2, 5), (4, 0), (7, 3)]
Make = Callable[[CommInfo, random.Random], Call]  # seeded alike on all ranks, each with data of its own


def laid(tensor: Tensor, chance: random.Random) -> Tensor:
    return chance.choice([found for _, found in layouts(tensor)])


def data(world: CommInfo, chance: random.Random, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return laid(sample(world.rank, shape, dtype, chance.randrange(9)), chance)


def blank(chance: random.Random, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return laid(sentinel(shape, dtype), chance)


def shape(chance: random.Random) -> tuple[int, ...]:
    return chance.choice(SHAPES)


def one_reduction(op: ReduceOp, dtype: torch.dtype) -> Make:
    def make(world: CommInfo, chance: random.Random) -> Call:
        kind = chance.randrange(3)
        if kind == 2:
            return lists_module.all_reduce(
                world, [data(world, chance, dtype, shape(chance)) for _ in range(3)], op
            ).calls[0]
        where = shape(chance)
        tensor = data(world, chance, dtype, where)
        return AllReduce.of(world, tensor, op, blank(chance, dtype, where) if kind else None)

    return make


def one_scattered(op: ReduceOp, dtype: torch.dtype) -> Make:
    def make(world: CommInfo, chance: random.Random) -> Call:
        kind = chance.randrange(5)
        where = shape(chance)
        if kind == 4:  # the ranks' shares of it are perhaps no views
            whole = data(world, chance, dtype, (world.size + 1, world.size))
            return lists_module.reduce_scatter(world, [blank(chance, dtype, (world.size + 1,))], [whole], op)[0][0]
        if kind == 0:
            inputs = [data(world, chance, dtype, where) for _ in range(world.size)]
            return ReduceScatter.of(world, blank(chance, dtype, where), inputs, op)
        wide = (world.size, *where)
        if kind == 1:
            return lists_module.reduce_scatter(world, None, [data(world, chance, dtype, wide) for _ in range(2)], op)[
                0
            ][0]
        return ReduceScatterSingle.of(world, blank(chance, dtype, where), data(world, chance, dtype, wide), op)

    return make


def one_copy(root: int) -> Make:
    def make(world: CommInfo, chance: random.Random) -> Call:
        tensors = [data(world, chance, chance.choice(DTYPES), shape(chance)) for _ in range(3)]
        source = root % world.size
        return (
            Broadcast.of_several(world, tensors, source)
            if chance.random() < 0.3
            else Broadcast.of(world, tensors[0], source)
        )

    return make


def one_gathering(world: CommInfo, chance: random.Random) -> Call:
    kind = chance.randrange(5)
    dtype, where = chance.choice(DTYPES), shape(chance)
    tensor = data(world, chance, dtype, where)
    if kind == 0:
        return AllGather.of(world, [blank(chance, dtype, where) for _ in range(world.size)], tensor)
    if kind == 1:
        return lists_module.all_gather(world, None, [tensor, data(world, chance, chance.choice(DTYPES), shape(chance))])
    if kind == 2:  # in place
        whole = blank(chance, dtype, (world.size, *where))
        whole[world.rank].copy_(tensor)
        return AllGatherSingle.of(world, whole, whole[world.rank])
    return AllGatherSingle.of(world, blank(chance, dtype, (world.size, *where)), tensor)


def legal(op: ReduceOp, dtype: torch.dtype) -> bool:
    try:
        op.check(dtype)
    except ValueError:
        return False
    return True


REDUCTIONS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.BXOR]
SORTS: dict[str, Make] = {
    **{
        f"{kind.__name__} {op} {dtype}": kind(op, dtype)
        for kind in (one_reduction, one_scattered)
        for op in REDUCTIONS
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool)
        if legal(op, dtype)
    },
    "broadcast from 0": one_copy(0),
    "broadcast from 1": one_copy(1),
    "all_gather": one_gathering,
}


def submissions(calls: Sequence[Call], mailbox: Mailbox) -> list[Submission]:
    return [Submission(call, work_of(call, mailbox)) for call in calls]


def work_of(call: Call, mailbox: Mailbox) -> Work[Any]:
    return Work(call.op, UNNUMBERED, mailbox, value=None, timeout=1.0, on_settled=lambda work: None)


def perform(ranks: Sequence[Submission]) -> None:
    for other in ranks:
        assert ranks[0].op.fits(other.op), f"{ranks[0].op} and {other.op}"
    loopback._perform(ranks)


def worlds(size: int) -> list[CommInfo]:
    return [CommInfo("t", rank, size, CPU) for rank in range(size)]


def made(make: Make, size: int, count: int, seed: int, mailbox: Mailbox) -> list[list[Submission]]:
    """By rank."""
    found = []
    for world in worlds(size):
        chance = random.Random(seed)
        found.append(submissions([make(world, chance) for _ in range(count)], mailbox))
    return found


def merged(size: int, parts: Sequence[Submission], mailbox: Mailbox) -> Submission:
    call = fuse(size, parts)
    return Submission(call, work_of(call, mailbox), detached=True)


def bits(tensor: Tensor) -> list[int]:
    return bytes_of(tensor).tolist()


def same_bits(one: Sequence[Submission], other: Sequence[Submission]) -> bool:
    return all(
        bits(a) == bits(b)
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip((*mine.inputs, *mine.outputs), (*theirs.inputs, *theirs.outputs), strict=True)
    )


def expect_the_same(make: Make, size: int, count: int, seed: int) -> None:
    mailbox = Mailbox(asyncio.new_event_loop())
    try:
        one_by_one, together = (made(make, size, count, seed, mailbox) for _ in range(2))
        for ranks in zip(*one_by_one, strict=True):
            assert len({fusion_key(submission.op) for submission in ranks}) == 1
            perform(ranks)
        perform([merged(size, parts, mailbox) for parts in together])
        for rank in range(size):
            assert same_bits(together[rank], one_by_one[rank]), f"rank {rank}"
    finally:
        mailbox.loop.close()


@cases("size", [1, 2, 3])
@cases("sort", SORTS)
def test_the_same_as_one_by_one(sort: str, size: int) -> None:
    for seed in some(range(6), 1):
        expect_the_same(SORTS[sort], size, 2 + seed, seed)


@examples(60, 12)
@given(st.sampled_from(sorted(SORTS)), st.integers(1, 3), st.integers(2, 12), st.integers(0, 10**6))
def test_the_same_as_one_by_one_whatever_is_merged(sort: str, size: int, count: int, seed: int) -> None:
    expect_the_same(SORTS[sort], size, count, seed)


@pytest.fixture
def mailbox() -> Any:
    loop = asyncio.new_event_loop()
    yield Mailbox(loop)
    loop.close()


def joined(calls: Sequence[Call], size: int, mailbox: Mailbox) -> Call:
    return fuse(size, submissions(calls, mailbox))


def test_nothing_is_copied(mailbox: Mailbox) -> None:
    world = worlds(2)[0]
    a, b, out = torch.zeros(4), torch.zeros(2, 2), torch.zeros(4)
    call = joined([AllReduce.of(world, a, ReduceOp.SUM), AllReduce.of(world, b, ReduceOp.SUM, out)], 2, mailbox)
    assert [t.data_ptr() for t in call.inputs] == [a.data_ptr(), b.data_ptr()]
    assert [t.data_ptr() for t in call.outputs] == [a.data_ptr(), out.data_ptr()]
    call = joined([AllGatherSingle.of(world, out, a[:2]), AllGatherSingle.of(world, b, a[2:])], 2, mailbox)
    assert [t.data_ptr() for t in call.outputs] == [x.data_ptr() for x in (out, b[0], out[2:], b[1])]
    whole = torch.zeros(4, 6)[:, ::2]
    parts = [ReduceScatterSingle.of(world, torch.zeros(6), whole, ReduceOp.SUM) for _ in range(2)]
    assert [t.data_ptr() for t in joined(parts, 2, mailbox).inputs] == [whole[r].data_ptr() for r in (0, 0, 2, 2)]


def test_in_place_only_if_all_are(mailbox: Mailbox) -> None:
    world = worlds(2)[0]
    inside = AllReduce.of(world, torch.zeros(1), ReduceOp.SUM)
    beside = AllReduce.of(world, torch.zeros(1), ReduceOp.SUM, torch.zeros(1))
    call = joined([inside, inside], 2, mailbox)
    assert call.inputs is call.outputs
    call = joined([inside, beside], 2, mailbox)
    assert call.inputs is not call.outputs
    assert call.inputs[0] is call.outputs[0]


def test_what_it_says_it_is(mailbox: Mailbox) -> None:
    world = worlds(2)[1]
    calls = [AllReduce.of(world, torch.zeros(n, dtype=torch.int32), ReduceOp.MAX) for n in (3, 0, 4)]
    call = joined(calls, 2, mailbox)
    assert (call.op.kind, call.op.nbytes, call.result) == ("all_reduce", 28, None)
    assert str(call.op) == "all_reduce(int32[7] in pieces, MAX)"
    calls = [Broadcast.of(world, torch.zeros(n), 1) for n in (3, 1)]
    call = joined(calls, 2, mailbox)
    assert str(call.op) == "broadcast(uint8[16] in pieces, root=1)"
    assert len(call.inputs) == 2
    assert call.outputs == ()
    calls = [AllGather.of(world, None, torch.zeros(n)) for n in (3, 1)]
    assert str(joined(calls, 2, mailbox).op) == "all_gather(uint8[16] in pieces)"
    calls = [ReduceScatterSingle.of(world, None, torch.zeros(n), ReduceOp.SUM) for n in (4, 2)]
    assert str(joined(calls, 2, mailbox).op) == "reduce_scatter(float32[3] in pieces, SUM)"


def reduction(numel: int, layout: int = 0, label: str = "", method: str = "") -> Op:
    return AllReduce(torch.float32, numel, ReduceOp.SUM, layout=layout, label=label, method=method)


def layouts_of(mailbox: Mailbox, *lists: Sequence[Op]) -> list[int]:
    found = []
    for ops in lists:
        tensors = [torch.zeros(op.numel) for op in ops]  # type: ignore[attr-defined]
        calls = [Call(op, (t,), (t,), t) for op, t in zip(ops, tensors, strict=True)]
        found.append(joined(calls, 2, mailbox).op.layout)  # type: ignore[attr-defined]
    return found


def test_the_layout_tells_apart_what_was_merged(mailbox: Mailbox) -> None:
    r = reduction
    lists = [
        [r(2), r(3)],
        [r(3), r(2)],
        [r(2), r(3), r(0)],
        [r(5), r(0)],
        [r(2, layout=7), r(3)],
        [r(2), r(3, layout=7)],
        [r(2, label="a"), r(3, label="b")],
        [r(2, label="b"), r(3, label="a")],
        [r(2, label="a"), r(3)],
        [r(2), r(3, label="a")],
        [r(2, method="b"), r(3)],
        [r(2), r(3, method="b")],
    ]
    found = layouts_of(mailbox, *lists)
    assert len(set(found)) == len(lists)
    assert 0 not in found
    assert layouts_of(mailbox, *lists) == found


@pytest.mark.parametrize("kind", ["broadcast", "all_gather"])
async def test_dtypes_that_differ_between_ranks_are_noticed(kind: str) -> None:
    """As they are one by one: as many bytes are not enough."""
    async with loopback_world(2, timeout=5) as comms:
        works = []
        for comm in comms:
            dtypes = [torch.float64, torch.int64][:: 1 if comm.rank else -1]
            with comm.coalesce():
                for dtype in dtypes:
                    tensor = torch.zeros(2, dtype=dtype)
                    works.append(comm.broadcast(tensor, 0) if kind == "broadcast" else comm.all_gather(None, tensor))
        for work in works:
            with pytest.raises(CollectiveMismatchError):
                await work


async def test_complex_numbers_meet_pairs_of_reals() -> None:
    """As they do one by one."""
    async with loopback_world(2) as comms:
        values = torch.tensor([1 + 2j, 3 - 1j])
        mine = [values.clone(), torch.zeros(4)]
        others = [torch.zeros(4), torch.zeros(2, dtype=torch.complex64)]
        works: list[Work[Tensor]] = []
        mine[1] = torch.view_as_real(values.conj().resolve_conj()).reshape(-1).clone()
        for comm, tensors in zip(comms, (mine, others), strict=True):
            with comm.coalesce():
                works += [comm.broadcast(t, 0) for t in tensors]
        await asyncio.gather(*works)
        assert torch.equal(torch.view_as_complex(others[0].view(2, 2)), values)
        assert torch.equal(others[1], values.conj())


# -- single tensors that stand for all ranks


@pytest.mark.parametrize("kind", [AllGatherSingle, ReduceScatterSingle], ids=["all_gather", "reduce_scatter"])
def test_a_strided_whole_must_be_divisible_where_it_is(kind: Any, mailbox: Mailbox) -> None:
    size = 2
    for shape_, fine in [((4, 3), True), ((2, 5, 2), True), ((3, 4), False), ((1, 2), False), ((0, 3), True)]:
        whole = torch.zeros(*shape_, 2)[..., 1]
        assert not whole.numel() or not whole.is_contiguous() or shape_ == (1, 2)
        share = torch.zeros(whole.numel() // size)

        def call(world: CommInfo, whole: Tensor = whole, share: Tensor = share) -> Call:
            if kind is AllGatherSingle:
                return AllGatherSingle.of(world, whole, share)
            return ReduceScatterSingle.of(world, share, whole, ReduceOp.SUM)

        for world in worlds(size):
            parts = submissions([call(world), call(world)], mailbox)
            if fine:
                fuse(size, parts)
                continue
            with pytest.raises(ValueError, match=r"if the ranks divide its first dimension, got shape \(.* 2 ranks"):
                fuse(size, parts)
        (alone,) = worlds(1)
        share = torch.zeros(whole.numel())
        fuse(1, submissions([call(alone, whole, share), call(alone, whole, share)], mailbox))


def test_empty_wholes(mailbox: Mailbox) -> None:
    for size in (1, 2, 3):
        for world in worlds(size):
            gathers = [AllGatherSingle.of(world, torch.zeros(n), torch.zeros(n // size)) for n in (0, 2 * size, 0)]
            call = joined(gathers, size, mailbox)
            assert len(call.outputs) == 3 * size
            assert [t.numel() for t in call.outputs] == [0, 2, 0] * size


@pytest.mark.parametrize("dtype", COMPLEX)
def test_conjugated_wholes(dtype: torch.dtype, mailbox: Mailbox) -> None:
    size, count = 2, 3

    def make(world: CommInfo, chance: random.Random) -> Call:
        whole = sample(world.rank, (4,), dtype, chance.randrange(9)).conj()
        return ReduceScatterSingle.of(world, blank(chance, dtype, (2,)), whole, ReduceOp.SUM)

    expect_the_same(make, size, count, 5)
