"""Orders: the steps that the first trainer gives all trainers of a publisher, one after the other; and their outcome.

Every trainer carries out the same orders in the same sequence. Each order that sends weights ends with an exchange of
reports, from which every trainer draws the same verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, final

from asynccomm.control.transport.schema import TaggedMessage
from asynccomm.weights.layout import Slice

__all__ = ["Admit", "AnyOrder", "Deliver", "End", "Report", "Start", "Verdict", "verdict"]


@final
class Start(TaggedMessage, frozen=True):
    """The servers that the publisher waits for are connected."""


@final
class Admit(TaggedMessage, frozen=True):
    """Connect with a new server."""

    number: int
    label: str
    layout: dict[str, Slice]
    strict: bool


@final
class Deliver(TaggedMessage, frozen=True):
    """Send a version."""

    job: int
    version: int
    push: bool  #: whether it is the next push of each trainer; else the newest version goes to late servers
    servers: list[int]
    gone: list[int]  #: servers that have left or were lost since the last order


@final
class End(TaggedMessage, frozen=True):
    """The publisher closes."""


AnyOrder: TypeAlias = Start | Admit | Deliver | End


@final
class Report(TaggedMessage, frozen=True):
    """One trainer's outcome of a :class:`Deliver`."""

    nbytes: int  #: sent by this trainer
    stopped: str = ""  #: the reason why this trainer did not send everything; empty: it did, as far as servers live
    lost: dict[int, str] = {}  # noqa: RUF012  # msgspec copies it  #: the reason for each server that was lost
    copied: int = 0  #: the version before, if this trainer still has its copy; else 0


@final
class Verdict(NamedTuple):
    """The outcome of a :class:`Deliver`."""

    reason: str  #: why the version is abandoned; empty: it is complete
    lost: dict[int, str]
    nbytes: int  #: sent by all trainers
    copied: int  #: the version before, if all trainers still have their copies; else 0


def verdict(reports: Sequence[Report]) -> Verdict:
    """The outcome, from the reports of all trainers in rank order."""
    reasons = [f"trainer {rank} {report.stopped}" for rank, report in enumerate(reports) if report.stopped]
    lost = {number: reason for report in reversed(reports) for number, reason in report.lost.items()}
    copied = min(report.copied for report in reports)
    return Verdict("; ".join(reasons), lost, sum(report.nbytes for report in reports), copied)
