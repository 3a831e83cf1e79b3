"""Programs, run by each executor. Whole collectives are in test_lowering.py."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.programs import (
    Program,
    Space,
    announced,
    barrier,
    combined,
    exchanged,
    program,
    published,
    reduced_in_parts,
    room_per_reader,
    scattered_sums,
    steps_for,
)
from asynccomm.backends.shm.reduction import DTYPES, Reduction, reduction_for
from asynccomm.backends.shm.reference import Progress
from asynccomm.backends.shm.vectors import Operand, scattered
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import AllToAll, Barrier
from asynccomm.ops.reduce_op import ReduceOp
from tests.cases import cases
from tests.sampling import examples, exhaustive, some

from .world import each_executor, executors  # noqa: F401


def finish(*running: Progress) -> None:
    alive = list(running)
    for _ in range(10_000):
        for progress in list(alive):
            if next(progress, None) is None:
                alive.remove(progress)
        if not alive:
            return
    raise AssertionError("stuck")


def run(
    executor: Executor, made: Program, operands: Sequence[Operand | int], reductions: Sequence[Reduction] = ()
) -> Progress:
    first = executor.board.begin(0, Barrier(), made.steps)
    return executor.run(executor.compiled(made, lambda: made), first, operands, reductions)


def test_steps() -> None:
    assert [steps_for(n, 10) for n in (0, 1, 10, 11, 100)] == [1, 1, 1, 2, 10]


def test_no_executor_waits_inside() -> None:
    mine, theirs = executors(2)
    meet = [program(1, barrier(rank, 2)) for rank in range(2)]
    waiting = run(mine, meet[0], ())
    assert [next(waiting) for _ in range(3)] == [False] * 3
    finish(run(theirs, meet[1], ()))
    finish(waiting)


@cases("n", [0, 1, 255, 256, 1000])
def test_publish(n: int) -> None:
    world = executors(3, chunk=256)
    sent = [(torch.arange(n) + rank).to(torch.uint8) for rank in range(3)]
    got = [[torch.zeros(n, dtype=torch.uint8) for _ in range(3)] for _ in range(3)]

    def one(me: int) -> Progress:
        part = published(me, n, [(rank, n) for rank in range(3)], 256)
        return run(world[me], program(steps_for(n, 256), part), [sent[me], *got[me]])

    finish(*(one(me) for me in range(3)))
    for mine in got:
        assert all(torch.equal(mine[rank], sent[rank]) for rank in range(3))


def test_a_reader_of_one_rank_waits_for_that_rank_only() -> None:
    world = executors(3, chunk=256)
    out, sent = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    reading = run(world[1], program(1, published(1, None, [(0, 4)], 256)), [out])
    finish(run(world[0], program(1, published(0, 4, [], 256)), [sent]), reading)
    assert out.tolist() == [1] * 4  # rank 2 has not come


@cases("n", [0, 1, 64, 65, 400])
def test_exchange(n: int) -> None:
    world = executors(3, chunk=192)
    room = room_per_reader(192, 3)
    assert room == 64
    sent = [[(torch.arange(n) + 10 * source + reader).to(torch.uint8) for reader in range(3)] for source in range(3)]
    got = [[torch.zeros(n, dtype=torch.uint8) for _ in range(3)] for _ in range(3)]
    each = [(rank, n) for rank in range(3)]

    def one(me: int) -> Progress:
        return run(world[me], program(steps_for(n, room), exchanged(me, each, each, room)), [*sent[me], *got[me]])

    finish(*(one(me) for me in range(3)))
    for me in range(3):
        assert all(torch.equal(got[me][rank], sent[rank][me]) for rank in range(3))


@cases("size", some([1, 2, 3, 8], 3))
@cases("n", [0, 1, 7, 24, 25, 64, 1000])
@cases("parts", [False, True])
@cases("pieces", [False, True])
@cases("lends", [False, True])
def test_reduce(size: int, n: int, parts: bool, pieces: bool, lends: bool) -> None:
    world = executors(size, chunk=4096 if not parts else 1024)
    tensors = [
        [part.clone() for part in (torch.arange(n) * (rank + 1.0)).split(11 if pieces and parts else 1001)]
        for rank in range(size)
    ]
    want = torch.arange(n) * float(sum(range(1, size + 1)))

    def one(rank: int) -> Progress:
        made = (
            reduced_in_parts(rank, size, 4 * n, 1024, takes=True, lends=lends)
            if parts
            else program(1, combined(rank, size, 4 * n, takes=True, inline=pieces and n <= 24))
        )
        vector: Operand = scattered(tensors[rank]) if len(tensors[rank]) > 1 else tensors[rank][0]
        return run(world[rank], made, [vector, vector], [reduction_for(torch.float32, ReduceOp.SUM, size)])

    finish(*(one(rank) for rank in range(size)))
    assert all(torch.equal(torch.cat(tensor), want) for tensor in tensors)


@cases("size", [1, 2, 3])
@cases("n", [1, 16, 17, 500])
@cases("pieces", [False, True])
@cases("direct", [False, True])
def test_scattered_sums(size: int, n: int, pieces: bool, direct: bool) -> None:
    world = executors(size, chunk=64 * size)
    data = [[torch.arange(n) * (rank + 1.0) + reader for reader in range(size)] for rank in range(size)]
    divided = [[[part.clone() for part in each.split(7)] for each in row] for row in data]
    got = [torch.zeros(n) for _ in range(size)]

    def one(me: int) -> Progress:
        part = scattered_sums(me, [4 * n] * size, 64, direct=direct)
        reductions = [reduction_for(torch.float32, ReduceOp.SUM, size)]
        vectors = [scattered(parts) for parts in divided[me]] if pieces and n > 7 else data[me]
        return run(world[me], program(steps_for(4 * n, 64), part), [*vectors, got[me]], reductions)

    finish(*(one(me) for me in range(size)))
    for me in range(size):
        assert torch.equal(got[me], sum((data[rank][me] for rank in range(size)), torch.zeros(n)))


def test_a_part_touches_nothing_behind_its_data() -> None:
    world = executors(2, chunk=1024)
    tensors = [torch.arange(16) * (rank + 1.0) for rank in range(2)]
    slots = [each.board.elements(Space.SLOT, torch.uint8, 0, each.board.rank, 0, 1024).fill_(77) for each in world]
    reductions = [reduction_for(torch.float32, ReduceOp.SUM, 2)]
    made = [program(1, combined(r, 2, 64, takes=True)) for r in range(2)]
    finish(*(run(world[r], made[r], [tensors[r]] * 2, reductions) for r in range(2)))
    assert all(torch.equal(tensor, 3.0 * torch.arange(16)) for tensor in tensors)
    assert all(slot[64:].eq(77).all() for slot in slots)


@given(data=st.data())
@examples(100)
def test_vectors_in_pieces(data: st.DataObject) -> None:
    world = executors(2, chunk=128)
    n = data.draw(st.integers(0, 600))

    def pieces() -> list[Tensor]:
        cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
        return [torch.zeros(b - a, dtype=torch.uint8) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]

    sources, targets = pieces(), [pieces(), pieces()]
    for k, tensor in enumerate(sources):
        tensor.copy_((torch.arange(len(tensor)) * 7 + k).to(torch.uint8))
    sender = program(steps_for(n, 128), published(0, n, [(0, n)], 128))
    reader = program(steps_for(n, 128), published(1, None, [(0, n)], 128))
    finish(
        run(world[0], sender, [scattered(sources), scattered(targets[0])]),
        run(world[1], reader, [scattered(targets[1])]),
    )
    want = torch.cat(sources)
    assert all(torch.equal(torch.cat(target), want) for target in targets)


# -- arithmetic -------------------------------------------------------------------------------------------------------

OPERATORS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
BITWISE = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-45,
    6e-8,
    6.1e-5,
    65504.0,
    65520.0,
    3e38,
    -1.5,
    1 / 3,
]


def numbers(dtype: torch.dtype, n: int, choose: random.Random) -> Tensor:
    if dtype.is_floating_point:
        values = torch.tensor([choose.choice([choose.choice(SPECIAL), choose.uniform(-4, 4)]) for _ in range(n)])
        return values.to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor(
        [choose.choice([info.min, info.max, choose.randint(-9, 9) % 100]) for _ in range(n)], dtype=dtype
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit, but for the payload of NaNs, which depends on the processor."""
    if a.dtype.is_floating_point and not torch.equal(a.isnan(), b.isnan()):
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    number = a == a
    return torch.equal(a[number].view(bits), b[number].view(bits))


@pytest.mark.parametrize("each_executor", ["mixed"], indirect=True)  # it makes executors of both kinds
@cases("dtype", DTYPES, ids=str)
def test_both_executors_compute_the_same_bits(dtype: torch.dtype) -> None:
    choose = random.Random(1)
    longest = [numbers(dtype, 5000, choose) for _ in range(5)]  # drawing numbers takes longer than all the rest
    for op in OPERATORS + ([] if dtype.is_floating_point else BITWISE):
        if op is ReduceOp.AVG and dtype in (torch.int8, torch.uint8, torch.int32):
            continue  # they travel in a wider dtype
        for size in some((1, 2, 3, 5), 3):
            for n in (1, 3, 64, 1023, 1024, 1025, 5000) if exhaustive() else (1, 1023, 5000):
                tensors = [tensor[:n] for tensor in longest[:size]]
                results = []
                for executor in ("core", "reference"):
                    world = executors(size, chunk=64 << 10, kind=executor)
                    out = [tensor.clone() for tensor in tensors]
                    made = [program(1, combined(r, size, out[0].nbytes, takes=True)) for r in range(size)]
                    reductions = [reduction_for(dtype, op, size)]
                    assert reductions[0].kernel is not None
                    finish(*(run(world[r], made[r], [out[r]] * 2, reductions) for r in range(size)))
                    results += out
                assert all(same_bits(results[0], other) for other in results[1:]), (op, size, n)


def exchange(
    executor: Executor, sends: Sequence[int], receives: Sequence[int], room: int
) -> tuple[Progress, list[Tensor], list[Tensor]]:
    """A run of ``announced`` on bytes that tell giver and reader, and its inputs and outputs."""
    me = executor.board.rank
    given = [torch.full((n,), 16 * me + rank, dtype=torch.uint8) for rank, n in enumerate(sends)]
    places = [torch.zeros(n, dtype=torch.uint8) for n in receives]
    made = announced(me, tuple(sends), tuple(receives), room)
    first = executor.board.begin(0, AllToAll(torch.uint8, tuple(sends), tuple(receives)), made.steps)
    operands = [tensor.data_ptr() for tensor in (*given, *places)]
    return executor.run(executor.compiled(made, lambda: made), first, operands), given, places


@examples(40)
@given(st.integers(1, 4), st.randoms(use_true_random=False), st.sampled_from([64, 192]))
def test_ranks_exchange_sizes_that_only_two_of_them_know(size: int, choose: random.Random, room: int) -> None:
    world = executors(size, chunk=room * size)
    for _ in range(3):  # the ranks agree on the steps, and so on the next exchange
        counts = [[choose.choice([0, 1, 63, 64, 65, 500, 3000]) for _ in range(size)] for _ in range(size)]
        made = [exchange(each, counts[r], [row[r] for row in counts], room) for r, each in enumerate(world)]
        running = [progress for progress, _, _ in made]
        choose.shuffle(running)
        finish(*running)
        for reader, (_, _, places) in enumerate(made):
            for giver, place in enumerate(places):
                assert place.eq(16 * giver + reader).all()
        assert len({each.board.state.step for each in world}) == 1


@pytest.mark.parametrize(
    ("header", "error", "text"),
    [
        ((0, 9, 1), CollectiveMismatchError, r"all_to_all\(uint8, sends 9 elements to rank 0\)"),
        ((1, 8, 1), BackendError, "announces for .* what cannot be: 8 bytes in 1 steps"),
        ((0, 8, 0), BackendError, "announces for .* what cannot be: 8 bytes in 0 steps"),
        ((0, 8, 1 << 33), BackendError, f"announces for .* what cannot be: 8 bytes in {1 << 33} steps"),
        ((0, 1 << 60, 1), BackendError, "announces for .* what cannot be"),
    ],
)
def test_sizes_that_cannot_be_are_refused(header: tuple[int, int, int], error: type[BrokenError], text: str) -> None:
    world = executors(2)
    made = [exchange(each, (8, 8), (8, 8), 512) for each in world]  # with the memory
    next(made[1][0])
    world[1].board.put(0, 0, header)
    with pytest.raises(error, match=text):
        finish(made[0][0])
