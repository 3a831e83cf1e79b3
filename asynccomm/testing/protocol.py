"""The messages between the pytest process and its rank processes, pickled over one socket pair per process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "CommCalls",
    "DebuggerInput",
    "DebuggerOutput",
    "DebuggerPrompt",
    "DebuggerStart",
    "DebuggerStop",
    "Died",
    "Exited",
    "Failed",
    "Filters",
    "Preparation",
    "RankTask",
    "Passed",
    "Report",
    "Setup",
    "DumpStacks",
    "Skipped",
    "StackDump",
    "Stale",
    "Surroundings",
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
    environ: Mapping[str, str] = {}
    coverage: str | None = None  #: the settings of the coverage measurement in pytest's process; None: there is none
    seed: int = 0  #: for the import of conftest.py files


class Filters(NamedTuple):
    """Warning filters as pytest would apply them; later filters take precedence."""

    ini: list[str]
    command_line: list[str]  #: literal text, not regular expressions
    markers: list[str]


class Surroundings(NamedTuple):
    """The state of pytest's process that a test sees in its ranks, too."""

    environ: Mapping[str, str] = {}
    cwd: str = "."
    sys_path: Sequence[str] | None = None  #: None: the rank's own
    dtype: str = "torch.float32"  #: torch's default dtype
    device: str | None = None  #: torch's default device; None: the rank's own


class Preparation(NamedTuple):
    """A request to import a test's file, before the test; the reply is "ready" or Stale."""

    path: str
    surroundings: Surroundings
    filters: Filters
    seed: int = 0


class Stale(NamedTuple):
    """The process cannot run the test as a new process would, and must be replaced."""

    reason: str


class RankTask(NamedTuple):
    """One test on one rank."""

    path: str  #: path of the test's file
    qualname: str  #: qualified name of the test function in the file
    arguments: bytes  #: rank fixtures, in order of setup, and the arguments of the test; made by ``fixtures.pack``
    names: Sequence[str]  #: the arguments of the test
    wants_comm: bool
    world: RankWorld
    rank: int
    env: Mapping[str, str]  #: the launcher's variables
    filters: Filters
    surroundings: Surroundings = Surroundings()
    seed: int = 0
    debug: bool = False  #: debug an exception before the test ends


class DebuggerStart(NamedTuple):
    """A rank's debugger requests the terminal; messages of this rank are for the terminal until DebuggerStop."""

    title: str


class DebuggerOutput(NamedTuple):
    """Text for the terminal."""

    text: str


class DebuggerPrompt(NamedTuple):
    """A request for a line of the terminal's input."""


class DebuggerInput(NamedTuple):
    """The reply: the line with its ending; empty at the end of the input."""

    line: str


class DebuggerStop(NamedTuple):
    """The rank gives the terminal back."""

    quit: bool  #: the user has ended the debugger, and with it the run


class CommCalls(NamedTuple):
    """The collectives that a rank called on one comm."""

    key: str  #: the same on all ranks of the comm
    name: str
    called: int  #: number of collectives called
    last: Sequence[tuple[int, str, str]]  #: number, operation and call site of the last calls, oldest first
    broken: bool  #: an error that the test has seen has broken the comm on this rank


class DumpStacks(NamedTuple):
    """A request for the stacks of a busy process."""


class StackDump(NamedTuple):
    """The reply: the stacks of the main thread and of the tasks of its loop."""

    text: str


class Passed(NamedTuple):
    """The test returned on this rank."""

    seconds: float
    calls: Sequence[CommCalls] = ()
    unretrieved: Sequence[str] = ()  #: operations that failed and were never awaited


class Skipped(NamedTuple):
    """The test called ``pytest.skip`` on this rank, or ``pytest.xfail``."""

    reason: str
    xfail: bool = False


class Exited(NamedTuple):
    """The test called ``pytest.exit`` on this rank, which ends the run."""

    reason: str
    code: int | None  #: the exit code of the run; None: pytest's own


class Failed(NamedTuple):
    """The test raised on this rank."""

    summary: str  #: the exception in one line
    traceback: str
    aborted_by: int | None  #: the rank with the cause, if this rank failed only because of it
    waited_for: str | None  #: the operation that the test awaited at that time
    calls: Sequence[CommCalls] = ()
    kinds: bytes = b""  #: the classes of the exception, pickled, the most special one first


class Died(NamedTuple):
    """The process ended without a report. Made by the parent."""

    how: str


class TimedOut(NamedTuple):
    """The process was still busy at its deadline. Made by the parent."""

    stacks: str


Report = Passed | Skipped | Exited | Failed | Died | TimedOut
