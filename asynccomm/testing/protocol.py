"""What the pytest process and its rank processes say to each other, by pickle over a socket pair of their own."""

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
    """What ``@pytest.mark.ranks`` asks for, one combination of it."""

    size: int
    backend: str
    device: str
    timeout: float  #: seconds for the whole test
    hints: Mapping[str, str]


class Setup(NamedTuple):
    """Once, to a new process: how pytest was started, so that modules are imported the same way."""

    sys_path: list[str]
    cwd: str
    pytest_args: list[str]


class Filters(NamedTuple):
    """Warning filters as pytest would apply them, later ones first in precedence."""

    ini: list[str]
    command_line: list[str]  #: literal text, not regular expressions
    markers: list[str]


class RankTask(NamedTuple):
    """One test on one rank."""

    path: str  #: of the test's file
    qualname: str  #: of the test function in it
    arguments: bytes  #: pickled dict
    wants_comm: bool
    world: RankWorld
    rank: int
    env: Mapping[str, str]
    filters: Filters


class DumpStacks(NamedTuple):
    """Asks a busy process where it is."""


class StackDump(NamedTuple):
    """The answer: what the main thread and the tasks of its loop are doing."""

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
    aborted_by: int | None  #: the rank whose failure ended this one, if that is all that happened here
    waited_for: str | None  #: the operation that was awaited then


class Died(NamedTuple):
    """The process ended without a report. Made by the parent."""

    how: str


class TimedOut(NamedTuple):
    """The process was still busy when it had to stop. Made by the parent."""

    stacks: str


Report = Passed | Skipped | Failed | Died | TimedOut
