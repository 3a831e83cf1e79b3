"""Messages cross a process border: they come back equal, and as what they were."""

from __future__ import annotations

import pickle

import pytest

from asynccomm.testing.protocol import (
    Died,
    DumpStacks,
    Failed,
    Filters,
    Passed,
    RankTask,
    RankWorld,
    Report,
    Setup,
    Skipped,
    StackDump,
    TimedOut,
)

WORLD = RankWorld(2, "gloo", "cpu", 3.0, {"hint": "value"})

MESSAGES = [
    WORLD,
    Setup(["/path"], "/cwd", ["-c", "pytest.ini"]),
    RankTask(
        "/test_x.py", "TestX.test_y", b"pickled", True, WORLD, 1, {"RANK": "1"}, Filters(["error"], [], ["ignore"])
    ),
    DumpStacks(),
    StackDump("text"),
    Passed(0.5),
    Skipped("reason"),
    Failed("summary", "traceback", 0, "#1 barrier()"),
    Died("exited with code 3"),
    TimedOut("stacks"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: object) -> None:
    copy = pickle.loads(pickle.dumps(message))
    assert copy == message
    assert type(copy) is type(message)


def test_reports() -> None:
    reports = [message for message in MESSAGES if isinstance(message, Report)]
    assert [type(report) for report in reports] == [Passed, Skipped, Failed, Died, TimedOut]
