"""A bug that is put in is found, shrunk to what matters, and printed as a test that only passes without it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asynccomm.backends import arithmetic
from asynccomm.ops.reduce_op import ReduceOp

from .generate import Features, generate
from .judging import Finding
from .printing import printed
from .program import Arena, Program, Step, View
from .shrink import shrink, trimmed, without_rank
from .worlds import perform_all, worlds

RIGHT = arithmetic.combine


def wrong_from_the_fourth(rows: torch.Tensor, reduction: ReduceOp, *, bools: bool = False) -> torch.Tensor:
    result = RIGHT(rows, reduction, bools=bools)
    if len(result) > 3 and not bools:
        result[3] += 1
    return result


def findings_of(program: Program) -> list[Finding]:
    async def run() -> list[Finding]:
        async with worlds("loopback", program.size) as comms:
            return (await perform_all(program, comms))[0]

    return asyncio.run(run())


def fails(program: Program) -> bool:
    return any(finding.kind in ("wrong", "result") for finding in findings_of(program))


@pytest.fixture
def buggy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "combine", wrong_from_the_fourth)


def found_and_shrunk() -> Program:
    features = Features(ops=("all_reduce", "all_gather", "broadcast", "messages"), groups=False)
    programs = (generate("everything", 3, seed, features) for seed in range(200))
    return shrink(next(program for program in programs if fails(program)), fails, 20)


def test_a_bug_is_found_and_shrunk_to_what_matters(buggy: None) -> None:
    program = found_and_shrunk()
    assert fails(program)
    assert [step.op for step in program.steps] == ["all_reduce"]
    assert program.size == 1
    step = program.steps[0]
    assert (step.issue, step.scope, step.common["op"]) == ("await", 0, "SUM")
    view = step.ranks[0]["tensor"]
    assert view == View(0, 0, (4,), (1,), "float32")
    assert program.arenas == ((Arena("float32", 4, "constant"),),)


def run(source: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(source, "printed", "exec"), names)
    asyncio.run(names["test_all_reduce"]())


def test_the_printed_test_fails_with_the_bug_and_passes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "combine", wrong_from_the_fourth)
    program = found_and_shrunk()
    source = printed(program, "loopback", findings_of(program))
    with pytest.raises(AssertionError):
        run(source)
    monkeypatch.setattr(arithmetic, "combine", RIGHT)
    run(source)


def test_memory_that_nothing_uses_is_left_out() -> None:
    view = View(1, 0, (3,), (1,), "float32")
    step = Step("all_reduce", (0,), {"op": "SUM"}, ({"tensor": view},))
    arenas = ((Arena("int32", 9), Arena("float32", 9)),)
    program = trimmed(Program(arenas, (step,)))
    assert program.arenas == ((Arena("float32", 3),),)
    assert program.steps[0].ranks[0]["tensor"].arena == 0


def test_a_rank_is_taken_out_of_lists_sizes_and_roots() -> None:
    views = [View(0, i, (1,), (1,), "float32") for i in range(3)]
    lists = Step("gather", (0, 1, 2), {"root": 2}, ({"output_list": None}, {}, {"output_list": views}))
    without = without_rank(lists, 1)
    assert without is not None
    assert (without.group, without.common) == ((0, 1), {"root": 1})
    assert without.ranks == ({"output_list": None}, {"output_list": [views[0], views[2]]})
    whole = View(0, 0, (6, 2), (2, 1), "float32")
    sized = Step("all_gather_v", (0, 1, 2), {"sizes": [1, 2, 3], "dim": 0}, ({"output": whole},) * 3)
    smaller = without_rank(sized, 2)
    assert smaller is not None
    assert smaller.common["sizes"] == [1, 2]
    assert smaller.ranks[0]["output"].shape == (3, 2)
    assert without_rank(Step("barrier", (1,)), 1) is None
