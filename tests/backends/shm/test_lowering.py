"""Whole collectives on boards, under random interleavings, against the loopback backend's arithmetic."""

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm import ops
from asynccomm.backends import loopback
from asynccomm.backends.base import Submission
from asynccomm.backends.shm import lowering
from asynccomm.backends.shm.board import Board
from asynccomm.backends.shm.lowering import is_large, start
from asynccomm.errors import CollectiveMismatchError
from asynccomm.ops import Call, Parcel
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.cases import cases
from tests.sampling import examples, some

from .calls import DTYPES, KINDS, copied, legal, make, values
from .world import each_executor, executors, in_threads, interleave, submission  # noqa: F401


def run_both(calls: list[list[Call]], size: int, *, chunk: int, whole: int, choose: random.Random | None) -> None:
    """Run ``calls[i][rank]`` on boards, and compare everything with what loopback makes of the same.

    Args:
        choose: chooses an interleaving; None: in threads.
    """
    expected = [[copied(call) for call in row] for row in calls]
    for seq, row in enumerate(expected):
        loopback._perform([submission(call, seq) for call in row])
    programs = [[submission(row[rank], seq) for seq, row in enumerate(calls)] for rank in range(size)]
    if choose is None:
        in_threads(executors(size, chunk), programs, whole)
    else:
        interleave(executors(size, chunk), programs, whole, choose)
    for row, expected_row in zip(calls, expected, strict=True):
        for rank, (call, want) in enumerate(zip(row, expected_row, strict=True)):
            for mine, theirs in zip((*call.inputs, *call.outputs), (*want.inputs, *want.outputs), strict=True):
                assert torch.equal(mine, theirs), f"{call.op} on rank {rank}: {mine} != {theirs}"


@given(
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1, 2, 3, 4, 5, 8]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    whole=st.sampled_from([0, 64, 1024]),
)
@examples(150)
def test_any_sequence_in_any_interleaving(seed: int, size: int, kinds: list[str], whole: int) -> None:
    choose = random.Random(seed)
    run_both(random_calls(kinds, size, choose), size, chunk=1024, whole=whole, choose=choose)


def test_ranks_that_run_at_once() -> None:
    """On threads that C drives without the GIL; with a thread sanitizer this checks the order of memory accesses."""
    for seed in range(20):
        choose = random.Random(seed)
        size = choose.choice([2, 3, 4])
        calls = random_calls(choose.sample(KINDS, 8), size, choose)
        run_both(calls, size, chunk=1024, whole=choose.choice([0, 64, 1024]), choose=None)


def random_calls(kinds: list[str], size: int, choose: random.Random) -> list[list[Call]]:
    calls = []
    for kind in kinds:
        n = choose.choice([0, 1, 2, 7, 64, 255, 600, 1500])
        root = choose.randrange(size)
        dtype = choose.choice(DTYPES)
        reductions = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.BXOR]
        op = choose.choice([o for o in reductions if legal(o, dtype)])
        strided = choose.random() < 0.2
        calls.append(
            [
                make(
                    kind,
                    CommInfo("t", rank, size, torch.device("cpu")),
                    n,
                    root,
                    op,
                    partial(values, dtype=dtype, strided=strided, choose=choose),
                )
                for rank in range(size)
            ]
        )
    return calls


@pytest.mark.parametrize("each_executor", some(["mixed", "core", "reference"], 1), indirect=True)  # it has both kinds
@cases("dtype", [torch.float16, torch.uint8, torch.int16, torch.uint16, torch.uint64, torch.int32])
@cases(
    "kind", ["all_reduce", "reduce_scatter_single", "all_reduce_several", "reduce_scatter_several", "all_reduce_out"]
)
@cases("whole", [0, 1024])
def test_every_reduction_of(dtype: torch.dtype, kind: str, whole: int) -> None:
    choose = random.Random(1)
    reductions = [getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")]
    reductions = [op for op in [*reductions, ReduceOp.PREMUL_SUM(2)] if legal(op, dtype)]
    for size in some((1, 2, 3), 2):
        groups = [CommInfo("t", rank, size, torch.device("cpu")) for rank in range(size)]
        calls = [
            [make(kind, g, 700, 0, op, lambda n: values(n, dtype, False, choose)) for g in groups] for op in reductions
        ]
        run_both(calls, size, chunk=1024, whole=whole, choose=choose)


def test_one_byte_floats_are_moved() -> None:
    choose = random.Random(1)
    groups = [CommInfo("t", rank, 3, torch.device("cpu")) for rank in range(3)]
    new = lambda n: values(n, torch.float32, False, choose).to(torch.float8_e4m3fn)  # noqa: E731
    calls = [[make("all_gather", g, 2000, 0, ReduceOp.SUM, new) for g in groups]]
    expected = [copied(call) for call in calls[0]]
    loopback._perform([submission(call, 0) for call in expected])
    interleave(executors(3), [[submission(call, 0)] for call in calls[0]], 0, choose)
    for call, want in zip(calls[0], expected, strict=True):
        for mine, theirs in zip(call.outputs, want.outputs, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@cases(
    "dtype, kind, n", product([torch.float32, torch.bfloat16, torch.float16], [ReduceOp.SUM, ReduceOp.AVG], [50, 5000])
)
def test_all_ranks_get_the_same_bits(dtype: torch.dtype, kind: ReduceOp, n: int) -> None:
    choose = random.Random(1)
    size = 5
    tensors = [torch.randn(n).to(dtype) * 10.0 ** (rank - 2) for rank in range(size)]
    exact = torch.stack([t.to(torch.float64) for t in tensors]).sum(0)
    calls = [ops.AllReduce.of(CommInfo("t", r, size, torch.device("cpu")), t, kind) for r, t in enumerate(tensors)]
    interleave(executors(size), [[submission(call, 0)] for call in calls], 512, choose)
    for tensor in tensors[1:]:
        assert torch.equal(tensor, tensors[0])
    exact = exact / size if kind is ReduceOp.AVG else exact
    assert torch.allclose(tensors[0].to(torch.float64), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_half_types_are_added_in_single_precision() -> None:
    size = 4  # each 1 would be lost one by one beside 2048 in float16
    tensors = [torch.full((3,), value, dtype=torch.float16) for value in (2048.0, 1.0, 1.0, 2.0)]
    calls = [
        ops.AllReduce.of(CommInfo("t", r, size, torch.device("cpu")), t, ReduceOp.SUM) for r, t in enumerate(tensors)
    ]
    interleave(executors(size), [[submission(call, 0)] for call in calls], 512, random.Random(1))
    assert tensors[3].tolist() == [2052.0] * 3


@cases("n", [3, 3000])
def test_in_place_forms(n: int) -> None:
    size = 3
    groups = [CommInfo("t", rank, size, torch.device("cpu")) for rank in range(size)]
    gathered = [torch.full((size * n,), -1.0) for _ in range(size)]
    for rank in range(size):
        gathered[rank][rank * n : (rank + 1) * n] = torch.arange(n) + 1000.0 * rank
    swapped = [torch.arange(size * n) + 10_000.0 * rank for rank in range(size)]
    scattered = [torch.arange(size * n, dtype=torch.float32) for _ in range(size)]
    calls = [
        [ops.AllGatherSingle.of(g, gathered[g.rank], gathered[g.rank][g.rank * n : (g.rank + 1) * n]) for g in groups],
        [ops.AllToAllSingle.of(g, swapped[g.rank], swapped[g.rank]) for g in groups],
        [ops.ReduceScatterSingle.of(g, scattered[g.rank][:n], scattered[g.rank], ReduceOp.SUM) for g in groups],
    ]
    programs = [[submission(row[rank], seq) for seq, row in enumerate(calls)] for rank in range(size)]
    interleave(executors(size), programs, 1024, random.Random(2))
    for rank in range(size):
        assert torch.equal(
            gathered[rank].view(size, n), torch.stack([torch.arange(n) + 1000.0 * r for r in range(size)])
        )
        want = torch.stack([torch.arange(size * n)[rank * n : (rank + 1) * n] + 10_000.0 * r for r in range(size)])
        assert torch.equal(swapped[rank].view(size, n), want)
        assert torch.equal(scattered[rank][:n], 3.0 * torch.arange(rank * n, (rank + 1) * n))


@cases("n", [3, 3000])
def test_overlapping_memory_is_cloned(n: int) -> None:
    size = 2
    memory = [torch.arange(2 * n + 1) + 100_000.0 * rank for rank in range(size)]
    before = [m.clone() for m in memory]
    groups = [CommInfo("t", rank, size, torch.device("cpu")) for rank in range(size)]
    calls = [ops.AllToAllSingle.of(g, memory[g.rank][1:], memory[g.rank][: 2 * n]) for g in groups]
    interleave(executors(size), [[submission(call, 0)] for call in calls], 0, random.Random(3))
    for rank in range(size):
        want = torch.cat([b[: 2 * n][rank * n : (rank + 1) * n] for b in before])
        assert torch.equal(memory[rank][1:], want)


@cases(
    "kind, most",
    [("all_reduce", 100), ("reduce_scatter_single", 50), ("send", 100), ("broadcast", 200), ("all_gather_single", 100)],
)
def test_messages_reductions_and_twice_as_many_bytes_of_copies_run_in_the_call(kind: str, most: int) -> None:
    """Of 2 ranks: the output of an all_gather is of 200 bytes."""
    group = groups_of(2)[0]

    def call(n: int) -> Submission:
        if kind == "send":
            return submission(ops.Send.of(group, _bytes(n), 1, 0), 0)
        return submission(make(kind, group, n, 0, ReduceOp.SUM, _bytes), 0)

    assert not is_large(call(most), 100)
    assert is_large(call(most + 1), 100)


def _bytes(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.uint8)


@pytest.mark.parametrize("n", [16, 64, 68])
def test_a_root_does_larger_reductions_at_once_than_all_ranks(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to ``whole_bytes``, 16 here, and four times that."""
    made: list[bool] = []
    parts = lowering.reduced_in_parts
    monkeypatch.setattr(lowering, "reduced_in_parts", lambda *args, **named: made.append(True) or parts(*args, **named))
    tensors = [torch.full((n // 4,), float(rank)) for rank in range(2)]
    run([ops.Reduce.of(group, tensors[group.rank], 0, ReduceOp.SUM) for group in groups_of(2)], whole=16)
    assert bool(made) == (n > 64)
    assert torch.equal(tensors[0], torch.ones(n // 4))
    made.clear()
    run([ops.AllReduce.of(group, tensors[group.rank], ReduceOp.SUM) for group in groups_of(2)], whole=16)
    assert bool(made) == (n > 16)


def run(calls: list[Call], *, chunk: int = 1024, whole: int = 512, seed: int = 4) -> list[Board]:
    world = executors(len(calls), chunk)
    interleave(world, [[submission(call, 0)] for call in calls], whole, random.Random(seed))
    return world


def groups_of(size: int) -> list[CommInfo]:
    return [CommInfo("t", rank, size, torch.device("cpu")) for rank in range(size)]


@cases(
    "n, dtype, several",
    product([3, 3000], [torch.float32, torch.bfloat16, torch.complex64, torch.int32], [False, True]),
)
def test_out_leaves_the_input_alone(n: int, dtype: torch.dtype, several: bool) -> None:
    size = 3
    inputs = [(torch.arange(n) % 50).to(dtype) for _ in range(size)]
    outs = [torch.zeros(n, dtype=dtype) for _ in range(size)]
    calls = [ops.AllReduce.of(g, inputs[g.rank], ReduceOp.SUM, outs[g.rank]) for g in groups_of(size)]
    if several:
        shares = [(t[: n // 2], t[n // 2 :]) for t in inputs]
        places = [(t[n // 3 :], t[: n // 3]) for t in outs]
        calls = [Call(call.op, shares[r], places[r], None) for r, call in enumerate(calls)]
    run(calls)
    before = (torch.arange(n) % 50).to(dtype)
    for rank in range(size):
        assert torch.equal(inputs[rank], before)
        found = torch.cat([outs[rank][n // 3 :], outs[rank][: n // 3]]) if several else outs[rank]
        assert torch.equal(found, 3 * before)


@cases("shift, kind", product([0, 1, 700], ["all_reduce", "reduce", "all_reduce_several"]))
def test_out_that_overlaps_the_input(shift: int, kind: str) -> None:
    n, size = 3000, 2
    memory = [torch.arange(n + shift, dtype=torch.float64) for _ in range(size)]
    calls = []
    for g in groups_of(size):
        source, out = memory[g.rank][:n], memory[g.rank][shift:]
        if kind == "reduce":
            calls.append(ops.Reduce.of(g, source, 0, ReduceOp.SUM, out if g.rank == 0 else None))
            continue
        call = ops.AllReduce.of(g, source, ReduceOp.SUM, out)
        if kind == "all_reduce_several":
            call = Call(call.op, (source[:1000], source[1000:]), (out[:1500], out[1500:]), None)
        calls.append(call)
    run(calls)
    assert torch.equal(memory[0][shift:], 2.0 * torch.arange(n))
    if kind == "reduce":
        assert torch.equal(memory[1], torch.arange(n + shift, dtype=torch.float64))


@cases("chunk, form, uneven", product([64, 1024], ["own", "chunks", "shifted"], [False, True]))
def test_gathering_into_views_of_one_tensor(chunk: int, form: str, uneven: bool) -> None:
    """Along another dim than the first, in place or from elsewhere in the output."""
    size = 3
    widths = [1, 4, 2] if uneven else [2, 2, 2]
    results = [torch.full((50, sum(widths)), -1.0) for _ in range(size)]
    calls = []
    for g in groups_of(size):
        views = list(results[g.rank].split(widths, dim=1))
        mine = torch.arange(50.0 * widths[g.rank]).view(50, -1) + 1000 * g.rank
        source = mine
        if form != "own":
            source = views[g.rank] if form == "chunks" else results[g.rank].view(-1)[7 : 7 + mine.numel()].view_as(mine)
            source.copy_(mine)
        calls.append(ops.AllGather.of(g, views, source))
    run(calls, chunk=chunk)
    want = torch.cat([torch.arange(50.0 * w).view(50, -1) + 1000 * r for r, w in enumerate(widths)], dim=1)
    for result in results:
        assert torch.equal(result, want)


@cases("kind, shift", product(["all_gather", "all_gather_single", "gather", "several"], [0, 1, 700]))
def test_gathering_from_elsewhere_in_the_output(kind: str, shift: int) -> None:
    """The input lies where another rank's share will come."""
    size, n = 3, 700
    memory = [torch.full((size * n,), -1, dtype=torch.int16) for _ in range(size)]
    calls = []
    for g in groups_of(size):
        start = ((g.rank + 1) * n + shift) % (size * n - n + 1)
        source, outputs = memory[g.rank][start : start + n], list(memory[g.rank].chunk(size))
        source.copy_(torch.arange(n) + 1000 * g.rank)
        if kind == "all_gather_single":
            calls.append(ops.AllGatherSingle.of(g, memory[g.rank], source))
        elif kind == "all_gather":
            calls.append(ops.AllGather.of(g, outputs, source))
        elif kind == "gather":
            calls.append(ops.Gather.of(g, outputs if g.rank == 1 else None, source, 1))
        else:
            shares = [output.split([200, 500]) for output in outputs]
            calls.append(ops.AllGather.of_several(g, shares, source.split([200, 500])))
    run(calls)
    want = torch.cat([torch.arange(n) + 1000 * rank for rank in range(size)])
    for rank in [1] if kind == "gather" else range(size):
        assert torch.equal(memory[rank].long(), want)


@cases("start", [0, 5, 700, 1400])
def test_scattering_into_the_input(start: int) -> None:
    size, n = 3, 700
    memory = torch.arange(size * n, dtype=torch.int16)
    outputs = [torch.zeros(n, dtype=torch.int16) if rank != 1 else memory[start : start + n] for rank in range(size)]
    run(
        [
            ops.Scatter.of(g, outputs[g.rank], list(memory.chunk(size)) if g.rank == 1 else None, 1)
            for g in groups_of(size)
        ]
    )
    for rank, output in enumerate(outputs):
        assert torch.equal(output, torch.arange(rank * n, (rank + 1) * n, dtype=torch.int16))


@cases(
    "place, dtype, uneven",
    product(["own", "first", "last", "shifted"], [torch.float32, torch.float16, torch.int8], [False, True]),
)
def test_scattering_reductions_into_the_input(place: str, dtype: torch.dtype, uneven: bool) -> None:
    size = 4
    counts = [300, 0, 700, 500] if uneven else [400] * 4
    whole = torch.arange(sum(counts)) % 13
    memory = [whole.to(dtype) for _ in range(size)]
    outputs, calls = [], []
    for g in groups_of(size):
        inputs = list(memory[g.rank].split(counts))
        n, starts = counts[g.rank], [sum(counts[:r]) for r in range(size + 1)]
        start = {"own": starts[g.rank], "first": 0, "last": sum(counts) - n, "shifted": 5}[place]
        outputs.append(memory[g.rank][start : start + n])
        calls.append(ops.ReduceScatter.of(g, outputs[-1], inputs, ReduceOp.AVG))
    run(calls)
    for output, want in zip(outputs, whole.split(counts), strict=True):
        assert torch.equal(output, want.to(dtype))


@cases("chunk, form", product([64, 1024], ["in place", "crossed", "shifted"]))
def test_all_to_all_over_its_inputs(chunk: int, form: str) -> None:
    size, n = 3, 300
    memory = [torch.arange(n * size + 1) + 10_000 * rank for rank in range(size)]
    before = [m.clone() for m in memory]
    calls, outputs = [], []
    for g in groups_of(size):
        inputs = list(memory[g.rank][: n * size].chunk(size))
        places = {"in place": inputs, "crossed": inputs[::-1], "shifted": memory[g.rank][1:].chunk(size)}[form]
        outputs.append(places)
        calls.append(ops.AllToAll.of(g, list(places), inputs))
    run(calls, chunk=chunk)
    for rank in range(size):
        for source in range(size):
            assert torch.equal(outputs[rank][source], before[source][rank * n : (rank + 1) * n])


def test_several_tensors_are_moved_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are plain: no tensor is made for what is only moved or reduced through slots."""
    tensors = [[torch.full((n,), float(rank)) for n in (10, 900, 1)] for rank in range(2)]
    groups = groups_of(2)
    calls = [
        [ops.Broadcast.of_several(g, tensors[g.rank], 1) for g in groups],
        [ops.AllReduce.of_several(g, tensors[g.rank], ReduceOp.SUM) for g in groups],
    ]
    programs = [[submission(row[rank], i) for i, row in enumerate(calls)] for rank in range(2)]

    def made(*_: object, **__: object) -> None:
        raise AssertionError("made a tensor")

    world = executors(2)
    for name in ("empty", "cat", "clone", "empty_like"):
        monkeypatch.setattr(torch, name, made)
    monkeypatch.setattr(Tensor, "clone", made)
    monkeypatch.setattr(Tensor, "contiguous", made)
    interleave(world, programs, 512, random.Random(1))
    assert all(t.eq(2).all() for mine in tensors for t in mine)


@cases("sends", [0, 1, 31, 32, 33, 2000])
def test_all_to_all_takes_one_step_if_all_fits_in_a_slot(sends: int) -> None:
    size = 2  # a part of 512 bytes for each, with a header of 32
    inputs = [[torch.full((sends,), 10 * s + r, dtype=torch.uint8) for r in range(size)] for s in range(size)]
    outputs = [[torch.zeros(sends, dtype=torch.uint8) for _ in range(size)] for _ in range(size)]
    world = run([ops.AllToAll.of(g, outputs[g.rank], inputs[g.rank]) for g in groups_of(size)])
    assert [each.board.state.step for each in world] == [-(-(sends + 32) // 512)] * size
    for rank in range(size):
        assert all(torch.equal(outputs[rank][s], inputs[s][rank]) for s in range(size))


@cases("sent", [0, 3, 2000])
def test_all_to_all_of_sizes_that_do_not_fit(sent: int) -> None:
    groups = groups_of(3)
    counts = {(s, r): 5 for s in range(3) for r in range(3)}
    calls = []
    for g in groups:
        outputs = [torch.zeros(counts[s, g.rank]) for s in range(3)]
        inputs = [torch.zeros(sent if (g.rank, r) == (0, 2) else counts[g.rank, r]) for r in range(3)]
        calls.append(ops.AllToAll.of(g, outputs, inputs))
    with pytest.raises(CollectiveMismatchError) as caught:
        interleave(executors(3), [[submission(call, 7)] for call in calls], 0, random.Random(1))
    error = caught.value
    assert (error.seq, error.rank, error.other_rank) == (7, 2, 0)
    assert error.op == str(calls[2].op)
    assert error.other_op == f"all_to_all(float32, sends {sent} elements to rank 2)"


def _mismatch(mine: Callable[[CommInfo], Call], theirs: Callable[[CommInfo], Call]) -> CollectiveMismatchError:
    groups = [CommInfo("t", rank, 2, torch.device("cpu")) for rank in range(2)]
    programs: list[list[Submission]] = [[submission(mine(groups[0]), 7)], [submission(theirs(groups[1]), 7)]]
    with pytest.raises(CollectiveMismatchError) as caught:
        interleave(executors(2), programs, 1024, random.Random(0))
    return caught.value


@cases(
    "mine, theirs, words",
    [
        (
            lambda g: ops.AllReduce.of(g, torch.ones(2), ReduceOp.SUM),
            lambda g: ops.AllReduce.of(g, torch.ones(3), ReduceOp.SUM),
            ["all_reduce(float32[2], SUM)", "all_reduce(float32[3], SUM)"],
        ),
        (
            lambda g: ops.AllReduce.of(g, torch.ones(2000), ReduceOp.MAX),
            lambda g: ops.Barrier.of(g),
            ["all_reduce(float32[2000], MAX)", "barrier()"],
        ),
        (
            lambda g: ops.Gather.of(g, None, torch.ones(2), 0),
            lambda g: ops.Reduce.of(g, torch.ones(2, dtype=torch.int64), 0, ReduceOp.SUM),
            ["gather(float32[2], root=0)", "reduce(int64[2], root=0, SUM)"],
        ),
        (
            lambda g: ops.AllToAll.of(g, [torch.ones(g.rank)] * 2, [torch.ones(g.rank)] * 2),
            lambda g: ops.AllToAll.of(g, [torch.ones(0).long()] * 2, [torch.ones(0).long()] * 2),
            [
                ("all_to_all(float32, sends [0, 0], receives [0, 0])", "all_to_all(float32)"),
                ("all_to_all(int64, sends [0, 0], receives [0, 0])", "all_to_all(int64)"),
            ],
        ),
        (
            lambda g: ops.AllReduce.of_several(g, [torch.ones(2), torch.ones(3)], ReduceOp.SUM),
            lambda g: ops.AllReduce.of_several(g, [torch.ones(3), torch.ones(2)], ReduceOp.SUM),
            [
                (
                    "all_reduce(float32[5] in pieces, SUM)",
                    "all_reduce(float32[5] in pieces, SUM), of other sizes or dtypes",
                )
            ]
            * 2,
        ),
        (
            lambda g: ops.Broadcast.of_several(g, [torch.ones(2), torch.ones(2)], 0),
            lambda g: ops.Broadcast.of_several(g, [torch.ones(4)], 0),
            [
                (
                    "broadcast(float32[4] in pieces, root=0)",
                    "broadcast(float32[4] in pieces, root=0), of other sizes or dtypes",
                )
            ]
            * 2,
        ),
        (
            lambda g: ops.AllGather.of(g, [torch.ones(2), torch.ones(9)], torch.ones(2)),
            lambda g: ops.AllGather.of(g, [torch.ones(3), torch.ones(9)], torch.ones(9)),
            [
                ("all_gather(float32[2, 9])", "all_gather(float32[9] in pieces), of other sizes or dtypes"),
                ("all_gather(float32[3, 9])", "all_gather(float32[9] in pieces), of other sizes or dtypes"),
            ],
        ),
        (
            lambda g: ops.ReduceScatter.of(g, torch.ones(2), [torch.ones(2), torch.ones(9)], ReduceOp.SUM),
            lambda g: ops.ReduceScatter.of(g, torch.ones(8), [torch.ones(9), torch.ones(8)], ReduceOp.SUM),
            [
                (
                    f"reduce_scatter(float32[{n}], SUM)",
                    "reduce_scatter(float32[9] in pieces, SUM), of other sizes or dtypes",
                )
                for n in ("2, 9", "9, 8")
            ],
        ),
        (
            lambda g: Call(ops.Parcels("gather_object", taker=0), (), (), None, parcels=(Parcel(b"", ()),)),
            lambda g: Call(ops.Parcels("scatter_object", False, giver=0), (), (), None),
            ["gather_object(root=0)", "scatter_object(root=0)"],
        ),
    ],
)
def test_a_differing_operation_is_named_not_mixed_up(mine: Any, theirs: Any, words: list[Any]) -> None:
    """``words``: each rank's, as it says itself and as the other sees it where that differs."""
    error = _mismatch(mine, theirs)
    assert error.seq == 7
    own, seen = zip(*[(text, text) if isinstance(text, str) else text for text in words], strict=True)
    assert (error.op, error.other_op) == (own[error.rank], seen[error.other_rank])
    assert {error.rank, error.other_rank} == {0, 1}


def test_a_root_runs_ahead_as_far_as_there_are_banks() -> None:
    world = executors(2, banks=4)
    groups = [CommInfo("t", rank, 2, torch.device("cpu")) for rank in range(2)]
    for i in range(4):
        tensor = torch.full((5,), float(i))
        assert list(start(world[0], submission(ops.Broadcast.of(groups[0], tensor, 0), i), 0)) == []
        tensor.fill_(-1)  # done, so it is the caller's again
    fifth = start(world[0], submission(ops.Broadcast.of(groups[0], torch.full((5,), 4.0), 0), 4), 0)
    assert next(fifth) is False
    for i in range(4):
        received = torch.zeros(5)
        assert list(start(world[1], submission(ops.Broadcast.of(groups[1], received, 0), i), 0)) == []
        assert received.tolist() == [i] * 5
    assert list(fifth) == []
