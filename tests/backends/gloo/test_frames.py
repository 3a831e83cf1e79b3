"""What a frame holds, and what it tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import BackendError, Comm, ReduceOp
from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.frames import (
    LONG,
    PAIR,
    ROOM,
    Frame,
    balance,
    complete,
    digest,
    extent,
    heading_of,
    is_carried,
    parcel_of,
    room_of,
)
from asynccomm.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Op,
    Parcel,
    Parcels,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)
from asynccomm.ops.validation import CommInfo

SIZE = 3


def group(rank: int) -> CommInfo:
    return CommInfo("t", rank, SIZE, torch.device("cpu"))


def submission(call: Call, number: int = 5) -> Submission:
    class Numbered:
        seq = number

    work: Any = Numbered()
    return Submission(call, work)


def exchanged(submissions: Sequence[Submission]) -> list[Frame]:
    """The frames of all ranks, after their exchange."""
    frames = [Frame(rank, len(submissions)) for rank in range(len(submissions))]
    for frame, mine in zip(frames, submissions, strict=True):
        frame.fill(mine, 3, heading_of(mine))
    exchange(frames)
    return frames


def exchange(frames: Sequence[Frame]) -> None:
    for rank, frame in enumerate(frames):
        for peer, other in enumerate(frames):
            if peer != rank:
                frame.put(peer, bytes(other.packed(rank)))  # a copy, as the network makes


def of_all(make: Callable[[int], Call]) -> list[Frame]:
    return exchanged([submission(make(rank)) for rank in range(SIZE)])


@pytest.mark.parametrize("n", [0, 1, LONG // 8, LONG // 8 + 1])
def test_what_fits_is_in_it(n: int) -> None:
    tensors = [torch.full((n,), 1.0 + rank) for rank in range(SIZE)]
    submissions = [submission(AllReduce.of(group(rank), t, ReduceOp.SUM)) for rank, t in enumerate(tensors)]
    for rank, frame in enumerate(exchanged(submissions)):
        assert frame.differing() is None
        given, balanced = frame.given()
        assert balanced
        assert (given is None) is (4 * n > LONG // 2)
        if given is not None:
            complete(submissions[rank], rank, given)
            assert tensors[rank].eq(6).all()


def test_all_or_none_is_in_it() -> None:
    """Of sizes of their own, that of one rank may be too long."""
    counts = [1, 10000, 2]
    frames = of_all(lambda rank: AllGather.of(group(rank), [torch.zeros(n) for n in counts], torch.zeros(counts[rank])))
    assert [frame.given()[0] for frame in frames] == [None] * SIZE


CASES: list[tuple[Op, Op]] = [
    (AllReduce(torch.float32, 3, ReduceOp.SUM), AllReduce(torch.float32, 3, ReduceOp.MAX)),
    (AllReduce(torch.float32, 3, ReduceOp.SUM), AllReduce(torch.int32, 3, ReduceOp.SUM)),
    (AllReduce(torch.float32, 3, ReduceOp.SUM), AllReduce(torch.float32, 4, ReduceOp.SUM)),
    (Broadcast(torch.float32, 3, 0), Broadcast(torch.float32, 3, 1)),
    (Barrier(), Barrier(label="x")),
    (Barrier(), Parcels("all_gather_object")),
]


@pytest.mark.parametrize(("mine", "other"), CASES)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_difference_is_seen_by_all(mine: Op, other: Op, odd: int) -> None:
    calls = [Call(other if rank == odd else mine, (torch.ones(3),), (), None) for rank in range(SIZE)]
    calls = [
        call._replace(parcels=(Parcel(b"", ()),), inputs=()) if call.op.kind == "parcels" else call for call in calls
    ]
    frames = exchanged([submission(call) for call in calls])
    assert {frame.differing() for frame in frames} == {(3, (0, odd or 1))}


def test_numbers_and_places_must_agree() -> None:
    def pair(change: Callable[[Submission], object]) -> Frame:
        both = [submission(Call(Barrier(), (), (), None)) for _ in range(2)]
        change(both[1])
        return exchanged(both)[0]

    def number(one: Submission) -> None:
        one.work.seq = 6

    def batch(one: Submission) -> None:
        one.batch = (one, one), 0

    def merged(one: Submission) -> None:
        one.numbers = (5, 6)

    assert pair(lambda one: None).differing() is None
    for change in (number, batch, merged):
        assert pair(change).differing() == (3, (0, 1))


@pytest.mark.parametrize(
    ("places", "names", "sides"),
    [
        ([5, 4, 5], "aba", (0, 1)),  # 0 and 2 went on without a frame
        ([4, 4, 5], "aba", (0, 1)),  # 0 sent its frame late
        ([5, 4, 4], "bba", (1, 2)),
        ([6, 5, 4], "abb", (0, 2)),  # 1 went on as well, and then left the prediction
        ([4, 6, 4], "bab", (0, 1)),
    ],
)
def test_the_earliest_place_tells_where_ranks_differ(places: list[int], names: str, sides: tuple[int, int]) -> None:
    frames = [Frame(rank, SIZE) for rank in range(SIZE)]
    for frame, place, name in zip(frames, places, names, strict=True):
        one = submission(Call(Barrier(label=name), (), (), None), place + 100)
        frame.fill(one, place, heading_of(one), contribute=False)
    exchange(frames)
    for frame in frames:
        assert frame.differing() == (4, sides)


def test_places_in_a_batch() -> None:
    merged, one = submission(Call(Barrier(), (), (), None)), submission(Call(Barrier(), (), (), None))
    merged.members = (Barrier(),) * 3
    assert extent(one) == (1, 0)
    assert extent(merged) == (3, 0)
    batch = [one, merged, one]
    merged.batch = batch, 1
    assert extent(merged) == (5, 1)


def test_pieces_are_told_apart_by_their_sizes() -> None:
    def digests(make: Callable[[list[Tensor]], Call]) -> set[int]:
        lists = [[1, 2, 4], [2, 1, 4], [1, 2, 4]]
        return {digest(submission(make([torch.zeros(n) for n in sizes]))) for sizes in lists}

    one = CommInfo("t", 0, 1, torch.device("cpu"))
    assert len(digests(lambda tensors: AllReduce.of_several(one, tensors, ReduceOp.SUM))) == 2
    assert len(digests(lambda tensors: Broadcast.of_several(one, tensors, 0))) == 2
    assert len(digests(lambda tensors: ReduceScatter.of_several(one, tensors, [tensors], ReduceOp.SUM))) == 2
    assert len(digests(lambda tensors: Broadcast.of_several(group(1), tensors, 0))) == 2
    assert digest(submission(AllReduce.of(one, torch.zeros(3), ReduceOp.SUM))) == 0


def all_to_all(rank: int, extra: int = 0) -> Call:
    """Rank 0 sends rank 2 ``extra`` more than that expects."""
    counts = [[rank + peer for peer in range(SIZE)] for rank in range(SIZE)]
    inputs = [torch.full((n,), float(rank)) for n in counts[rank]]
    outputs = [torch.zeros(n) for n in counts[rank]]
    if rank == 0 and extra:
        inputs[2] = torch.zeros(len(inputs[2]) + extra)
    return AllToAll.of(group(rank), outputs, inputs)


@pytest.mark.parametrize("extra", [0, 1, 400])
def test_sizes_of_an_uneven_exchange(extra: int) -> None:
    for frame in of_all(lambda rank: all_to_all(rank, extra)):
        assert frame.differing() is None
        assert frame.given()[1] is (extra == 0)


def test_an_uneven_exchange_in_frames() -> None:
    calls = [all_to_all(rank) for rank in range(SIZE)]
    submissions = [submission(call) for call in calls]
    for rank, frame in enumerate(exchanged(submissions)):
        given = frame.given()[0]
        assert given is not None
        complete(submissions[rank], rank, given)
        assert [output.tolist() for output in calls[rank].outputs] == [[float(r)] * (r + rank) for r in range(SIZE)]


def test_balances_depend_on_the_pair() -> None:
    ops = [AllToAll(torch.float32, (0, 1), (0, 2)), AllToAll(torch.float32, (1, 0), (2, 0))]
    assert sum([balance(op, rank) for rank, op in enumerate(ops)]) % 2**64 != 0, "the sums of sizes are equal"


@pytest.mark.parametrize("length", [0, 7, ROOM - 8, ROOM])
def test_parcels(length: int) -> None:
    given = Parcel(b"head", (torch.arange(length) % 200).to(torch.uint8).split(5) or ())
    call = Call(Parcels("broadcast_object", giver=1), (), (), None)
    frames = of_all(lambda rank: call._replace(parcels=(given,) if rank == 1 else ()))
    for frame in frames:
        found, _ = frame.given()
        assert (found is None) is (length > ROOM - 8)
        if found is not None:
            head, payload = parcel_of(1, found[1])
            assert head == b"head"
            assert payload.tolist() == [i % 200 for i in range(length)]


def test_no_parcel_of_who_is_alone() -> None:
    (frame,) = exchanged([submission(Call(Parcels("all_gather_object"), (), (), None))])
    assert frame.given()[0] is not None


def test_parcels_of_their_own_for_each_go_another_way() -> None:
    call = Call(Parcels("scatter_v", shared=False, giver=0), (), (), None)
    frames = of_all(lambda rank: call._replace(parcels=(Parcel(b"", ()),) * SIZE if rank == 0 else ()))
    assert [frame.given()[0] for frame in frames] == [None] * SIZE


@pytest.mark.parametrize("at", [60, 64])
def test_what_no_rank_says_is_refused(at: int) -> None:
    frame, other, _ = of_all(lambda rank: Call(Barrier(), (), (), None))
    data = bytearray(other.packed(0).ljust(at + 4, b"\0"))
    data[at - 4 : at] = b"\xff" * 4
    with pytest.raises(BackendError, match="rank 1 sent a frame that cannot be"):
        frame.put(1, bytes(data))
        frame.given()


@pytest.mark.parametrize("length", [1, ROOM, 2**32 - 1])
def test_what_is_no_parcel_is_refused(length: int) -> None:
    call = Call(Parcels("all_gather_object"), (), (), None, parcels=(Parcel(b"", ()),))
    frame = of_all(lambda rank: call)[0]
    given, _ = frame.given()
    assert given is not None
    assert parcel_of(1, given[1])[0] == b""
    with pytest.raises(BackendError, match=f"rank 1 sent a parcel of 4 bytes with a head of {length} bytes"):
        parcel_of(1, length.to_bytes(4, "little"))


@pytest.mark.ranks([2, 3], backend="gloo")
async def test_in_inference_mode_and_out_of_it(comm: Comm) -> None:
    """Frames are used again, whatever mode they were made in."""
    with torch.inference_mode():
        inside = [torch.ones(3) for _ in range(3)]
        await asyncio.gather(*[comm.all_reduce(tensor) for tensor in inside])
    outside = [torch.ones(3) for _ in range(5)]
    await asyncio.gather(*[comm.all_reduce(tensor) for tensor in outside])
    assert all(tensor.eq(comm.size).all() for tensor in (*inside, *outside))


@pytest.mark.parametrize(
    ("make", "carried"),
    [
        (lambda n: AllReduce.of(group(0), torch.zeros(n), ReduceOp.SUM), True),
        (lambda n: AllReduce.of(group(0), torch.zeros(n, dtype=torch.float64), ReduceOp.SUM), False),
        (lambda n: AllGather.of(group(0), [torch.zeros(3) for _ in range(SIZE)], torch.zeros(3)), True),
        (lambda n: AllGather.of(group(0), [torch.zeros(k) for k in range(SIZE)], torch.zeros(0)), False),
        (lambda n: Call(Barrier(), (), (), None), True),
    ],
)
def test_calls_that_frames_carry_for_certain(make: Callable[[int], Call], carried: bool) -> None:
    """Uneven contributions may fit on some ranks only."""
    assert is_carried(submission(make(LONG // 8)), SIZE) == carried
    assert not isinstance(make(1).op, AllReduce) or not is_carried(submission(make(LONG // 8 + 1)), SIZE)


def test_a_frame_is_sent_without_its_unused_room() -> None:
    frame = Frame(0, SIZE)
    frame.fill(submission(AllReduce.of(group(0), torch.ones(5), ReduceOp.SUM)), 0, b"")
    assert len(frame.packed(1)) == 64 + 20
    frame.fill(submission(AllReduce.of(group(0), torch.ones(10000), ReduceOp.SUM)), 0, b"")
    assert len(frame.packed(1)) == 64


def rooted(op: type[Gather | Reduce], rank: int, n: int) -> Call:
    mine = torch.full((n,), 1.0 + rank)
    if op is Reduce:
        return Reduce.of(group(rank), mine, 1, ReduceOp.SUM)
    return Gather.of(group(rank), [torch.zeros(n) for _ in range(SIZE)] if rank == 1 else None, mine, 1)


@pytest.mark.parametrize("op", [Gather, Reduce])
def test_only_the_root_gets_what_only_the_root_needs(op: type[Gather | Reduce]) -> None:
    calls = [rooted(op, rank, 500) for rank in range(SIZE)]
    submissions = [submission(call) for call in calls]
    frames = exchanged(submissions)
    assert [len(frames[0].packed(peer)) for peer in (1, 2)] == [64 + 2000, 64]
    for rank, frame in enumerate(frames):
        assert frame.differing() is None
        given, _ = frame.given()
        assert given is not None
        complete(submissions[rank], rank, given)
    results = [output.unique().tolist() for output in calls[1].outputs]
    assert results == ([[1.0], [2.0], [3.0]] if op is Gather else [[6.0]])
    assert calls[0].inputs[0].eq(1).all()


@pytest.mark.parametrize("stride", [1, 2])
def test_each_rank_gets_its_part_of_what_is_scattered(stride: int) -> None:
    n = LONG // 4
    outputs = [torch.zeros(n * stride)[::stride] for _ in range(SIZE)]
    parts = [torch.full((n,), 7.0 + rank) for rank in range(SIZE)]
    submissions = [
        submission(Scatter.of(group(rank), outputs[rank], parts if rank == 0 else None, 0)) for rank in range(SIZE)
    ]
    for rank, frame in enumerate(exchanged(submissions)):
        given, _ = frame.given()
        assert given is not None
        assert rank == 0 or len(given[0]) == LONG, "as much as a frame takes"
        complete(submissions[rank], rank, given)
        assert outputs[rank].eq(7 + rank).all()


def with_parts(
    kind: str, dtype: torch.dtype, stride: int, reduction: Any
) -> tuple[list[Submission], list[list[float]]]:
    """The calls of all ranks, of 5 elements for each, and their results."""
    given = [[[10.0 * rank + peer] * 5 for peer in range(SIZE)] for rank in range(SIZE)]
    calls = []
    for rank in range(SIZE):
        rows = torch.tensor(given[rank], dtype=dtype)
        output = torch.zeros(5 * (SIZE if kind == "moved" else 1) * stride, dtype=dtype)[::stride]
        if kind == "moved":
            calls.append(AllToAllSingle.of(group(rank), output, rows.view(-1)))
        elif kind == "list":
            calls.append(ReduceScatter.of(group(rank), output, list(rows), reduction))
        else:
            calls.append(ReduceScatterSingle.of(group(rank), output, rows.view(-1), reduction))
    columns = [[row[rank] for row in given] for rank in range(SIZE)]
    if kind == "moved":
        return [*map(submission, calls)], [[value for part in column for value in part] for column in columns]
    scale = {ReduceOp.SUM: 1.0, ReduceOp.AVG: 1 / SIZE}.get(reduction, 0.5)
    return [*map(submission, calls)], [[sum(column[k][0] for k in range(SIZE)) * scale] * 5 for column in columns]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "reduction"),
    [
        ("moved", None),
        ("list", ReduceOp.SUM),
        ("single", ReduceOp.SUM),
        ("single", ReduceOp.AVG),
        ("single", ReduceOp.PREMUL_SUM(0.5)),
    ],
)
def test_each_rank_gets_its_part_of_every_contribution(
    kind: str, reduction: Any, dtype: torch.dtype, stride: int
) -> None:
    submissions, results = with_parts(kind, dtype, stride, reduction)
    for rank, frame in enumerate(exchanged(submissions)):
        given, _ = frame.given()
        assert given is not None
        assert len({len(given[peer]) for peer in range(SIZE) if peer != rank}) == 1
        assert len(given[rank]) == SIZE * len(given[rank - 1])
        complete(submissions[rank], rank, given)
        assert submissions[rank].outputs[0].tolist() == pytest.approx(results[rank], rel=0.01)


@pytest.mark.parametrize("kind", ["moved", "list", "single"])
def test_a_part_of_another_length_is_refused(kind: str) -> None:
    submissions, _ = with_parts(kind, torch.float32, 1, ReduceOp.SUM)
    with pytest.raises(BackendError, match="rank 2 sent a frame that cannot be: 16 bytes for a part of 20"):
        complete(submissions[1], 1, [b"x" * 20, b"x" * 60, b"x" * 16])
    assert submissions[1].outputs[0].eq(0).all()


@pytest.mark.parametrize("surplus", [-1, 1])
def test_data_of_another_length_than_the_output_are_refused(surplus: int) -> None:
    calls = [Broadcast.of(group(rank), torch.zeros(4), 0) for rank in range(SIZE)]
    with pytest.raises(BackendError, match=f"has brought {16 + surplus} bytes where 16 fit"):
        complete(submission(calls[1]), 1, [b"x" * (16 + surplus), b"", b""])
    assert calls[1].outputs[0].eq(0).all()


def test_the_room_of_what_goes_to_all_ranks_shrinks_with_their_number() -> None:
    assert [room_of(Broadcast(torch.float32, 1, 0), size) for size in (1, 2, 3, 1000)] == [LONG, PAIR, LONG // 2, ROOM]
    assert [room_of(Gather(torch.float32, 1, 0), size) for size in (2, 3, 1000)] == [PAIR, LONG, LONG]
    assert room_of(Barrier(), 2) == ROOM
    assert room_of(ReduceScatter(torch.float32, 2, ReduceOp.SUM, counts=(1, 2, 2)), 3) == ROOM
