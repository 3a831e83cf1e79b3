"""Parcels on boards: every form, any interleaving, and what is refused."""

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm import Comm, Work, new_comm, ops
from asynccomm.backends.base import Submission
from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.lowering import start
from asynccomm.errors import BackendError, BrokenError, PayloadError
from asynccomm.ops import Call, Parcel, Parcels
from asynccomm.ops.parcels import MAX_HEAD
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.cases import cases
from tests.sampling import examples

from .test_programs import finish
from .world import each_executor, executors, interleave, submission  # noqa: F401

FORMS = {
    "broadcast": lambda root: Parcels("broadcast", giver=root),
    "all_gather": lambda root: Parcels("all_gather"),
    "gather": lambda root: Parcels("gather", taker=root),
    "scatter": lambda root: Parcels("scatter", False, giver=root),
    "all_to_all": lambda root: Parcels("all_to_all", False),
    "gather_own": lambda root: Parcels("gather_own", False, taker=root),  # not in use yet
}


def parcel(n: int, head: int, choose: random.Random) -> Parcel:
    """A payload of about ``n`` elements in tensors of all kinds."""
    generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
    tensors: list[Tensor] = []
    while n > 0 or choose.random() < 0.3:
        k = min(n, choose.choice([0, 1, 3, n]))
        values = torch.randint(0, 100, (k, 2), generator=generator)
        kind = choose.randrange(5)
        tensors.append(
            [
                values,
                values[:, 0].to(torch.int16),
                values.float().t(),
                torch.complex(values[:, 0].float(), values[:, 1].float()).conj(),
                values[:, 1].double().requires_grad_(),
            ][kind]
        )
        n -= k
    return Parcel(choose.randbytes(head), tuple(tensors))


def bytes_of(parcel: Parcel) -> bytes:
    return b"".join(t.detach().resolve_conj().contiguous().numpy().tobytes() for t in parcel.tensors)


class Placed:
    """A place that takes what comes in tensors of several shapes."""

    def __init__(self, choose: random.Random, error: Exception | None = None) -> None:
        self.calls: list[tuple[int, bytes, dict[int, int]]] = []
        self.tensors: dict[int, list[Tensor]] = {}
        self._choose = choose
        self._error = error

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        self.calls.append((source, head, dict(lengths)))
        if self._error is not None:
            raise self._error
        left, found = lengths[source], []
        while left:
            n = self._choose.choice([1, min(left, 5), left])
            strided = self._choose.random() < 0.3
            found.append(torch.zeros(n, 2, dtype=torch.uint8)[:, 0] if strided else torch.zeros(n, dtype=torch.uint8))
            left -= n
        self.tensors[source] = found
        return found

    def data(self, source: int) -> bytes:
        return b"".join(bytes(tensor.tolist()) for tensor in self.tensors[source])


def given_by(op: Parcels, rank: int, size: int, new: Callable[[], Parcel]) -> tuple[Parcel, ...]:
    if not op.gives(rank):
        return ()
    return tuple(new() for _ in range(1 if op.shared else size))


def check(op: Parcels, parcels: Sequence[Sequence[Parcel]], places: Sequence[Placed]) -> None:
    """Each taker was offered each parcel that is for it once, with all lengths, and got it."""
    for rank, place in enumerate(places):
        if not op.takes(rank):
            assert place.calls == []
            continue
        sent = {s: given[0 if op.shared else rank] for s, given in enumerate(parcels) if given and s != rank}
        lengths = {source: parcel.nbytes for source, parcel in sent.items()}
        assert sorted(place.calls) == sorted((source, parcel.head, lengths) for source, parcel in sent.items())
        for source, parcel in sent.items():
            assert place.data(source) == bytes_of(parcel)


@given(
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1, 2, 3, 5]),
    forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=1, max_size=5),
    chunk=st.sampled_from([64, 256, 1024]),
)
@examples(120)
def test_any_sequence_in_any_interleaving(seed: int, size: int, forms: list[str], chunk: int) -> None:
    choose = random.Random(seed)
    programs: list[list[Submission]] = [[] for _ in range(size)]
    done = []
    sums = []
    for form in forms:
        op = FORMS[form](choose.randrange(size))

        def new() -> Parcel:
            return parcel(choose.choice([0, 0, 1, 30, 300]), choose.choice([0, 1, 30, 100, 2000]), choose)

        parcels = [given_by(op, rank, size, new) for rank in range(size)]
        places = [Placed(choose) for _ in range(size)]
        done.append((op, parcels, places))
        totals = [torch.ones(40) for _ in range(size)]
        sums.append(totals)
        for rank, program in enumerate(programs):
            call = Call(op, (), (), None, parcels=parcels[rank], place=places[rank] if op.takes(rank) else None)
            program.append(submission(call, len(program)))
            group = CommInfo("t", rank, size, torch.device("cpu"))
            program.append(submission(ops.AllReduce.of(group, totals[rank], ReduceOp.SUM), len(program)))
    kept = [list(program) for program in programs]
    world = executors(size, chunk)
    interleave(world, programs, chunk // 2, choose)
    for entry in done:
        check(*entry)
    assert all(t.eq(size).all() for totals in sums for t in totals)
    assert all(s.error is None for program in kept for s in program)
    assert len({each.board.state.step for each in world}) == 1


def run(
    op: Parcels, parcels: Sequence[Sequence[Parcel]], places: Sequence[Placed], chunk: int = 1024
) -> tuple[list[Executor], list[Submission]]:
    size = len(parcels)
    world = executors(size, chunk)
    calls = [
        Call(op, (), (), None, parcels=tuple(parcels[r]), place=places[r] if op.takes(r) else None) for r in range(size)
    ]
    submissions = [submission(call, 0) for call in calls]
    interleave(world, [[s] for s in submissions], 512, random.Random(1))
    return world, submissions


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize(("size", "head", "payload"), [(1, 9, 9), (2, 0, 0), (3, 100, 100), (3, 0, 2000), (3, 2000, 0)])
def test_every_form(form: str, size: int, head: int, payload: int) -> None:
    choose = random.Random(3)
    op = FORMS[form](size - 1)
    parcels = [given_by(op, r, size, lambda: parcel(payload, head, choose)) for r in range(size)]
    places = [Placed(choose) for _ in range(size)]
    world, _ = run(op, parcels, places)
    check(op, parcels, places)
    if head + 16 * payload <= 100:
        assert [each.board.state.step for each in world] == [1] * size


@cases("extra, steps", [(0, 1), (1, 2)])
def test_what_fits_in_a_slot_takes_one_step(extra: int, steps: int) -> None:
    given = [Parcel(b"h" * 100, (torch.zeros(1024 - 100 + extra, dtype=torch.uint8),))]
    world, _ = run(Parcels("broadcast", giver=0), [given, []], [Placed(random.Random(1)) for _ in range(2)])
    assert [each.board.state.step for each in world] == [steps] * 2


def test_a_parcel_that_nobody_wants_is_not_moved() -> None:
    """The taker's own, in a gather: however large."""
    given = [[Parcel(b"", (torch.zeros(100_000),))], [Parcel(b"", (torch.zeros(10),))]]
    world, _ = run(Parcels("gather", taker=0), given, [Placed(random.Random(1)) for _ in range(2)])
    assert [each.board.state.step for each in world] == [1, 1]
    assert run(Parcels("all_gather"), [given[0]], [Placed(random.Random(1))])[0][0].board.state.step == 1


@cases(
    "form, payload, raised",
    product(["broadcast", "all_gather", "all_to_all"], [1, 3000], [PayloadError("no"), KeyError("what")]),
)
def test_a_refused_payload_is_thrown_away_and_the_next_operation_works(
    form: str, payload: int, raised: Exception
) -> None:
    choose, size = random.Random(3), 3
    op = FORMS[form](0)
    parcels = [given_by(op, r, size, lambda: parcel(payload, 20, choose)) for r in range(size)]
    places = [Placed(choose), Placed(choose, raised), Placed(choose)]
    groups = [CommInfo("t", rank, size, torch.device("cpu")) for rank in range(size)]
    totals = [torch.ones(40) for _ in range(size)]
    programs = [
        [
            submission(Call(op, (), (), None, parcels=parcels[r], place=places[r]), 0),
            submission(ops.AllReduce.of(groups[r], totals[r], ReduceOp.SUM), 1),
        ]
        for r in range(size)
    ]
    kept = [program[0] for program in programs]
    interleave(executors(size), programs, 512, choose)
    assert all(t.eq(3).all() for t in totals)
    assert kept[0].error is kept[2].error is None
    if isinstance(raised, PayloadError):
        assert kept[1].error is raised
    else:
        assert isinstance(kept[1].error, PayloadError)
        assert kept[1].error.__cause__ is raised
    heads = [source for source, _, _ in places[1].calls]
    assert sorted(heads) == ([0] if form == "broadcast" else [0, 2])  # each was offered, though one was refused
    places[1].tensors = {s: [] for s in heads}
    check(op, [parcels[0], parcels[1], parcels[2]], [places[0], Placed(choose), places[2]][:1])


def test_a_place_of_another_size_is_refused() -> None:
    place = Placed(random.Random(1))
    wrong = lambda source, head, lengths: [torch.zeros(3)]  # noqa: E731
    world = executors(2)
    calls = [
        Call(Parcels("b", giver=0), (), (), None, parcels=(Parcel(b"", (torch.zeros(2),)),), place=place),
        Call(Parcels("b", giver=0), (), (), None, place=wrong),
    ]
    submissions = [submission(call, 0) for call in calls]
    interleave(world, [[s] for s in submissions], 512, random.Random(1))
    assert str(submissions[1].error) == "rank 0 sent 8 bytes where 12 fit"


@cases("payload", [1, 3000])
def test_a_broken_error_out_of_the_place_breaks_the_comm(payload: int) -> None:
    error = BackendError("the end")
    given = [[parcel(payload, 20, random.Random(1))], []]
    with pytest.raises(BackendError, match="the end"):
        run(Parcels("b", giver=0), given, [Placed(random.Random(1)), Placed(random.Random(1), error)])


def test_a_head_beyond_all_bounds_is_an_error_before_any_memory_is_taken() -> None:
    mine, other = executors(2)
    theirs = other.board
    theirs.begin(0, Parcels("b", giver=1), 1)
    theirs.put(0, 0, (MAX_HEAD + 1, 0, 1 << 20))
    theirs.post(0)
    place = Placed(random.Random(1))
    taking = start(mine, submission(Call(Parcels("b", giver=1), (), (), None, place=place), 0), 512)
    with pytest.raises(BackendError, match=f"rank 1 announces {MAX_HEAD + 1} bytes of a parcel's head"):
        list(taking)
    assert place.calls == []


def test_the_head_is_handed_on_as_soon_as_it_is_complete() -> None:
    """The payload of a large parcel goes straight to its place, while more of it is to come."""
    world = executors(2, chunk=128)
    data = torch.arange(1000, dtype=torch.uint8)
    giving = start(
        world[0], submission(Call(Parcels("b", giver=0), (), (), None, parcels=(Parcel(b"0" * 200, (data,)),)), 0), 0
    )
    place = Placed(random.Random(5))
    taking = start(world[1], submission(Call(Parcels("b", giver=0), (), (), None, place=place), 0), 0)
    next(giving)
    next(taking)
    assert place.calls == []  # 128 bytes of the head are here
    for _ in range(6):
        next(giving)
        next(taking)
    assert len(place.calls) == 1
    finish(giving, taking)
    assert place.data(0) == bytes(data.tolist())


# -- in processes of their own ----------------------------------------------------------------------------------------


def call(comm: Comm, op: Parcels, given: Parcel | None, place: Placed | None) -> Work[None]:
    work: Work[None] = comm._submit(Call(op, (), (), None, parcels=(given,) if given else (), place=place), None, None)
    return work


@pytest.mark.ranks(3, backend="shm")
async def test_a_refusal_fails_one_work_and_the_comm_goes_on(comm: Comm) -> None:
    op = Parcels("broadcast", giver=0)
    place = Placed(random.Random(1), PayloadError("not here") if comm.rank == 1 else None)
    given = Parcel(b"head", (torch.arange(5),))
    work = call(comm, op, given if comm.rank == 0 else None, place)
    if comm.rank == 1:
        with pytest.raises(PayloadError, match="not here"):
            await work
    else:
        await work
    total = torch.ones(3)
    await comm.all_reduce(total)
    assert total.tolist() == [3.0] * 3


@pytest.mark.ranks(2, backend="shm")
async def test_a_broken_error_ends_the_comm(comm: Comm) -> None:
    async with new_comm("shm", name="doomed", timeout=30) as doomed:
        place = Placed(random.Random(1), BackendError("the end") if comm.rank == 1 else None)
        work = call(doomed, Parcels("all_gather"), Parcel(b"", ()), place)
        if comm.rank == 1:
            with pytest.raises(BackendError, match="the end"):
                await work
            with pytest.raises(BackendError, match="the end"):
                await doomed.barrier()
        else:
            with contextlib.suppress(BrokenError):
                await work
                await doomed.barrier()
    await comm.barrier()


@pytest.mark.ranks(2, backend="shm")
@pytest.mark.parametrize("expected", [0, 64 << 20])
async def test_a_large_parcel(comm: Comm, expected: int) -> None:
    """With its size known beforehand, and not."""
    op = Parcels("all_gather")
    mine = Parcel(bytes([comm.rank]) * (3 << 20), (torch.full((16 << 20,), float(comm.rank)),))
    got = torch.zeros(16 << 20)
    heads = []

    def place(source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        heads.append((source, head))
        return [got[:5], got[5:]]

    await comm._submit(Call(op, (), (), None, parcels=(mine,), place=place, expected=expected), None, None)
    other = 1 - comm.rank
    assert heads == [(other, bytes([other]) * (3 << 20))]
    assert got.eq(other).all()
