"""The executor in C: checks of its arguments, and driving. The programs it runs: test_programs.py."""

import pytest
import torch

from asynccomm.backends.shm import executor as module
from asynccomm.backends.shm.executor import Pace, core_segment
from asynccomm.backends.shm.programs import (
    Action,
    Part,
    Program,
    Ref,
    Signal,
    Space,
    Stage,
    Wait,
    announced,
    combined,
    program,
    published,
    scattered_sums,
    steps_for,
)
from asynccomm.backends.shm.reduction import reduction_for
from asynccomm.backends.shm.vectors import scattered
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.ops.reduce_op import ReduceOp

from .test_programs import finish, run
from .world import executors

pytestmark = pytest.mark.skipif(isinstance(load_core(), CoreUnavailable), reason="the executor in C was not built")

COPY = Action(Ref(Space.SLOT, 0), (Ref(Space.VECTOR, 0),), 64, 64, 64)


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (COPY._replace(target=Ref(Space.SLOT, 0, 961)), "64 bytes at 961 do not fit in 1024"),
        (COPY._replace(target=Ref(Space.SLOT, 2)), "index must be from 0 to 1, got 2"),
        (COPY._replace(target=Ref(Space.RECORD, 0, 40)), "64 bytes at 40 do not fit in 96"),
        (COPY._replace(target=Ref(Space.SLOT, 0, 0, 1)), "do not fit"),
        (COPY._replace(sources=()), "an action of 0 sources"),
        (COPY._replace(sources=COPY.sources * 2), "an action of 2 sources"),
        (COPY._replace(sources=COPY.sources * 3, reduction=0), "an action of 3 sources"),
        (COPY._replace(total=-1), "total must be from 0"),
        (COPY._replace(target=Ref(Space.VECTOR, 0, -8)), "offset must be from 0"),
    ],
)
def test_a_program_that_leaves_the_segment_is_refused(action: Action, error: str) -> None:
    made = program(1, Part((action,), (), ()))
    with pytest.raises(ValueError, match=error):
        executors(2, kind="core")[0].compiled("any", lambda: made)


def test_announced_sizes_need_a_position_and_a_size_for_each_rank() -> None:
    (executor,) = executors(1, kind="core")
    segment, board = executor.segment, executor.board
    assert segment is not None
    with pytest.raises(TypeError, match="position must be a RankPosition, got 3"):
        segment.follow(3)  # type: ignore[arg-type]
    made = announced(0, (8,), (8,), 64)
    for sizes, error in (((8,), (-1,), 64), "bytes must be from 0"), (((8,), (8,), 4096), "room must be from 1"):
        with pytest.raises(ValueError, match=error):
            segment.program(made.steps, made.stages, None, sizes)
    with pytest.raises(IndexError):
        segment.program(made.steps, made.stages, None, ((), (8,), 64))
    bare = core_segment(load_core(), board.layout, 0, memoryview(bytearray(board.layout.total)), [(-1, -1)])
    with pytest.raises(RuntimeError, match="the segment follows no position"):
        bare.program(*made)


def test_what_a_run_lacks_is_named() -> None:
    (executor,) = executors(1, kind="core")
    made = program(1, combined(0, 1, 64, takes=True))
    with pytest.raises(ValueError, match="needs 2 vectors and 1 reductions"):
        next(run(executor, made, [torch.zeros(16)], [reduction_for(torch.float32, ReduceOp.SUM, 1)]))
    target = scattered([torch.zeros(8), torch.zeros(8)])
    with pytest.raises(ValueError, match="vector 1 is in pieces and cannot be the target"):
        next(run(executor, made, [torch.zeros(16), target], [reduction_for(torch.float32, ReduceOp.SUM, 1)]))
    numbers = torch.zeros(80, dtype=torch.uint8)
    uneven = scattered([numbers[:30], numbers[40:74]])
    parts = program(1, scattered_sums(0, [64], 64, direct=True))
    with pytest.raises(ValueError, match="vector 0 is in pieces that have no whole elements"):
        next(run(executor, parts, [uneven, torch.zeros(16)], [reduction_for(torch.float32, ReduceOp.SUM, 1)]))


def test_a_run_is_driven_until_it_waits() -> None:
    mine, theirs = executors(2, chunk=128, kind="core")
    sent, got = torch.arange(1000) % 100, torch.zeros(1000, dtype=torch.int64)
    steps = steps_for(sent.nbytes, 128)
    giving = run(mine, program(steps, published(0, sent.nbytes, [], 128)), [sent])
    taking = run(theirs, program(steps, published(1, None, [(0, sent.nbytes)], 128)), [got])
    assert next(giving)
    assert next(taking)
    while not torch.equal(sent, got):
        mine.drive(Pace(0.0, 1.0))
        theirs.drive(Pace(0.0, 1.0))
    finish(giving, taking)
    assert mine.running is theirs.running is None


def test_an_interrupted_run_can_go_on() -> None:
    (executor,) = executors(1, chunk=128, kind="core")
    sent, got = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    running = run(executor, program(7, published(0, 800, [(0, 800)], 128)), [sent, got])
    assert next(running)
    executor.interrupt()
    executor.drive(Pace(1e9, 1.0))  # at most one pass
    assert not got[-1]
    executor.resume()
    executor.drive(Pace(1e9, 1.0))
    assert torch.equal(sent, got)
    finish(running)


def test_stages_and_flags_are_numbered_alike() -> None:
    """The numbers of the enumerations are those of _core.c."""
    made = Program(1, (Stage(Wait.NOTHING, (), (), Signal.RESULT), Stage(Wait.REDUCED, (0, 1), (), Signal.FINISH)))
    mine, theirs = executors(2, kind="mixed")
    first = run(mine, made, ())
    assert [next(first), next(first)] == [False, False]
    finish(first, run(theirs, made, ()))


def test_programs_are_compiled_once_and_a_bounded_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PROGRAMS", 3)
    (executor,) = executors(1, kind="core")
    built: list[int] = []

    def build(n: int) -> Program:
        built.append(n)
        return program(1, published(0, n, [], 1024))

    for n in (1, 2, 1, 3, 1, 4, 1):
        assert executor.compiled(n, lambda n=n: build(n)).program.steps == 1
    assert built == [1, 2, 3, 4, 1]
    assert len(executor._programs) <= 3
