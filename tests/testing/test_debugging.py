"""The debugger of a rank on the terminal of pytest, typed to as a user does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asynccomm.testing.debugging import RankDebugger
from asynccomm.testing.protocol import DebuggerInput, DebuggerOutput, DebuggerPrompt, DebuggerStart, DebuggerStop

from .conftest import Project
from .projects import HEAD

TESTS = """
    @pytest.mark.ranks(2, timeout=1)
    @pytest.mark.timeout(5)
    async def test_fails(comm):
        await comm.barrier()
        if comm.rank == 1:
            secret = 40 + comm.rank
            raise LookupError("in one rank")
        await comm.barrier()

    @pytest.mark.ranks(1)
    async def test_stops(comm):
        value = 5
        breakpoint()
        assert value == 6

    @pytest.mark.ranks(1)
    async def test_last(comm):
        pass
"""


def test_a_failed_rank_and_a_breakpoint(tmp_path: Path) -> None:
    ini = "[pytest]\nasyncio_default_fixture_loop_scope = function\n"
    project = Project(tmp_path, {"test_it.py": HEAD + TESTS, "pytest.ini": ini})
    run = project.run("--pdb", typed="p secret * 2\nc\nvalue = 6\nc\n")
    assert "rank 1 failed: LookupError: in one rank" in run.output
    assert "(Pdb rank 1) 82\n" in run.output
    assert run.text("test_fails[2ranks]").startswith("rank 1 of 2 failed: LookupError: in one rank")
    run.text("test_stops[1ranks]", "passed")  # the value was changed
    run.text("test_last[1ranks]", "passed")
    assert "rank 0 stopped" in run.output
    assert run.output.count("(Pdb") == 4, "pytest's own debugger stays out of it"
    run = project.run("--pdb", typed="q\n")
    assert "Quitting debugger" in run.output
    assert set(run.outcomes()) == {"test_it.py::test_fails[2ranks]"} or not run.outcomes()
    assert run.childless


@pytest.fixture
def debugger(monkeypatch: pytest.MonkeyPatch) -> tuple[RankDebugger, list[Any]]:
    import pdb
    import sys

    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    monkeypatch.setattr(pdb, "set_trace", pdb.set_trace)
    sent: list[Any] = []
    debugger = RankDebugger(sent.append)
    debugger.rank = 3
    return debugger, sent


def test_messages(debugger: tuple[RankDebugger, list[Any]]) -> None:
    rank, sent = debugger
    rank.feed(DebuggerInput("p word\n"))
    rank.feed(DebuggerInput("c\n"))
    try:
        word = "inside"
        raise LookupError(word)
    except LookupError as exc:
        rank.post_mortem(exc)
    assert sent[0] == DebuggerStart("rank 3 failed: LookupError: inside")
    assert sent[-1] == DebuggerStop(False)
    assert sum(message == DebuggerPrompt() for message in sent) == 2
    text = "".join(message.text for message in sent if isinstance(message, DebuggerOutput))
    assert "(Pdb rank 3) 'inside'\n" in text
    rank.feed(DebuggerInput(""))  # the end of the input
    try:
        raise LookupError
    except LookupError as exc:
        rank.post_mortem(exc)
    assert sent[-1] == DebuggerStop(True)
