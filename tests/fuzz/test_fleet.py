"""The processes that do programs: several ranks, one that dies, one that hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from .fleet import Fleet
from .generate import Features, generate
from .program import Arena, Program, Step, View

VIEW = View(0, 0, (4,), (1,), "float32")
ARENAS = ((Arena("float32", 4),),) * 2
RIGHT = Program(ARENAS, (Step("all_reduce", (0, 1), {"op": "SUM"}, ({"tensor": VIEW},) * 2),))
ALONE = replace(RIGHT, steps=(replace(RIGHT.steps[0], ranks=({"tensor": VIEW}, {"tensor": VIEW, "timeout": "x"})),))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet("shm", 2, timeout=5.0) as fleet:
        yield fleet


def kinds(fleet: Fleet, *programs: Program) -> list[list[str]]:
    return [[finding.kind for finding in findings] for _, findings in fleet.run(programs)]


def test_programs_are_done_in_order(fleet: Fleet) -> None:
    programs = [generate("everything", 2, seed, Features(ops=("all_reduce", "broadcast"))) for seed in range(30)]
    assert [program for program, _ in fleet.run(programs)] == programs


def test_after_a_call_that_fails_on_one_rank_the_next_program_has_a_new_world(fleet: Fleet) -> None:
    assert kinds(fleet, RIGHT, ALONE, RIGHT, RIGHT) == [[], ["raised"], [], []]


def test_a_rank_that_dies_is_a_finding_and_is_replaced(fleet: Fleet) -> None:
    assert kinds(fleet, RIGHT) == [[]]
    os.kill(fleet._processes[1].process.pid, signal.SIGABRT)
    fleet._processes[1].process.wait()
    (found,) = [findings for _, findings in fleet.run([RIGHT])]
    assert [(finding.kind, finding.detail) for finding in found] == [("crash", "SIGABRT")]
    assert kinds(fleet, RIGHT) == [[]]


def test_a_rank_that_does_not_answer_is_a_finding_and_is_replaced(fleet: Fleet) -> None:
    assert kinds(fleet, RIGHT) == [[]]
    os.kill(fleet._processes[0].process.pid, signal.SIGSTOP)
    limits, (fleet.timeout, fleet.grace) = (fleet.timeout, fleet.grace), (0.5, 0.5)
    assert kinds(fleet, RIGHT) == [["hang"]]
    fleet.timeout, fleet.grace = limits
    assert kinds(fleet, RIGHT) == [[]]
