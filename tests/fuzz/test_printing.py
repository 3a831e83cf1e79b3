"""Programs as tests: the code does what the program says, and asserts what the oracle says."""

from __future__ import annotations

import ast
import asyncio
from typing import Any

import pytest

from tests.sampling import amount

from .generate import PROFILES, Features, generate
from .oracle import expect
from .printing import printed
from .program import Arena, Program, Step, View
from .reference import EXACT


@pytest.mark.parametrize("backend", ["loopback", "nccl", "shm", "gloo"])
@pytest.mark.parametrize("profile", PROFILES)
def test_what_is_printed_is_code(profile: str, backend: str) -> None:
    for seed in range(amount(25, 8)):
        program = generate(profile, 2, seed, Features(big=0.0))
        tree = ast.parse(printed(program, backend))
        assert any(isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_") for node in tree.body)


def run(source: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(source, "printed", "exec"), names)
    test = next(value for name, value in names.items() if name.startswith("test_"))
    asyncio.run(test())


def test_what_is_printed_passes_where_the_program_does() -> None:
    done, count = 0, amount(60, 20)
    for seed in range(count):
        program = generate("everything", 2, seed, Features(ops=SIMPLE, big=0.02))
        expectation = expect(program)
        vague = [written for written in expectation.written if written.value.margin is not None]
        if all((written.value.margin.kind == EXACT).all() for written in vague if written.value.margin):
            run(printed(program, "loopback"))
            done += 1
    assert done > count // 2


SIMPLE = ("all_reduce", "all_gather_single", "broadcast", "scatter", "gather", "all_to_all_single", "messages", "batch")


def test_a_wrong_expectation_fails() -> None:
    view = View(0, 0, (4,), (1,), "float32")
    step = Step("all_reduce", (0, 1), {"op": "SUM"}, ({"tensor": view},) * 2)
    source = printed(Program(((Arena("float32", 4),),) * 2, (step,)), "loopback")
    run(source)
    assert "[5.0, 8.0, 11.0, 7.0]" in source
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run(source.replace("[5.0, 8.0, 11.0, 7.0]", "[5.0, 8.0, 11.0, 8.0]"))


def test_ranks_that_do_the_same_share_their_lines() -> None:
    view = View(0, 0, (300_000,), (1,), "float32")
    step = Step("all_reduce", (0, 1), {"op": "SUM"}, ({"tensor": view},) * 2)
    source = printed(Program(((Arena("float32", 300_000, "constant"),),) * 2, (step,)), "shm")
    assert '@pytest.mark.ranks(2, backend="shm")' in source
    assert "repeat_interleave(torch.tensor([300000]))" in source
    assert len(source) < 2000


async def test_a_refusal_is_printed_as_one() -> None:
    folded = View(0, 0, (2,), (0,), "float32")
    step = Step("all_reduce", (0, 1), {"op": "SUM"}, ({"tensor": folded},) * 2)
    source = printed(Program(((Arena("float32", 1),),) * 2, (step,)), "loopback")
    assert "with pytest.raises(ValueError):" in source
    names: dict[str, Any] = {}
    exec(compile(source, "printed", "exec"), names)
    await names["test_all_reduce"]()
