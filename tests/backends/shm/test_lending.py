"""Tensors that ranks lend each other in place of slots: the same results, whichever ranks lend, and withdrawal."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm import ops
from asynccomm.backends.shm import lowering, peer_memory
from asynccomm.backends.shm.arena import arena
from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.layout import RecordWord, Word
from asynccomm.backends.shm.lowering import start
from asynccomm.errors import BackendError, BrokenError
from asynccomm.ops import Call
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.sampling import examples

from .calls import DTYPES, KINDS, legal, make, values
from .test_lowering import run_both
from .world import each_executor, executors, interleave, lent, submission  # noqa: F401

GROUPS = [CommInfo("t", rank, 3, torch.device("cpu")) for rank in range(3)]


@pytest.fixture(autouse=True, scope="module")
def _any_size() -> object:
    """Tensors of any size may be lent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "LENT_BYTES", 0)
        yield


def maybe_lent(n: int, make: Callable[[int], Tensor], choose: random.Random, share: float) -> Tensor:
    return lent(make(n)) if choose.random() < share else make(n)


def random_calls(kinds: list[str], size: int, choose: random.Random) -> list[list[Call]]:
    calls = []
    for kind in kinds:
        n, root = choose.choice([1, 7, 64, 255, 600, 1500]), choose.randrange(size)
        dtype, share = choose.choice(DTYPES), choose.choice([0.5, 1.0])
        op = choose.choice([o for o in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX) if legal(o, dtype)])
        one = partial(values, dtype=dtype, strided=choose.random() < 0.1, choose=choose)
        new = partial(maybe_lent, make=one, choose=choose, share=share)
        groups = [CommInfo("t", rank, size, torch.device("cpu")) for rank in range(size)]
        calls.append([make(kind, group, n, root, op, new) for group in groups])
    return calls


@given(
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1, 2, 3, 5]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    whole=st.sampled_from([0, 64]),
)
@examples(100)
def test_any_sequence_whichever_ranks_lend(seed: int, size: int, kinds: list[str], whole: int) -> None:
    choose = random.Random(seed)
    run_both(random_calls(kinds, size, choose), size, chunk=1024, whole=whole, choose=choose)


def test_ranks_that_run_at_once() -> None:
    for seed in range(6):
        choose = random.Random(seed)
        size = choose.choice([2, 3])
        run_both(random_calls(choose.sample(KINDS, 8), size, choose), size, chunk=1024, whole=0, choose=None)


@pytest.mark.parametrize("n", [3, 3000])
def test_in_place(n: int) -> None:
    gathered = [lent(torch.full((3 * n,), -1.0)) for _ in range(3)]
    swapped = [lent(torch.arange(3 * n) + 10_000.0 * rank) for rank in range(3)]
    scattered = [lent(torch.arange(3.0 * n)) for _ in range(3)]
    reduced = [lent(torch.arange(3.0 * n) * (rank + 1)) for rank in range(3)]
    for rank in range(3):
        gathered[rank][rank * n : (rank + 1) * n] = torch.arange(n) + 1000.0 * rank
    parts = [scattered[rank][rank * n : (rank + 1) * n] for rank in range(3)]
    mine = [slice(rank * n, (rank + 1) * n) for rank in range(3)]
    calls = [
        [ops.AllGatherSingle.of(g, gathered[g.rank], gathered[g.rank][mine[g.rank]]) for g in GROUPS],
        [ops.AllToAllSingle.of(g, swapped[g.rank], swapped[g.rank]) for g in GROUPS],
        [ops.ReduceScatterSingle.of(g, parts[g.rank], scattered[g.rank], ReduceOp.SUM) for g in GROUPS],
        [ops.AllReduce.of(g, reduced[g.rank], ReduceOp.SUM) for g in GROUPS],
    ]
    programs = [[submission(row[rank], seq) for seq, row in enumerate(calls)] for rank in range(3)]
    interleave(executors(3), programs, 0, random.Random(2))
    whole = torch.cat([torch.arange(n) + 1000.0 * rank for rank in range(3)])
    for rank in range(3):
        assert torch.equal(gathered[rank], whole)
        assert torch.equal(swapped[rank], torch.cat([torch.arange(3 * n)[mine[rank]] + 10_000.0 * r for r in range(3)]))
        assert torch.equal(scattered[rank][mine[rank]], 3.0 * torch.arange(3 * n)[mine[rank]])
        assert torch.equal(reduced[rank], 6.0 * torch.arange(3 * n))


def test_tensors_of_unequal_sizes() -> None:
    """A reader uses no more of a tensor than there is: an extent is not larger than its tensor."""
    counts = [100, 150_000, 70_000]
    inputs = [lent(torch.arange(n, dtype=torch.float32) + 0.25 * rank) for rank, n in enumerate(counts)]
    outputs = [[torch.zeros(n) for n in counts] for _ in GROUPS]
    calls = [submission(ops.AllGather.of(g, outputs[g.rank], inputs[g.rank]), 0) for g in GROUPS]
    interleave(executors(3, 65536), [[call] for call in calls], 0, random.Random(1))
    for row in outputs:
        assert all(torch.equal(got, given) for got, given in zip(row, inputs, strict=True))


def two(n: int, kind: str = "broadcast") -> tuple[list[Executor], list[Tensor], list[Call]]:
    world = executors(2)
    tensors = [lent(torch.arange(n) + 1000 * rank) for rank in range(2)]
    if kind == "broadcast":
        calls = [ops.Broadcast.of(g, tensors[g.rank], 0) for g in groups(2)]
    else:
        calls = [ops.AllReduce.of(g, tensors[g.rank], ReduceOp.SUM) for g in groups(2)]
    return world, tensors, calls


def groups(size: int) -> list[CommInfo]:
    return [CommInfo("t", rank, size, torch.device("cpu")) for rank in range(size)]


def test_nothing_is_copied_to_a_slot_and_the_owner_waits_for_its_readers() -> None:
    world, tensors, calls = two(100)
    owner, reader = (start(each, submission(call, 0), 0) for each, call in zip(world, calls, strict=True))
    assert [next(owner) for _ in range(3)][-1] is False
    slot = world[0].board.elements(1, torch.int64, 0, 0, 0, 800)
    assert not slot.any()
    with pytest.raises(StopIteration):
        while True:
            next(reader)
    assert torch.equal(tensors[1], torch.arange(100))
    with pytest.raises(StopIteration):
        next(owner)


@pytest.mark.parametrize("kind", ["broadcast", "all_reduce"])
def test_a_reader_of_a_withdrawn_tensor_fails(kind: str) -> None:
    """The owner's operation has failed behind its posts, and the program may have changed the tensor."""
    world, tensors, calls = two(100, kind)
    owner, reader = (start(each, submission(call, 0), 0) for each, call in zip(world, calls, strict=True))
    for _ in range(5):
        next(owner)
    if kind == "all_reduce":
        for each in (reader, owner):  # until the owner waits for the reader's end alone
            for _ in range(5):
                next(each)
    board = world[0].board
    board._words[board.layout.word(0, Word.WITHDRAWN)] = 1
    tensors[0].zero_()
    with pytest.raises(BackendError, match=r"an operation has failed on rank 0 while .* read the rank's tensor"):
        for _ in range(20):
            next(reader)


@pytest.mark.parametrize(
    ("word", "value", "error"),
    [(1, 64, "a tensor that cannot be"), (2, 1 << 62, "a tensor that cannot be"), (0, 1 << 50, "no tensor at byte")],
)
def test_a_place_that_cannot_be_is_refused(word: int, value: int, error: str) -> None:
    world, _, calls = two(100)
    owner, reader = (start(each, submission(call, 0), 0) for each, call in zip(world, calls, strict=True))
    next(owner)
    board = world[0].board
    board._words[board.layout.record(0, 0) + RecordWord.INLINE + word] = value
    with pytest.raises(BrokenError, match=error):
        for _ in range(5):
            next(reader)


def test_mappings_are_made_once_and_given_up_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "MOST_EXTENTS", 4)
    world = executors(2)
    for seq in range(9):
        size = (256 << 10) // 4 + 1024 * seq  # an extent of its own, and a new one each time
        tensors = [lent(torch.full((size,), float(seq + rank))) for rank in range(2)]
        calls = [ops.AllReduce.of(g, tensors[g.rank], ReduceOp.SUM) for g in groups(2)]
        interleave(world, [[submission(call, seq)] for call in calls], 0, random.Random(seq))
        assert all(torch.equal(tensor, torch.full((size,), 2.0 * seq + 1)) for tensor in tensors)
        assert all(len(mapped) <= 5 for mapped in world[0].board.peers._mapped)
    assert arena().nbytes <= 3 * (4 << 20)


@pytest.mark.parametrize("kind", [ops.AllReduce, ops.Reduce])
def test_large_reductions_lend_from_a_larger_size_on(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(lowering, "LENT_BYTES", 1024)
    world = executors(2)
    root = (0,) if kind is ops.Reduce else ()
    for n, lends in [(2048, False), (4095, False), (4096, True)]:
        for group, each in zip(groups(2), world, strict=True):
            call = kind.of(group, lent(torch.zeros(n)), *root, ReduceOp.SUM)
            program = lowering.lowered(each, submission(call, 0), 4096).compiled.program
            assert (program.lending is not None) == lends, n


def test_a_reduction_on_shared_tensors_below_that_size_is_right() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "LENT_BYTES", 1024)
        reduced = [lent(torch.arange(3000.0) * (rank + 1)) for rank in range(3)]
        calls = [submission(ops.AllReduce.of(g, reduced[g.rank], ReduceOp.SUM), 0) for g in GROUPS]
        interleave(executors(3), [[call] for call in calls], 0, random.Random(3))
    for tensor in reduced:
        assert torch.equal(tensor, 6.0 * torch.arange(3000))
