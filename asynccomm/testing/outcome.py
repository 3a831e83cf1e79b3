"""The outcome of a test from the reports of its ranks."""

from __future__ import annotations

import contextlib
import pickle
import unittest
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import pytest

from asynccomm.testing.protocol import CommCalls, Died, Exited, Failed, Passed, RankWorld, Report, Skipped, TimedOut

__all__ = ["raise_outcome", "uneven"]


def raise_outcome(reports: Sequence[Report], world: RankWorld, note: str) -> None:
    """Pass, skip or fail the test, or end the run, if a rank has called ``pytest.exit``.

    Args:
        note: the last line of a failure.
    """
    for report in reports:
        if isinstance(report, Exited):
            # the end of the run leaves no report of the test: its failures are told here
            failed = [_describe(rank, each, world, False) for rank, each in enumerate(reports) if _is_own_failure(each)]
            raise pytest.exit.Exception("\n\n".join([report.reason, *failed]), report.code)
    skipped = [report for report in reports if isinstance(report, Skipped)]
    if len(skipped) == len(reports):
        expected = [report for report in skipped if report.xfail]
        if len(expected) == len(skipped):
            raise pytest.xfail.Exception(expected[0].reason)  # not ``xfail()``, which --runxfail takes away
        reason = next(report.reason for report in skipped if not report.xfail)
        raise pytest.skip.Exception(reason, _use_item_location=True)  # reported at the test, not at this line
    passed = [report for report in reports if isinstance(report, Passed)]
    if len(passed) == len(reports):
        parts = _leftovers(passed)
        if not parts:
            return
    else:
        # the cause first: ranks that failed only because of another rank's failure come last
        order = sorted(range(len(reports)), key=lambda rank: _weight(reports[rank]))
        # a rank that has failed or died ends the wait for the others before the time limit
        limited = not any(isinstance(report, (Failed, Died)) for report in reports)
        parts = [text for rank in order if (text := _describe(rank, reports[rank], world, limited))]
        parts += uneven(reports)
    if skipped:
        calls = dict.fromkeys("called pytest.xfail" if report.xfail else "skipped the test" for report in skipped)
        parts.insert(0, f"only {len(skipped)} of {world.size} ranks {' or '.join(calls)}; all have to, or none")
    raise _failure_of(reports)("\n\n".join([*parts, note]), pytrace=False)


def _is_own_failure(report: Report) -> bool:
    """Whether the rank failed or died, other than by the failure of another rank."""
    return isinstance(report, Died) or (isinstance(report, Failed) and report.aborted_by is None)


def _set_text(failure: Any, text: str, pytrace: bool) -> None:
    """The constructor of a failure, in place of that of its other base."""
    BaseException.__init__(failure, text)
    failure.msg, failure.pytrace = text, pytrace


def _failure_of(reports: Sequence[Report]) -> Callable[..., BaseException]:
    """The class of the test's failure: also of the exceptions of all ranks, for ``xfail(raises=...)``."""
    own = [report for report in reports if isinstance(report, Failed) and report.aborted_by is None]
    others = [report for report in reports if isinstance(report, (Died, TimedOut, Skipped))]
    if not own or others:
        return pytest.fail.Exception
    try:
        kinds = [pickle.loads(report.kinds) for report in own]
    except Exception:  # such as a module that pytest's process has under another name
        return pytest.fail.Exception
    for kind in kinds[0]:
        if not issubclass(kind, Exception) or issubclass(kind, (unittest.SkipTest, pytest.exit.Exception)):
            break  # to pytest, these are no failures
        if all(kind in each for each in kinds):
            with contextlib.suppress(Exception):  # of a class that allows no other base, or no such object
                own_parts = {"__init__": _set_text, "__module__": "builtins"}
                failure: Any = type("Failed", (pytest.fail.Exception, kind), own_parts)
                failure("text", pytrace=False)
                return failure  # type: ignore[no-any-return]
    return pytest.fail.Exception


def _leftovers(reports: Sequence[Passed]) -> list[str]:
    """Errors of operations that no code of the test has seen."""
    parts = [
        f"rank {rank} of {len(reports)} passed, but operations failed and were never awaited:\n"
        + "\n".join(f"  {text}" for text in report.unretrieved)
        for rank, report in enumerate(reports)
        if report.unretrieved
    ]
    return parts + uneven(reports)


def uneven(reports: Sequence[Report]) -> list[str]:
    """One text for each comm on which some ranks called collectives that others never called.

    Where all ranks passed, comms are left out that broke with an error that the test has seen. Where some did not
    pass, only ranks that did can have missed a collective; others would have gone on.
    """
    comms: dict[str, dict[int, CommCalls]] = {}
    for rank, report in enumerate(reports):
        for each in report.calls if isinstance(report, (Passed, Failed)) else ():
            comms.setdefault(each.key, {})[rank] = each
    done = {rank for rank, report in enumerate(reports) if isinstance(report, Passed)}
    texts = []
    for calls in comms.values():
        if len(done) < len(reports) or not any(each.broken for each in calls.values()):
            texts.append(_difference(calls, done))
    return [text for text in texts if text]


def _difference(calls: Mapping[int, CommCalls], done: Set[int]) -> str:
    least = min(each.called for each in calls.values())
    most = max(each.called for each in calls.values())
    if least == most:
        return ""
    behind = [rank for rank, each in calls.items() if each.called == least]
    if not done >= set(behind):
        return ""
    lines = [f"comm {next(iter(calls.values())).name!r}: ranks {behind} never called these collectives of other ranks:"]
    found: dict[tuple[int, str, str], list[int]] = {}
    for rank, each in calls.items():
        for call in each.last:
            if call[0] >= least:
                found.setdefault(call, []).append(rank)
    first = min([number for number, _, _ in found], default=most)
    if first > least:
        lines.append(f"  #{least} to #{first - 1}, which are not recorded any more")
    for (number, op, site), by in sorted(found.items()):
        lines.append(f"  #{number} {op} on ranks {by}" + (f" at {site}" if site else ""))
    return "\n".join(lines)


def _weight(report: Report) -> int:
    match report:
        case Died():
            return 0
        case Skipped():
            return 1
        case Failed(aborted_by=None):
            return 2
        case TimedOut():
            return 3
        case _:
            return 4


def _describe(rank: int, report: Report, world: RankWorld, limited: bool) -> str:
    """The outcome of one rank, for the failure message; empty if it passed.

    Args:
        limited: whether the time limit has ended the test.
    """
    who = f"rank {rank} of {world.size}"
    match report:
        case Failed(summary, traceback, None):
            return f"{who} failed: {summary}\n{traceback}"
        case Failed(_, traceback, by, awaited):
            what = f"waiting for {awaited}" if awaited else "still at it"
            return f"{who} was {what} when rank {by} left the test, here:\n{traceback}"
        case Died(how):
            return f"{who} {how}"
        case TimedOut(stacks):
            limit = f"not done after {world.timeout:g} s (timeout= of @pytest.mark.ranks)"
            return f"{who} was {limit if limited else 'still waiting'} and had to be ended, here:\n{stacks}"
        case Skipped(reason, xfail):
            return f"{who} {'called pytest.xfail' if xfail else 'skipped'}: {reason}"
        case _:
            return ""
