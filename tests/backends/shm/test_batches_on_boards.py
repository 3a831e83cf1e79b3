"""Batches on boards, fused as the comm fuses them, under random interleavings. Processes: test_batches_of_ranks.py."""

import random
from collections.abc import Sequence
from functools import partial

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from asynccomm import ops
from asynccomm.backends import loopback
from asynccomm.backends.base import Submission
from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.lowering import start
from asynccomm.backends.shm.reference import Progress
from asynccomm.batching.batches import planned
from asynccomm.batching.fusion import fuse
from asynccomm.batching.plan import plan
from asynccomm.errors import CollectiveMismatchError
from asynccomm.ops import Call
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.signature import signature
from asynccomm.ops.validation import CommInfo
from tests.cases import cases
from tests.sampling import examples

from .calls import DTYPES, KINDS, copied, legal, make, values
from .world import each_executor, executors, interleave, submission  # noqa: F401

CHUNK, WHOLE = 4096, 2048
REDUCTIONS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.BXOR]
BATCHES = st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8), min_size=1, max_size=4)
Described = tuple[str, int, int, torch.dtype, ReduceOp, bool]  # kind, n, root, dtype, reduction, strided


def groups_of(size: int) -> list[CommInfo]:
    return [CommInfo("t", rank, size, torch.device("cpu")) for rank in range(size)]


def described(kind: str, size: int, choose: random.Random, sizes: Sequence[int]) -> Described:
    dtype = choose.choice(DTYPES)
    reductions = [op for op in [*REDUCTIONS, ReduceOp.PREMUL_SUM(2)] if legal(op, dtype)]
    return kind, choose.choice(sizes), choose.randrange(size), dtype, choose.choice(reductions), choose.random() < 0.2


def called(group: CommInfo, what: Described, choose: random.Random) -> Call:
    kind, n, root, dtype, op, strided = what
    return make(kind, group, n, root, op, partial(values, dtype=dtype, strided=strided, choose=choose))


def fused(size: int, batches: Sequence[Sequence[Call]]) -> list[Submission]:
    """The operations of one rank's batches, as the backend gets them."""
    found: list[Submission] = []
    seq = 0
    for batch in batches:
        held = [submission(call, seq + i) for i, call in enumerate(batch)]
        seq += len(batch)
        for planned_batch in plan([planned(each) for each in held]):
            for indices in planned_batch:
                members = [held[i] for i in indices]
                one = len(members) == 1
                found.append(members[0] if one else submission(fuse(size, members), members[0].work.seq))
    return found


def reduced(group: CommInfo, n: int, dtype: torch.dtype = torch.float32) -> Call:
    return ops.AllReduce.of(group, torch.ones(n, dtype=dtype), ReduceOp.SUM)


# -- equal batches ----------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1, 2, 3, 4]),
    kinds=BATCHES,
    whole=st.sampled_from([0, 64, 1024]),
)
@examples(200, 20)  # for each kind of executor
def test_any_batches_give_what_the_same_calls_give_one_by_one(
    seed: int, size: int, kinds: list[list[str]], whole: int
) -> None:
    choose = random.Random(seed)
    what = [[described(kind, size, choose, [0, 1, 2, 7, 64, 255, 600]) for kind in batch] for batch in kinds]
    calls = [[[called(group, each, choose) for each in batch] for batch in what] for group in groups_of(size)]
    expected = [[copied(call) for batch in rank for call in batch] for rank in calls]
    for seq, row in enumerate(zip(*expected, strict=True)):
        loopback._perform([submission(call, seq) for call in row])
    interleave(executors(size, CHUNK), [fused(size, rank) for rank in calls], whole, choose)
    for mine, theirs in zip(calls, expected, strict=True):
        for call, want in zip([call for batch in mine for call in batch], theirs, strict=True):
            for one, other in zip((*call.inputs, *call.outputs), (*want.inputs, *want.outputs), strict=True):
                assert torch.equal(one, other), f"{call.op}: {one} != {other}"


def test_operations_of_one_kind_take_one_step() -> None:
    world = executors(2, CHUNK)
    tensors = [[torch.full((n,), group.rank + 1.0) for n in range(20)] for group in groups_of(2)]
    calls = [[ops.AllReduce.of(g, tensor, ReduceOp.SUM) for tensor in tensors[g.rank]] for g in groups_of(2)]
    interleave(world, [fused(2, [rank]) for rank in calls], CHUNK, random.Random(1))
    assert [each.board.state.step for each in world] == [1, 1]
    assert all(tensor.eq(3).all() for mine in tensors for tensor in mine)


def test_in_place_as_alone() -> None:
    size, n = 2, 30
    memory = [[torch.arange(size * n) + 100 * group.rank + 1000 * i for i in range(4)] for group in groups_of(size)]
    before = [[tensor.clone() for tensor in mine] for mine in memory]
    programs = []
    for g in groups_of(size):
        calls = [ops.AllGatherSingle.of(g, t, t[g.rank * n : (g.rank + 1) * n]) for t in memory[g.rank][:2]]
        calls += [ops.ReduceScatterSingle.of(g, t[n:], t, ReduceOp.SUM) for t in memory[g.rank][2:]]
        programs.append(fused(size, [calls]))
    assert [len(program) for program in programs] == [2, 2]
    interleave(executors(size, CHUNK), programs, WHOLE, random.Random(5))
    for rank in range(size):
        for i in (0, 1):
            assert torch.equal(memory[rank][i], torch.cat([before[r][i][r * n : (r + 1) * n] for r in range(size)]))
        for i in (2, 3):
            assert torch.equal(memory[rank][i][n:], (before[0][i] + before[1][i])[rank * n : (rank + 1) * n])


def test_operations_that_are_not_fused_may_be_in_other_batches() -> None:
    world = executors(2, CHUNK)
    tensors = [torch.ones(3), torch.ones(3)]
    calls = [
        [ops.AllReduce.of(g, tensors[g.rank], ReduceOp.SUM), ops.Barrier.of(g), reduced(g, 2, torch.int64)]
        for g in groups_of(2)
    ]
    interleave(world, [fused(2, [calls[0]]), fused(2, [[call] for call in calls[1]])], WHOLE, random.Random(1))
    assert all(tensor.eq(2).all() for tensor in tensors)


# -- batches that differ ----------------------------------------------------------------------------------------------


def run_apart(
    world: list[Executor], programs: list[list[Submission]], choose: random.Random
) -> list[int | CollectiveMismatchError]:
    """Run each rank as far as it gets; returns the number of operations that it has done, or its error."""
    queues = [list(program) for program in programs]
    current: list[Progress | None] = [None] * len(world)
    errors: dict[int, CollectiveMismatchError] = {}
    idle = 0
    while idle < 200:
        idle += 1
        rank = choose.randrange(len(world))
        if rank in errors or not queues[rank]:
            continue
        progress = current[rank] = current[rank] or start(world[rank], queues[rank][0], WHOLE)
        try:
            if next(progress):
                idle = 0
        except StopIteration:
            queues[rank].pop(0)
            current[rank] = None
            idle = 0
        except CollectiveMismatchError as error:
            errors[rank] = error
            idle = 0
    return [errors.get(rank, len(programs[rank]) - len(queues[rank])) for rank in range(len(world))]


def changed(batches: list[list[Described]], size: int, choose: random.Random) -> list[list[Described]]:
    """The same batches but for one mistake."""
    new = [list(batch) for batch in batches]
    i = choose.randrange(len(new))
    j = choose.randrange(len(new[i]))
    match choose.choice(["drop", "add", "other", "swap", "split", "join"]):
        case "drop":
            del new[i][j]
        case "add":
            new[i].insert(j, described(choose.choice(KINDS), size, choose, [1, 7, 600]))
        case "other":
            new[i][j] = described(choose.choice(KINDS), size, choose, [1, 7, 600])
        case "swap":
            new[i][j], new[i][0] = new[i][0], new[i][j]
        case "split":
            new[i : i + 1] = [new[i][:j], new[i][j:]]
        case _ if i:
            new[i - 1 : i + 1] = [new[i - 1] + new[i]]
    return [batch for batch in new if batch]


@given(seed=st.integers(0, 1 << 30), size=st.sampled_from([2, 3]), kinds=BATCHES)
@examples(300, 30)
def test_batches_that_differ_are_detected(seed: int, size: int, kinds: list[list[str]]) -> None:
    """No rank gets past the end if the operations differ, or boundaries of batches that change what is fused."""
    choose = random.Random(seed)
    right = [[described(kind, size, choose, [0, 1, 7, 255, 600]) for kind in batch] for batch in kinds]
    wrong = changed(right, size, choose)
    mistaken = choose.randrange(size)
    programs = []
    for group in groups_of(size):
        batches = [[called(group, what, choose) for what in b] for b in (wrong if group.rank == mistaken else right)]
        programs.append(fused(size, [*batches, [reduced(group, 13)]]))
    signatures = [[signature(each.op) for each in program] for program in programs]
    assume(signatures[mistaken] != signatures[mistaken - 1])  # the others cannot notice any other difference
    outcome = run_apart(executors(size, CHUNK), programs, choose)
    assert any(isinstance(each, CollectiveMismatchError) for each in outcome)
    for each, program in zip(outcome, programs, strict=True):
        assert isinstance(each, CollectiveMismatchError) or each < len(program)


@cases(
    "mine, theirs, texts",
    [
        ([10, 20, 30], [10, 20, 31], ("float32[60] in pieces", "float32[61] in pieces")),
        ([10, 20, 30], [10, 20], ("float32[60] in pieces", "float32[30] in pieces")),
        ([10, 20], [30], ("float32[30] in pieces", "float32[30]")),
        ([10, 20], [20, 10], ("float32[30] in pieces", "float32[30] in pieces")),
    ],
)
def test_both_sides_of_a_fused_operation_are_described(
    mine: list[int], theirs: list[int], texts: tuple[str, str]
) -> None:
    """The comm asks the ranks for the operations that were fused: tests/comm/test_reporter.py."""
    sizes = [mine, theirs]
    programs = [fused(2, [[reduced(group, n) for n in sizes[group.rank]]]) for group in groups_of(2)]
    for rank, error in enumerate(run_apart(executors(2, CHUNK), programs, random.Random(0))):
        assert isinstance(error, CollectiveMismatchError)
        assert (error.seq, error.rank, error.other_rank) == (0, rank, 1 - rank)
        assert error.op == f"all_reduce({texts[rank]}, SUM)"
        assert error.other_op.removesuffix(", of other sizes or dtypes") == f"all_reduce({texts[1 - rank]}, SUM)"
