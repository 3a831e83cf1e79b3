"""What the ranks of a case say of themselves, and what was seen of them from outside. Frozen values."""

from __future__ import annotations

from typing import NamedTuple

from .plans import Case

__all__ = ["Born", "Ended", "Order", "Outcome", "Report", "Struck"]


class Struck(NamedTuple):
    """The fault happens now; the last thing that is heard of some victims."""

    at: float  #: of time.monotonic, which all processes share


class Report(NamedTuple):
    """How one rank has fared."""

    rank: int
    error: str = ""  #: type of what its operations ended with; empty: they did not fail
    text: str = ""  #: what that says
    ranks: tuple[int, ...] = ()  #: that it names
    at: float = 0.0  #: when
    refused: str = ""  #: what a call on the broken comm raised
    closing: float = 0.0  #: seconds until the comm was closed
    after: str = ""  #: what a call on the closed comm raised
    left: tuple[str, ...] = ()  #: what was left behind in the process
    problems: tuple[str, ...] = ()  #: whatever else was wrong
    notes: tuple[str, ...] = ()  #: what had to be done otherwise on this system


class Outcome(NamedTuple):
    """A case, seen from outside."""

    struck: float | None  #: when, if it was
    reports: dict[int, Report]  #: of the ranks that came to an end
    deaths: dict[int, str]  #: how the others ended, by rank
    stacks: str = ""  #: of all processes, if some did not end
    left: tuple[str, ...] = ()  #: what was left behind outside of the processes
    output: str = ""  #: what was printed


class Order(NamedTuple):
    """Be rank ``rank`` of a case; -1: all of them."""

    number: int  #: of the order
    case: Case
    rank: int
    environment: dict[str, str]


class Born(NamedTuple):
    """A child has begun."""

    number: int
    pid: int


class Ended(NamedTuple):
    """A child has ended; it is only now that its pid can be used again."""

    number: int
    status: int
