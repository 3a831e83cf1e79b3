"""Messages cross a process border: they come back equal, and as what they were."""

from __future__ import annotations

import pickle

from asynccomm.testing.protocol import (
    CommCalls,
    DebuggerInput,
    DebuggerOutput,
    DebuggerPrompt,
    DebuggerStart,
    DebuggerStop,
    Died,
    DumpStacks,
    Exited,
    Failed,
    Filters,
    Passed,
    Preparation,
    RankTask,
    RankWorld,
    Report,
    Setup,
    Skipped,
    StackDump,
    Stale,
    Surroundings,
    TimedOut,
)
from tests.cases import cases

FILTERS = Filters(["error"], [], ["ignore"])
CALLS = CommCalls("key", "main", 2, [(1, "barrier()", "test_x.py:3")], False)
WORLD = RankWorld(2, "gloo", "cpu", 3.0, {"hint": "value"})

MESSAGES = [
    WORLD,
    Setup(["/path"], "/cwd", ["-c", "pytest.ini"], {"A": "b"}, "settings"),
    Preparation("/test_x.py", Surroundings({"A": "b"}, "/cwd", ["/path"], "torch.float64", "meta"), FILTERS),
    Stale("reason"),
    DebuggerStart("title"),
    DebuggerOutput("text"),
    DebuggerPrompt(),
    DebuggerInput("next\n"),
    DebuggerStop(True),
    CALLS,
    RankTask(
        "/test_x.py",
        "TestX.test_y",
        b"pickled",
        ["comm"],
        True,
        WORLD,
        1,
        {"RANK": "1"},
        FILTERS,
        Surroundings(),
        3,
        True,
    ),
    DumpStacks(),
    StackDump("text"),
    Passed(0.5, [CALLS], ["<Work #1>"]),
    Skipped("reason"),
    Exited("reason", 3),
    Failed("summary", "traceback", 0, "#1 barrier()", [CALLS]),
    Died("exited with code 3"),
    TimedOut("stacks"),
]


@cases("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: object) -> None:
    copy = pickle.loads(pickle.dumps(message))
    assert copy == message
    assert type(copy) is type(message)


def test_reports() -> None:
    reports = [message for message in MESSAGES if isinstance(message, Report)]
    assert [type(report) for report in reports] == [Passed, Skipped, Exited, Failed, Died, TimedOut]
