"""Single copy: tensors that ranks read directly from the memory of another process, by ``process_vm_readv``."""

import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm import Comm, new_comm, ops
from asynccomm.backends.shm import lowering, single_copy
from asynccomm.backends.shm.executor import Executor
from asynccomm.backends.shm.layout import RecordWord, Word
from asynccomm.backends.shm.lowering import start
from asynccomm.backends.shm.programs import Action, Lending, Program, Ref, Signal, Space, Stage, Wait
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.errors import BackendError
from asynccomm.ops import AllGather, AllReduce, AllToAll, AllToAllSingle, Broadcast, Reduce
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo
from tests.sampling import examples

from .test_lending import random_calls
from .test_lowering import run_both
from .world import executors, interleave, submission

pytestmark = pytest.mark.skipif(isinstance(load_core(), CoreUnavailable), reason="the executor in C was not built")

needs_reading = pytest.mark.skipif(
    bool(why := single_copy.refusal()), reason=f"processes may not read each other's memory: {why}"
)

KINDS = ["all_gather", "all_gather_single", "all_to_all", "all_to_all_single", "broadcast"]
KINDS += ["all_reduce", "all_reduce_out", "reduce_scatter_single"]
EVER = range(1 << 40)
"""Sizes of tensors that are lent: any."""


@pytest.fixture
def any_size() -> Iterator[None]:
    """Tensors of any size are lent."""
    with pytest.MonkeyPatch.context() as patch:
        lend_any(patch)
        yield


def lend_any(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lowering, "LENT_BYTES", 0)
    for name in ("_GATHERED", "_REDUCED", "_EXCHANGED", "_EXCHANGED_ON_SHARED_CORES"):
        patch.setattr(lowering, name, EVER)


@given(
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([1, 2, 3, 5]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
)
@examples(100)
def test_any_sequence_in_any_interleaving(seed: int, size: int, kinds: list[str]) -> None:
    choose = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.backends.shm.world._kind", "single copy")
        lend_any(patch)
        run_both(random_calls(kinds, size, choose), size, chunk=1024, whole=64, choose=choose)


def test_ranks_that_run_at_once(any_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.backends.shm.world._kind", "single copy")
    for seed in range(6):
        choose = random.Random(seed)
        size = choose.choice([2, 3])
        run_both(random_calls(choose.sample(KINDS, 8), size, choose), size, chunk=1024, whole=0, choose=None)


def groups(size: int) -> list[CommInfo]:
    return [CommInfo("t", rank, size, torch.device("cpu")) for rank in range(size)]


def gathering(world: list[Executor], n: int = 100) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """The inputs, outputs and generators of an all_gather_single of as many ranks as executors."""
    size = len(world)
    inputs = [torch.arange(n) + 1000 * rank for rank in range(size)]
    outputs = [torch.full((size * n,), -1) for _ in range(size)]
    calls = [ops.AllGatherSingle.of(g, outputs[g.rank], inputs[g.rank]) for g in groups(size)]
    return inputs, outputs, [start(each, submission(call, 1), 0) for each, call in zip(world, calls, strict=True)]


def prepared(world: list[Executor] | None = None) -> list[Executor]:
    """Executors that know that all ranks can read each other's memory."""
    world = executors(2, kind="single copy") if world is None else world
    size = len(world)
    for _ in range(2):  # in the first one, each rank finds what it can read; in the second, that all can
        calls = [ops.AllGatherSingle.of(g, torch.zeros(size), torch.zeros(1)) for g in groups(size)]
        interleave(world, [[submission(call, 0)] for call in calls], 0, random.Random(1))
    return world


def reads(world: list[Executor]) -> list[int]:
    board = world[0].board
    return [board._words[board.layout.word(rank, Word.READS)] for rank in range(board.size)]


def finish(generators: list[Any]) -> None:
    for _ in range(1000):
        if not [each for each in generators if next(each, None) is not None]:
            return
    raise AssertionError("stuck")


def test_nothing_is_copied_to_a_slot_and_the_owner_waits_for_its_readers(any_size: None) -> None:
    world = prepared()
    inputs, outputs, generators = gathering(world)
    first = world[0].board.state.step
    assert [next(generators[0]) for _ in range(3)][-1] is False
    assert not world[0].board.elements(1, torch.int64, first, 0, 0, 800).any()
    finish(generators)
    assert all(torch.equal(output, torch.cat(inputs)) for output in outputs)
    assert reads(world) == [1, 1]


@pytest.mark.parametrize("n", [30, 3000])
@pytest.mark.parametrize("first", [0, 1])
def test_in_place(any_size: None, n: int, first: int) -> None:
    """Of each operation, one rank goes on as far as it can before the other one reads."""
    world = prepared()
    gathered = [torch.full((2 * n,), -1.0) for _ in range(2)]
    swapped, listed = ([torch.arange(2.0 * n) + 10_000 * rank for rank in range(2)] for _ in range(2))
    for rank in range(2):
        gathered[rank][rank * n : (rank + 1) * n] = torch.arange(n) + 10_000.0 * rank
    pairs = [list(tensor.chunk(2)) for tensor in listed]
    calls = [
        [ops.AllGatherSingle.of(g, gathered[g.rank], gathered[g.rank].chunk(2)[g.rank]) for g in groups(2)],
        [ops.AllToAllSingle.of(g, swapped[g.rank], swapped[g.rank]) for g in groups(2)],
        [ops.AllToAll.of(g, pairs[g.rank], pairs[g.rank]) for g in groups(2)],
    ]
    for seq, row in enumerate(calls):
        running = [start(each, submission(call, seq), 0) for each, call in zip(world, row, strict=True)]
        for turn in (running[first], running[1 - first]) * 3:
            for _ in range(5):
                next(turn, None)
        finish(running)
    for rank, mine in enumerate((slice(0, n), slice(n, 2 * n))):
        whole = torch.arange(2.0 * n)
        assert torch.equal(gathered[rank], torch.cat([whole[:n], whole[:n] + 10_000]))
        for exchanged in (swapped[rank], listed[rank]):
            assert torch.equal(exchanged, torch.cat([whole[mine], whole[mine] + 10_000]))


@pytest.mark.parametrize("word", [Word.SECRET, Word.PROCESS, Word.SECRET_AT])
def test_a_rank_whose_memory_cannot_be_read_is_not_read(any_size: None, word: Word) -> None:
    world = executors(2, kind="single copy")
    board = world[0].board
    at = board.layout.word(1, word)
    # no process has the greatest number: the next one may be a child, which has the same memory
    board._words[at] = {Word.SECRET_AT: 1, Word.PROCESS: (1 << 31) - 1, Word.SECRET: board._words[at] + 1}[word]
    for _ in range(3):
        inputs, outputs, generators = gathering(world)
        finish(generators)
        assert all(torch.equal(output, torch.cat(inputs)) for output in outputs)
        assert board.lent(0, board.state.step - 1)[0].nbytes == 0
    assert reads(world)[0] == 2


def test_an_address_that_cannot_be_read_fails_the_reader(any_size: None) -> None:
    world = prepared()
    _, _, generators = gathering(world)
    next(generators[0])
    board = world[0].board
    board._words[board.layout.record((board.state.step - 1) % 4, 0) + RecordWord.INLINE + 2] = 64
    with pytest.raises(BackendError, match=r"the tensor that rank 0 lends for all_gather_single.* cannot be read"):
        finish(generators[1:])


def test_memory_that_the_kernel_does_not_copy_is_not_lent(any_size: None) -> None:
    """As that of some devices."""
    fd = ctypes.CDLL(None).syscall(447, 0)  # memfd_secret
    if fd < 0:
        pytest.skip("the kernel has no memory of this kind")
    os.ftruncate(fd, mmap.PAGESIZE)
    memory = mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    world = prepared()
    secret = torch.frombuffer(memory, dtype=torch.int64, count=100).copy_(torch.arange(100))
    outputs, ordinary = [torch.zeros(200, dtype=torch.int64) for _ in range(4)], torch.arange(100) + 1000
    calls = [
        [ops.AllGatherSingle.of(g, outputs[g.rank], (secret, ordinary)[g.rank]) for g in groups(2)],
        [ops.AllToAll.of(g, list(outputs[2 + g.rank].chunk(2)), [(secret, ordinary)[g.rank]] * 2) for g in groups(2)],
    ]
    for seq, row in enumerate(calls):
        finish([start(each, submission(call, seq), 0) for each, call in zip(world, row, strict=True)])
    assert all(torch.equal(output, torch.cat([secret, ordinary])) for output in outputs)


def test_an_address_that_a_peer_claims_is_not_read_in_this_process(any_size: None) -> None:
    world = prepared()
    calls = [ops.ReduceScatterSingle.of(g, torch.zeros(100), torch.ones(200), ReduceOp.SUM) for g in groups(2)]
    generators = [start(each, submission(call, 1), 0) for each, call in zip(world, calls, strict=True)]
    next(generators[0])
    board = world[0].board
    record = board.layout.record((board.state.step - 1) % 4, 0) + RecordWord.INLINE
    board._words[record], board._words[record + 1], board._words[record + 2] = (1 << 63) - 1, 1, 64
    with pytest.raises(BackendError, match=r"the tensor that rank 0 lends for reduce_scatter_single.* cannot be read"):
        finish(generators[1:])


@pytest.mark.parametrize("out", [True, False])
def test_reductions_run_ahead_before_results_are_read(any_size: None, out: bool) -> None:
    """Of more steps than there are banks, and with results whose owners write what others still read."""
    world = prepared()
    n = 3000
    sources = [torch.arange(float(n)) + rank for rank in range(2)]
    outputs = [torch.full((n,), -1.0) for _ in range(2)] if out else sources
    want = sources[0] + sources[1]
    calls = [ops.AllReduce.of(g, sources[g.rank], ReduceOp.SUM, *([outputs[g.rank]] if out else ())) for g in groups(2)]
    generators = [start(each, submission(call, 1), 0) for each, call in zip(world, calls, strict=True)]
    while next(generators[0]) or next(generators[1]):
        if (outputs[1][:64] == want[:64]).all():
            break
    board = world[0].board
    assert board._words[board.layout.word(1, Word.REDUCED)] == board.state.step, "all parts of the result come first"
    finish(generators)
    assert all(torch.equal(output, want) for output in outputs)
    for rank in range(2):
        assert not board.elements(Space.SLOT, torch.float32, board.state.step - 1, rank, 0, 1024).any(), (
            "a slot was filled"
        )


def test_a_rank_that_lends_its_result_alone(any_size: None) -> None:
    """It fills slots, so the others may not wait until all of the result is there."""
    fd = ctypes.CDLL(None).syscall(447, 0)  # memfd_secret
    if fd < 0:
        pytest.skip("the kernel has no memory that cannot be lent")
    n = 3000
    os.ftruncate(fd, 4 * n)
    memory = mmap.mmap(fd, 4 * n)
    os.close(fd)
    world = prepared()
    sources = [torch.frombuffer(memory, dtype=torch.float32).copy_(torch.arange(n)), torch.arange(float(n))]
    outputs = [torch.empty(n) for _ in range(2)]
    for rank in range(2):  # the secret is on each rank once
        swapped = sources if rank == 0 else sources[::-1]
        calls = [ops.AllReduce.of(g, swapped[g.rank], ReduceOp.SUM, outputs[g.rank]) for g in groups(2)]
        finish([start(each, submission(call, rank), 0) for each, call in zip(world, calls, strict=True)])
        assert all(torch.equal(output, 2 * torch.arange(float(n))) for output in outputs)


def test_reductions_that_do_not_fit_are_refused() -> None:
    """The executor has room for copies of one chunk."""
    (each, _) = executors(2, kind="single copy")
    assert each.segment is not None
    source, slot = Ref(Space.VECTOR, 0), Ref(Space.SLOT, 1, 0, 0, 0, 1024)
    reduce = Action(Ref(Space.VECTOR, 1), (source, slot), 1024, 1024, 1024, 0)
    stages = (Stage(Wait.POSTED, (1,), (reduce,), Signal.FINISH),)
    each.segment.program(*Program(1, stages, Lending(0)))
    with pytest.raises(ValueError, match="sources of a reduction fit in a chunk"):
        each.segment.program(*Program(1, stages, Lending(0, single_copy=True)))


def test_the_memory_of_a_process_that_has_ended_is_not_read(any_size: None) -> None:
    """The collective waits until the engine finds the loss."""
    world = executors(2, kind="single copy")
    board = world[0].board
    if not (process := os.fork()):
        signal.pause()
    try:
        board._words[board.layout.word(1, Word.PROCESS)] = process  # whose memory has the random number, too
        prepared(world)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    _, outputs, generators = gathering(world)
    next(generators[1])
    assert [next(generators[0]) for _ in range(4)][2:] == [False, False]
    assert outputs[0][100:].eq(-1).all()


def test_data_read_after_the_end_of_a_process_are_not_used(any_size: None) -> None:
    """Another process may have its number by then."""
    there, here = os.pipe()
    world = prepared(executors(2, kind="single copy", liveness=there))
    _, _, generators = gathering(world)
    next(generators[0])
    os.close(here)
    assert [next(generators[1]) for _ in range(4)][2:] == [False, False]
    os.close(there)


def test_a_withdrawn_tensor_fails_its_reader(any_size: None) -> None:
    world = prepared()
    _, _, generators = gathering(world)
    for _ in range(3):
        next(generators[0])
    board = world[0].board
    board._words[board.layout.word(0, Word.WITHDRAWN)] = 1
    with pytest.raises(BackendError, match=r"an operation has failed on rank 0 while .* read the rank's tensor"):
        finish(generators)


@pytest.mark.parametrize(
    ("kind", "nbytes", "ranks", "lends"),
    [
        (AllGather, 128 << 10, 2, True),
        (AllGather, (128 << 10) - 1, 2, False),
        (AllGather, 16 << 20, 2, False),
        (AllGather, 1 << 20, 3, False),
        (AllToAllSingle, 1 << 20, 2, True),
        (AllToAllSingle, 1 << 20, 3, False),
        (AllToAll, 4 << 20, 3, True),
        (AllReduce, 2 << 20, 2, True),
        (AllReduce, (2 << 20) - 1, 2, False),
        (AllReduce, 64 << 20, 2, False),
        (AllReduce, 4 << 20, 3, False),
        (Reduce, 4 << 20, 2, False),
        (Broadcast, 1 << 20, 2, False),
    ],
)
def test_the_collectives_that_gain(
    kind: Any, nbytes: int, ranks: int, lends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "cores", lambda: 2)
    assert lowering._single_copy(ranks, kind, nbytes) == lends


# -- processes --------------------------------------------------------------------------------------------------------


def lent(comm: Comm) -> bool:
    """Whether this rank has lent a tensor in its own memory in one of its last collectives."""
    engine: Any = comm.unsafe_get_backend()._engine  # type: ignore[attr-defined]
    board = engine._board
    return any(tensor.start == (1 << 63) - 1 for bank in range(4) for tensor in board.lent(comm.rank, bank))


def many_cores(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lowering, "cores", lambda: 64)


@needs_reading
@pytest.mark.ranks(3)
@pytest.mark.parametrize("hint", ["1", "0"])
async def test_the_same_results_with_it_and_without(monkeypatch: pytest.MonkeyPatch, hint: str) -> None:
    many_cores(monkeypatch)
    async with new_comm("shm", timeout=30, hints={"single_copy": hint}) as comm:
        rank, size, n = comm.rank, comm.size, 150_000
        sources = [torch.arange(n, dtype=torch.float32) + each for each in range(size)]
        ever = False
        for _ in range(4):
            gathered = await comm.all_gather_single(torch.empty(size * n), sources[rank])
            ever |= lent(comm)
            assert torch.equal(gathered, torch.cat(sources))
            parts = await comm.all_gather([torch.empty(n) for _ in range(size)], sources[rank])
            assert all(torch.equal(part, source) for part, source in zip(parts, sources, strict=True))
            swapped = await comm.all_to_all_single(torch.empty(n), sources[rank])
            mine = slice(rank * n // size, (rank + 1) * n // size)
            assert torch.equal(swapped, torch.cat([source[mine] for source in sources]))
            sizes = [n - 7 * other for other in range(size)]  # of the data for each rank
            pieces = await comm.all_to_all(
                [torch.empty(sizes[rank]) for _ in range(size)], [sources[rank][:count] for count in sizes]
            )
            assert all(torch.equal(piece, source[: sizes[rank]]) for piece, source in zip(pieces, sources, strict=True))
        assert ever == (hint == "1")


@needs_reading
@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
async def test_reductions_have_the_same_bits_with_it_and_without(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    many_cores(monkeypatch)
    n = (3 << 20) // dtype.itemsize + 5
    mine = torch.randint(-100, 100, (n,), generator=torch.Generator().manual_seed(int(os.environ["RANK"]))).to(dtype)
    results = []
    for hint in ("1", "0"):
        async with new_comm("shm", timeout=30, hints={"single_copy": hint}, name=f"hint {hint}") as comm:
            for _ in range(3):
                inplace = await comm.all_reduce(mine.clone())
                results += [inplace, await comm.all_reduce(mine, out=torch.empty_like(mine))]
            assert lent(comm) == (hint == "1")
    assert all(torch.equal(each, results[0]) for each in results)


@needs_reading
@pytest.mark.ranks(2)
@pytest.mark.parametrize("shared", ["input", "output"])
async def test_one_tensor_of_a_reduction_may_be_in_shared_memory(monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    many_cores(monkeypatch)
    async with new_comm("shm", timeout=30) as comm:
        n = 1 << 20
        source, target = (
            comm.empty(n) if shared == name and comm.rank == 1 else torch.empty(n) for name in ("input", "output")
        )
        for round in range(4):
            source.fill_(comm.rank + round)
            await comm.all_reduce(source, out=target)
            assert target.eq(2 * round + 1).all()
        assert lent(comm)


@needs_reading
@pytest.mark.ranks(2)
async def test_the_tensor_may_change_as_soon_as_its_operation_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    many_cores(monkeypatch)
    async with new_comm("shm", timeout=30) as comm:
        source, gathered = torch.empty(200_000), torch.empty(400_000)
        for round in range(50):
            source.fill_(2 * round + comm.rank)
            await comm.all_gather_single(gathered, source)
            source.fill_(-1)
            assert gathered[:200_000].eq(2 * round).all()
            assert gathered[200_000:].eq(2 * round + 1).all()
        assert lent(comm)


@pytest.mark.ranks(2)
async def test_bad_values_of_the_hint() -> None:
    with pytest.raises(ValueError, match="hint 'single_copy' must be an integer from 0 to 1, got '2'"):
        await new_comm("shm", timeout=30, hints={"single_copy": "2"})


# -- whether it is possible -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "scope", "reason"),
    [
        (f"{single_copy._NUMBER} Success", "1", ""),
        ("0 Operation not permitted", "1", "Operation not permitted; {} is 1"),
        ("0 Operation not permitted", "0", "Operation not permitted"),
        ("0 Function not implemented", None, "Function not implemented"),
    ],
)
def test_the_reason_why_it_is_not(
    printed: str, scope: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if scope is not None:
        (tmp_path / "scope").write_text(scope + "\n")
    monkeypatch.setattr(single_copy, "YAMA", tmp_path / "scope")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=printed + "\n"))
    assert single_copy.refusal() == reason.format(tmp_path / "scope")


def test_no_process_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert single_copy.refusal().startswith("no process could try it: ")


@needs_reading
def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process really tries it."""
    monkeypatch.setattr(ctypes, "addressof", lambda _: 64)
    assert single_copy.refusal().startswith("Bad address")
