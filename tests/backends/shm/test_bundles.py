"""How a batch is cut: pure arithmetic on operations, the same on all ranks."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm import ops
from asynccomm.backends.base import Submission
from asynccomm.backends.shm.bundles import MOST, Bundle, cut, extent, place_in_batch, size_of_batch
from asynccomm.backends.shm.layout import rounded_up
from asynccomm.backends.shm.manifest import ROW
from asynccomm.ops import Call, Op
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo

from .calls import DTYPES, KINDS, legal, make, values

F = torch.float32
CHUNK, WHOLE = 1024, 512


def submitted(*described: Op, members: tuple[Op, ...] = ()) -> list[Submission]:
    found = []
    for seq, op in enumerate(described):
        work: Any = SimpleNamespace(seq=seq)
        found.append(Submission(Call(op, (), (), None), work))
    if members:
        found[0].members, found[0].numbers = members, tuple(range(len(members)))
    return found


def reduced(nbytes: int) -> Op:
    return ops.AllReduce(torch.uint8, nbytes, ReduceOp.MAX)


def sizes(items: list[Any]) -> list[int]:
    """How many travel together in each step; 0: one by itself."""
    return [len(item.places) for item in items]


def bundles(batch: list[Submission], size: int = 2, chunk: int = CHUNK, whole: int = WHOLE) -> list[Any]:
    found = list(cut(batch, size, chunk, whole))
    assert all(isinstance(item, Bundle) for item in found)
    return found


def test_one_collective_is_no_batch() -> None:
    alone = submitted(reduced(8))
    assert cut(alone, 2, CHUNK, WHOLE) is alone


def test_what_fits_in_a_slot_travels_together() -> None:
    batch = submitted(*[reduced(8)] * 5, ops.Barrier(), ops.Broadcast(F, 3, 0))
    (bundle,) = bundles(batch)
    assert bundle.submissions == batch
    assert bundle.places == [(64 * i, 64) for i in range(5)] + [(320, 0), (320, 64)]
    assert (bundle.used, bundle.total) == (384, 7)
    assert bundle.listed == batch


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (CHUNK - 512 - 3 * ROW - 32, [2]),  # 32: to the next line
        (CHUNK - 512 - 3 * ROW - 31, [0, 0]),
    ],
)
def test_around_the_end_of_a_slot(last: int, expected: list[int]) -> None:
    """With the data there is a row for each, and one for what follows."""
    batch = submitted(reduced(512), ops.Broadcast(torch.uint8, last, 0))
    assert sizes(bundles(batch)) == expected


@pytest.mark.parametrize(
    ("large", "expected"),
    [
        (reduced(WHOLE), [3]),
        (reduced(WHOLE + 1), [0, 0, 0]),
        (ops.Reduce(torch.bool, WHOLE + 1, 0, ReduceOp.SUM), [0, 0, 0]),
        (ops.Reduce(torch.int8, WHOLE // 4, 0, ReduceOp.AVG), [3]),  # travels as int32
        (ops.Reduce(torch.int8, WHOLE // 4 + 1, 0, ReduceOp.AVG), [0, 0, 0]),
        (ops.AllReduce(torch.complex64, WHOLE // 8, ReduceOp.SUM), [3]),
        (ops.AllReduce(torch.complex64, WHOLE // 8 + 1, ReduceOp.SUM), [0, 0, 0]),
        (ops.Broadcast(torch.uint8, CHUNK, 0), [0, 0, 0]),
        (ops.Scatter(torch.uint8, 256, 0), [3]),
        (ops.Scatter(torch.uint8, 512, 0), [0, 0, 0]),
        (ops.ReduceScatterSingle(torch.uint8, 257, ReduceOp.MAX), [3]),
        (ops.AllToAllSingle(torch.uint8, 640), [3]),
        (ops.AllToAllSingle(torch.uint8, 1024), [0, 0, 0]),
        (ops.AllToAll(F, (1, 1), (1, 1)), [0, 0, 0]),
        (ops.Parcels("all_gather_object"), [0, 0, 0]),
    ],
    ids=str,
)
def test_by_itself_goes_what_is_large_or_known_to_some(large: Op, expected: list[int]) -> None:
    batch = submitted(reduced(8), large, ops.Barrier())
    found = bundles(batch)
    assert sizes(found) == expected
    assert [submission for bundle in found for submission in bundle.submissions] == batch


def test_greedily_in_program_order() -> None:
    batch = submitted(*[reduced(200)] * 8, reduced(WHOLE + 1), reduced(8), reduced(8), ops.Barrier())
    found = bundles(batch)
    assert sizes(found) == [3, 3, 2, 0, 3]
    assert [bundle.listed for bundle in found] == [batch[:4], batch[3:7], batch[6:9], batch[8:10], batch[9:]]
    assert len({bundle.place for bundle in found}) == 5
    assert [size_of_batch(bundle.place) for bundle in found] == [12] * 5


def test_a_step_is_not_too_long() -> None:
    batch = submitted(*[ops.Barrier()] * (2 * MOST + 1))
    assert sizes(bundles(batch, chunk=1 << 20)) == [MOST, MOST, 0]


def test_messages_are_no_part_of_it() -> None:
    send, recv = ops.Send(F, 3, 1, 0), ops.Recv(F, 3, 1, 0)
    batch = submitted(reduced(8), send, reduced(8), recv)
    first, second, bundle = cut(batch, 2, CHUNK, WHOLE)
    assert [first, second] == [batch[1], batch[3]]
    assert isinstance(bundle, Bundle)
    assert bundle.submissions == [batch[0], batch[2]]
    few = submitted(send, reduced(8), recv)
    assert cut(few, 2, CHUNK, WHOLE) is few


def test_a_merged_operation_is_a_batch() -> None:
    members = (reduced(3), reduced(5))
    merged = ops.AllReduce(torch.uint8, 8, ReduceOp.MAX, layout=9)
    (bundle,) = bundles(submitted(merged, members=members))
    assert (sizes([bundle]), bundle.total) == ([1], 2)
    large = ops.AllReduce(torch.uint8, WHOLE + 1, ReduceOp.MAX, layout=9)
    (bundle,) = bundles(submitted(large, members=members))
    assert (sizes([bundle]), size_of_batch(bundle.place)) == ([0], 2)
    found = bundles(submitted(merged, large, merged, members=members))
    assert sizes(found) == [1, 0, 0]
    assert [size_of_batch(bundle.place) for bundle in found] == [4] * 3


def test_all_of_a_bundle_counts_for_who_drives_it() -> None:
    tensors = [torch.zeros(n, dtype=torch.uint8) for n in (8, 20)]
    group = CommInfo("t", 0, 1, torch.device("cpu"))
    work: Any = SimpleNamespace(seq=0)
    batch = [Submission(ops.AllReduce.of(group, tensor, ReduceOp.MAX), work) for tensor in tensors]
    assert [bundle.nbytes for bundle in bundles(batch)] == [28]


@given(total=st.integers(2, 1 << 22), before=st.integers(0, 1 << 22))
def test_places_in_batches(total: int, before: int) -> None:
    place = place_in_batch(total, before)
    assert 0 < place < 1 << 40
    assert size_of_batch(place) == (total if total < 1 << 20 and before < total else size_of_batch(place))


def test_what_is_in_no_batch_has_place_0() -> None:
    assert size_of_batch(0) == 1
    assert size_of_batch(place_in_batch(3, 1) | 1 << 50) is None
    assert size_of_batch(3 << 20 | 3) is None


@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(1, 5),
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=20),
    whole=st.sampled_from([0, 64, 1024]),
)
def test_every_rank_cuts_alike_and_nothing_overlaps(seed: int, size: int, kinds: list[str], whole: int) -> None:
    choose = random.Random(seed)
    chosen = [
        (kind, choose.choice([0, 1, 7, 255, 600]), choose.randrange(size), choose.choice(DTYPES)) for kind in kinds
    ]
    seen = set()
    for rank in range(size):
        group = CommInfo("t", rank, size, torch.device("cpu"))
        batch = []
        for kind, n, root, dtype in chosen:
            op = ReduceOp.MAX if legal(ReduceOp.MAX, dtype) else ReduceOp.SUM
            work: Any = SimpleNamespace(seq=0)
            call = make(kind, group, n, root, op, lambda n, dtype=dtype: values(n, dtype, False, choose))
            batch.append(Submission(call, work))
        found = bundles(batch, size, CHUNK, whole)
        assert [submission for bundle in found for submission in bundle.submissions] == batch
        for bundle in found:
            end = 0
            for (start, room), submission in zip(bundle.places, bundle.submissions, strict=False):
                nbytes, split = extent(submission.op, size)
                assert start == end
                assert room == rounded_up(nbytes)
                end = start + room * (size if split else 1)
            assert end == bundle.used
            assert bundle.used + len(bundle.listed) * ROW <= CHUNK or not bundle.places
        seen.add(tuple((tuple(bundle.places), bundle.place, len(bundle.submissions)) for bundle in found))
    assert len(seen) == 1
