"""Batches on boards, under random interleavings. Between processes: test_batches_of_ranks.py."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm import ops
from asynccomm.backends import loopback
from asynccomm.backends.shm.bundles import Bundle, cut
from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.lowering import start
from asynccomm.backends.shm.manifest import ROW
from asynccomm.errors import CollectiveMismatchError
from asynccomm.ops import Call, Op
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.sampling import examples

from .calls import DTYPES, KINDS, copied, legal, make, values
from .world import each_executor, executors, interleave, submission  # noqa: F401

CHUNK, WHOLE = 4096, 2048
REDUCTIONS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.BXOR]
Asked = tuple[str, int, int, torch.dtype, ReduceOp, bool]  # kind, n, root, dtype, reduction, strided


def groups_of(size: int) -> list[CommInfo]:
    return [CommInfo("t", rank, size, torch.device("cpu")) for rank in range(size)]


def asked(kind: str, size: int, choose: random.Random, sizes: Sequence[int]) -> Asked:
    dtype = choose.choice(DTYPES)
    reductions = [op for op in [*REDUCTIONS, ReduceOp.PREMUL_SUM(2)] if legal(op, dtype)]
    return kind, choose.choice(sizes), choose.randrange(size), dtype, choose.choice(reductions), choose.random() < 0.2


def called(group: CommInfo, what: Asked, choose: random.Random) -> Call:
    kind, n, root, dtype, op, strided = what
    return make(kind, group, n, root, op, partial(values, dtype=dtype, strided=strided, choose=choose))


def items(world: list[Executor], batches: list[list[Call]], whole: int = WHOLE) -> list[Any]:
    """One rank's batches as they travel."""
    found: list[Any] = []
    seq = 0
    for batch in batches:
        submissions = [submission(call, seq + i) for i, call in enumerate(batch)]
        seq += len(batch)
        found += cut(submissions, len(world), world[0].board.chunk, whole)
    return found


BATCHES = st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8), min_size=1, max_size=4)


@given(
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1, 2, 3, 4]),
    kinds=BATCHES,
    whole=st.sampled_from([0, 64, 1024]),
)
@examples(200)
def test_any_batches_are_what_one_by_one_is(seed: int, size: int, kinds: list[list[str]], whole: int) -> None:
    choose = random.Random(seed)
    world = executors(size, CHUNK)
    what = [[asked(kind, size, choose, [0, 1, 2, 7, 64, 255, 600]) for kind in batch] for batch in kinds]
    calls = [[[called(group, each, choose) for each in batch] for batch in what] for group in groups_of(size)]
    expected = [[copied(call) for batch in rank for call in batch] for rank in calls]
    for seq, row in enumerate(zip(*expected, strict=True)):
        loopback._perform([submission(call, seq) for call in row])
    interleave(world, [items(world, rank, whole) for rank in calls], whole, choose)
    for mine, theirs in zip(calls, expected, strict=True):
        for call, want in zip([call for batch in mine for call in batch], theirs, strict=True):
            for one, other in zip((*call.inputs, *call.outputs), (*want.inputs, *want.outputs), strict=True):
                assert torch.equal(one, other), f"{call.op}: {one} != {other}"


def test_a_batch_is_one_synchronisation() -> None:
    """All kinds, every dtype: each rank takes one step."""
    size = 3
    world = executors(size, 1 << 16)
    choose = random.Random(1)
    kinds = [kind for kind in KINDS if kind != "all_to_all"]
    what = [asked(kind, size, choose, [50]) for kind in [*kinds, *kinds]]
    calls = [[[called(group, each, choose) for each in what]] for group in groups_of(size)]
    queues = [items(world, rank, 1 << 16) for rank in calls]
    assert [len(queue) for queue in queues] == [1] * size
    interleave(world, queues, 1 << 16, choose)
    assert [each.board.state.step for each in world] == [1] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_waits_for_all_others(size: int) -> None:
    """A root, too, which would not have to wait for what it sends alone."""
    world = executors(size, CHUNK)
    batch = [[ops.Broadcast.of(group, torch.ones(3), 0) for _ in range(2)] for group in groups_of(size)]
    running = [start(board, items(world, [calls])[0], WHOLE) for board, calls in zip(world, batch, strict=True)]
    for progress in running[:-1]:
        assert next(progress) is False
    for progress in reversed(running):
        assert list(progress) == []


def test_more_than_all_banks_hold() -> None:
    size, count = 2, 60
    world = executors(size, 1024)
    tensors = [[torch.full((150,), 10.0 * i + rank) for i in range(count)] for rank in range(size)]
    calls = [[[ops.AllReduce.of(g, t, ReduceOp.SUM) for t in tensors[g.rank]]] for g in groups_of(size)]
    programs = [items(world, rank, 1024) for rank in calls]
    assert len(programs[0]) > 4 * 4
    interleave(world, programs, 1024, random.Random(3))
    assert all(tensor.eq(20 * i + 1).all() for mine in tensors for i, tensor in enumerate(mine))


@pytest.mark.parametrize("over", [0, 1])
def test_a_batch_that_just_fits(over: int) -> None:
    size = 2
    world = executors(size, CHUNK)
    n = CHUNK - 64 - 3 * ROW - 32 + over  # 32: up to a line
    sent = [[torch.full((k,), group.rank + 5, dtype=torch.uint8) for k in (3, n)] for group in groups_of(size)]
    got = [[torch.zeros(size * k, dtype=torch.uint8) for k in (3, n)] for _ in range(size)]
    calls = [[[ops.AllGatherSingle.of(g, got[g.rank][i], sent[g.rank][i]) for i in range(2)]] for g in groups_of(size)]
    programs = [items(world, rank) for rank in calls]
    assert [len(program) for program in programs] == [1 + over] * size
    interleave(world, programs, WHOLE, random.Random(3))
    for mine in got:
        assert [tensor.tolist() for tensor in mine] == [[5] * k + [6] * k for k in (3, n)]


def test_in_place_and_overlapping_as_alone() -> None:
    size, n = 2, 30
    world = executors(size, CHUNK)
    memory = [[torch.arange(size * n) + 100 * group.rank + 1000 * i for i in range(4)] for group in groups_of(size)]
    before = [[tensor.clone() for tensor in mine] for mine in memory]
    calls = []
    for g in groups_of(size):
        swapped, gathered, scattered, shifted = memory[g.rank]
        calls.append(
            [
                [
                    ops.AllToAllSingle.of(g, swapped, swapped),
                    ops.AllGatherSingle.of(g, gathered, gathered[(1 - g.rank) * n : (2 - g.rank) * n]),
                    ops.ReduceScatterSingle.of(g, scattered[n:], scattered, ReduceOp.SUM),
                    ops.AllReduce.of(g, shifted[:n], ReduceOp.MAX, shifted[7 : n + 7]),
                ]
            ]
        )
    interleave(world, [items(world, rank) for rank in calls], WHOLE, random.Random(5))
    for rank in range(size):
        swapped, gathered, scattered, shifted = memory[rank]
        mine = slice(rank * n, (rank + 1) * n)
        assert torch.equal(swapped, torch.cat([before[r][0][mine] for r in range(size)]))
        assert torch.equal(gathered, torch.cat([before[r][1][(1 - r) * n : (2 - r) * n] for r in range(size)]))
        assert torch.equal(scattered[n:], before[0][2][mine] + before[1][2][mine])
        assert torch.equal(shifted[7 : n + 7], before[1][3][:n])


def test_a_batch_of_one_meets_one_that_is_in_none() -> None:
    world = executors(2, CHUNK)
    tensors = [torch.ones(3), torch.ones(3)]
    calls = [ops.AllReduce.of(group, tensors[group.rank], ReduceOp.SUM) for group in groups_of(2)]
    interleave(world, [items(world, [[calls[0]]]), [submission(calls[1], 0)]], WHOLE, random.Random(1))
    assert all(tensor.eq(2).all() for tensor in tensors)


# -- batches that differ ----------------------------------------------------------------------------------------------


def run_apart(world: list[Executor], programs: list[list[Any]], choose: random.Random) -> list[Any]:
    """Each rank as far as it gets: how many of its items it has done, or its error."""
    queues = [list(program) for program in programs]
    current: list[Any] = [None] * len(world)
    errors: dict[int, CollectiveMismatchError] = {}
    idle = 0
    while idle < 200:
        idle += 1
        rank = choose.randrange(len(world))
        if rank in errors or not queues[rank]:
            continue
        if current[rank] is None:
            current[rank] = start(world[rank], queues[rank][0], WHOLE)
        try:
            if next(current[rank]):
                idle = 0
        except StopIteration:
            queues[rank].pop(0)
            current[rank] = None
            idle = 0
        except CollectiveMismatchError as error:
            errors[rank] = error
            idle = 0
    return [errors.get(rank, len(programs[rank]) - len(queues[rank])) for rank in range(len(world))]


def changed(batches: list[list[Asked]], size: int, choose: random.Random) -> list[list[Asked]]:
    """The same but for one mistake."""
    new = [list(batch) for batch in batches]
    i = choose.randrange(len(new))
    j = choose.randrange(len(new[i]))
    match choose.choice(["drop", "add", "other", "swap", "split", "join"]):
        case "drop":
            del new[i][j]
        case "add":
            new[i].insert(j, asked(choose.choice(KINDS), size, choose, [1, 7, 600]))
        case "other":
            new[i][j] = asked(choose.choice(KINDS), size, choose, [1, 7, 600])
        case "swap":
            new[i][j], new[i][0] = new[i][0], new[i][j]
        case "split":
            new[i : i + 1] = [new[i][:j], new[i][j:]]
        case _ if i:
            new[i - 1 : i + 1] = [new[i - 1] + new[i]]
    return [batch for batch in new if batch]


def described(group: CommInfo, batches: list[list[Asked]]) -> list[list[Op]]:
    """What other ranks can know: sizes that are a rank's own and factors left out."""
    found = []
    for batch in batches:
        found.append([])
        for what in batch:
            op = called(group, what, random.Random(0)).op
            found[-1].append(ops.AllToAll(op.dtype, (), ()) if isinstance(op, ops.AllToAll) else op)
    return found


@given(seed=st.integers(0, 1 << 30), size=st.sampled_from([2, 3]), kinds=BATCHES)
@examples(300)
def test_batches_that_differ_are_seen_before_anything_is_taken(seed: int, size: int, kinds: list[list[str]]) -> None:
    """Whatever the mistake: other operations, or other boundaries. Nobody gets past the end."""
    choose = random.Random(seed)
    right = [[asked(kind, size, choose, [0, 1, 7, 255, 600]) for kind in batch] for batch in kinds]
    wrong = changed(right, size, choose)
    group = groups_of(size)[0]
    mine, theirs = described(group, right), described(group, wrong)
    assume([len(batch) for batch in mine] != [len(batch) for batch in theirs] or not fit(mine, theirs))
    end: list[list[Asked]] = [[("barrier", 0, 0, torch.float32, ReduceOp.SUM, False)] * 2]
    world = executors(size, CHUNK)
    mistaken = choose.randrange(size)
    programs = []
    for group in groups_of(size):
        batches = [*(wrong if group.rank == mistaken else right), *end]
        programs.append(items(world, [[called(group, what, choose) for what in batch] for batch in batches]))
    outcome = run_apart(world, programs, choose)
    assert any(isinstance(each, CollectiveMismatchError) for each in outcome)
    for each, program in zip(outcome, programs, strict=True):
        assert isinstance(each, CollectiveMismatchError) or each < len(program)


def fit(mine: list[list[Op]], theirs: list[list[Op]]) -> bool:
    pairs = [(a, b) for one, other in zip(mine, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    return all(a.fits(b) for a, b in pairs)


def mismatch(*programs: list[list[Call]], seed: int = 0, chunk: int = CHUNK) -> list[CollectiveMismatchError]:
    """The errors of the ranks that see one, first that of rank 0 if it does."""
    world = executors(len(programs), chunk)
    outcome = run_apart(world, [items(world, batches) for batches in programs], random.Random(seed))
    found = [each for each in outcome if isinstance(each, CollectiveMismatchError)]
    assert found
    return found


def reduced(group: CommInfo, n: int, dtype: torch.dtype = torch.float32, op: ReduceOp = ReduceOp.SUM) -> Call:
    return ops.AllReduce.of(group, torch.ones(n, dtype=dtype), op)


ZERO, ONE = groups_of(2)
Make = Callable[[CommInfo], list[list[Call]]]


@pytest.mark.parametrize(
    ("mine", "theirs", "seq", "words"),
    [
        (
            lambda g: [[reduced(g, 3), reduced(g, 256), reduced(g, 1)]],
            lambda g: [[reduced(g, 3), reduced(g, 255), reduced(g, 1)]],
            1,
            ("all_reduce(float32[256], SUM)", "all_reduce(float32[255], SUM)"),
        ),
        (
            lambda g: [[reduced(g, 3)], [reduced(g, 3), reduced(g, 4)]],
            lambda g: [[reduced(g, 3)], [reduced(g, 3), reduced(g, 4, torch.int64)]],
            2,
            ("all_reduce(float32[4], SUM)", "all_reduce(int64[4], SUM)"),
        ),
        (
            lambda g: [[ops.Barrier.of(g), reduced(g, 4, op=ReduceOp.MAX)]],
            lambda g: [[ops.Barrier.of(g), reduced(g, 4)]],
            1,
            ("all_reduce(float32[4], MAX)", "all_reduce(float32[4], SUM)"),
        ),
        (
            lambda g: [[ops.Broadcast.of(g, torch.ones(3), 0), ops.Barrier.of(g)]],
            lambda g: [[ops.Broadcast.of(g, torch.ones(3), 1), ops.Barrier.of(g)]],
            0,
            ("broadcast(float32[3], root=0)", "broadcast(float32[3], root=1)"),
        ),
        (
            lambda g: [[reduced(g, 256), reduced(g, 2), reduced(g, 2)]],
            lambda g: [[reduced(g, 256)]],
            0,
            ("a batch of 3 from all_reduce(float32[256], SUM) on", "all_reduce(float32[256], SUM) alone"),
        ),
        (
            lambda g: [[reduced(g, 256), reduced(g, 2), reduced(g, 2)]],
            lambda g: [[reduced(g, 256), reduced(g, 2)], [reduced(g, 2)]],
            0,
            (
                "a batch of 3 from all_reduce(float32[256], SUM) on",
                "a batch of 2 from all_reduce(float32[256], SUM) on",
            ),
        ),
        (  # the difference is in what follows the first bundle
            lambda g: [[reduced(g, 400), reduced(g, 400), reduced(g, 400)]],
            lambda g: [[reduced(g, 400), reduced(g, 400), reduced(g, 3)]],
            2,
            ("all_reduce(float32[400], SUM)", "all_reduce(float32[3], SUM)"),
        ),
        (  # large ones, by themselves
            lambda g: [[reduced(g, 9000), reduced(g, 9000)]],
            lambda g: [[reduced(g, 9000)], [reduced(g, 9000)]],
            0,
            ("a batch of 2 from all_reduce(float32[9000], SUM) on", "all_reduce(float32[9000], SUM) alone"),
        ),
        (
            lambda g: [[reduced(g, 9000), reduced(g, 9000)]],
            lambda g: [[reduced(g, 3), reduced(g, 9000)]],
            0,
            ("all_reduce(float32[9000], SUM)", "all_reduce(float32[3], SUM)"),
        ),
        (
            lambda g: [[reduced(g, 9000), reduced(g, 9000)]],
            lambda g: [[reduced(g, 9000), reduced(g, 3)]],
            1,
            ("all_reduce(float32[9000], SUM)", "all_reduce(float32[3], SUM)"),
        ),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_what_differs_is_named(mine: Make, theirs: Make, seq: int, words: tuple[str, str], seed: int) -> None:
    for error in mismatch(mine(ZERO), theirs(ONE), seed=seed):
        assert error.seq == seq
        assert (error.op, error.other_op) == (words if error.rank == 0 else words[::-1])
        assert error.other_rank == 1 - error.rank


def test_both_see_it() -> None:
    assert {error.rank for error in mismatch([[reduced(ZERO, 3), reduced(ZERO, 3)]], [[reduced(ONE, 3)]])} == {0, 1}


def merged(group: CommInfo, numels: list[int], numbers: list[int]) -> Any:
    found = submission(ops.AllReduce.of_several(group, [torch.ones(n) for n in numels], ReduceOp.SUM), numbers[0])
    found.members = tuple(ops.AllReduce(torch.float32, n, ReduceOp.SUM) for n in numels)
    found.numbers = tuple(numbers)
    return found


def merged_mismatch(mine: list[int], theirs: list[int], chunk: int = CHUNK) -> CollectiveMismatchError:
    """Of all_reduces with a broadcast after the first."""
    world = executors(2, chunk)
    programs = []
    for group, numels in zip(groups_of(2), (mine, theirs), strict=True):
        batch = [
            merged(group, numels, [5, *range(7, 6 + len(numels))]),
            submission(ops.Broadcast.of(group, torch.ones(3), 0), 6),
        ]
        programs.append(list(cut(batch, 2, chunk, chunk)))
    for error in run_apart(world, programs, random.Random(0)):
        if isinstance(error, CollectiveMismatchError) and error.rank == 0:
            return error
    raise AssertionError("not seen by rank 0")


def test_a_member_of_merged_operations_is_named() -> None:
    error = merged_mismatch([10, 20, 30], [10, 20, 31])
    assert (error.seq, error.op, error.other_op) == (
        8,
        "all_reduce(float32[30], SUM)",
        "all_reduce(float32[31], SUM)",
    )
    error = merged_mismatch([10, 20, 30], [10, 20, 30, 40])
    assert (error.seq, error.op, error.other_op) == (
        5,
        "a batch of 4 from all_reduce(float32[10], SUM) on",
        "a batch of 5 from all_reduce(float32[10], SUM) on",
    )


def test_one_merged_operation_of_a_batch_names_its_members() -> None:
    world = executors(2, CHUNK)
    programs = [
        list(cut([merged(group, [10, n], [3, 4])], 2, CHUNK, WHOLE))
        for group, n in zip(groups_of(2), (5, 6), strict=True)
    ]
    for rank, error in enumerate(run_apart(world, programs, random.Random(0))):
        assert isinstance(error, CollectiveMismatchError)
        assert (error.rank, error.seq, error.op) == (rank, 4, f"all_reduce(float32[{5 + rank}], SUM)")


def test_without_room_for_members_the_merged_operation_is_named() -> None:
    error = merged_mismatch([100, 100, 30], [100, 100, 31], chunk=1024)
    assert (error.seq, error.op) == (5, "all_reduce(float32[230] in pieces, SUM)")
    assert error.other_op == "all_reduce(float32[231] in pieces, SUM)"


def test_an_earlier_difference_is_told_from_one_in_the_batch() -> None:
    """The ranks that give have differed before, which they did not have to wait for; the one that takes is late."""
    world = executors(3, CHUNK)
    bundles = []
    for group, n in zip(groups_of(3), (0, 3, 4), strict=True):
        if group.rank:
            gather = submission(ops.Gather.of(group, None, torch.ones(n), 0), 0)
            assert list(start(world[group.rank], gather, WHOLE)) == []
            bundle: Any = items(world, [[ops.Barrier.of(group)] * 2])[0]
            bundles.append(start(world[group.rank], bundle, WHOLE))
    assert next(bundles[0]) is False
    assert next(bundles[1]) is False
    world[0].board.begin(0, ops.Gather(torch.float32, 3, 0), 1)
    world[0].board.post(0)
    bundle = items(world, [[ops.Barrier.of(groups_of(3)[0])] * 2])[0]
    with pytest.raises(
        CollectiveMismatchError, match="rank 2 has a batch, and the ranks differed in a collective before"
    ):
        next(start(world[0], bundle, WHOLE))


def test_an_operation_that_cannot_be_prepared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (executor,) = executors(1, CHUNK)
    (group,) = groups_of(1)
    bundle: Any = items([executor], [[reduced(group, 3), reduced(group, 4), reduced(group, 5)]])[0]
    assert isinstance(bundle, Bundle)
    assert str(bundle.op).startswith("together(all_reduce(float32[3], SUM), all_reduce")

    def fails(self: Any, tensor: Tensor) -> Tensor:
        if tensor.numel() == 4:
            raise MemoryError
        return tensor

    monkeypatch.setattr("asynccomm.backends.shm.reduction.Reduction.contribution", fails)
    with pytest.raises(MemoryError):
        list(start(executor, bundle, WHOLE))
    assert str(bundle.op) == "all_reduce(float32[4], SUM)"
