"""The messages between the pytest process and its rank processes, pickled over one socket pair per process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = [
    "Died",
    "Failed",
    "Filters",
    "RankTask",
    "Passed",
    "Report",
    "Setup",
    "DumpStacks",
    "Skipped",
    "StackDump",
    "TimedOut",
    "RankWorld",
]


class RankWorld(NamedTuple):
    """One combination of the arguments of ``@pytest.mark.ranks``."""

    size: int
    backend: str
    device: str
    timeout: float  #: seconds for the whole test
    hints: Mapping[str, str]


class Setup(NamedTuple):
    """The first message to a new process: pytest's start, so that both processes import modules in the same way."""

    sys_path: list[str]
    cwd: str
    pytest_args: list[str]


class Filters(NamedTuple):
    """Warning filters as pytest would apply them; later filters take precedence."""

    ini: list[str]
    command_line: list[str]  #: literal text, not regular expressions
    markers: list[str]


class RankTask(NamedTuple):
    """One test on one rank."""

    path: str  #: path of the test's file
    qualname: str  #: qualified name of the test function in the file
    arguments: bytes  #: pickled dict
    wants_comm: bool
    world: RankWorld
    rank: int
    env: Mapping[str, str]
    filters: Filters


class DumpStacks(NamedTuple):
    """A request for the stacks of a busy process."""


class StackDump(NamedTuple):
    """The reply: the stacks of the main thread and of the tasks of its loop."""

    text: str


class Passed(NamedTuple):
    """The test returned on this rank."""

    seconds: float


class Skipped(NamedTuple):
    """The test called ``pytest.skip`` on this rank."""

    reason: str


class Failed(NamedTuple):
    """The test raised on this rank."""

    summary: str  #: the exception in one line
    traceback: str
    aborted_by: int | None  #: the rank with the cause, if this rank failed only because of it
    waited_for: str | None  #: the operation that the test awaited at that time


class Died(NamedTuple):
    """The process ended without a report. Made by the parent."""

    how: str


class TimedOut(NamedTuple):
    """The process was still busy at its deadline. Made by the parent."""

    stacks: str


Report = Passed | Skipped | Failed | Died | TimedOut
