"""Whether a case went as it must. Pure."""

from __future__ import annotations

from typing import Final

from asynccomm.control.timing import HEARTBEAT_SECONDS, SILENT_SECONDS

from .plans import LOCAL, NETWORKS, Case, Expected, expected
from .reports import Outcome, Report

__all__ = ["delays", "judge"]

CLOSING: Final = 2.0  # seconds for aclose() on a broken comm
QUIET: Final = ("abandon", "slow")  # of these, the ranks do not say when
#: seconds for the others to go on without a rank that was lost while they agreed: the silence of a stopped rank, which
#: is looked for at each heartbeat, and time for the others on busy CPUs
SHRUNK: Final = SILENT_SECONDS + HEARTBEAT_SECONDS + 3.0


def _dead(case: Case) -> set[int]:
    """Ranks that are killed."""
    if case.backend in LOCAL:
        return set()
    dead = {case.victim} if case.fault == "kill" else set()
    return dead | {(case.victim + 1) % case.size} if case.phase == "shrink" else dead


def _outcome_problems(case: Case, outcome: Outcome) -> list[str]:
    problems = []
    if outcome.stacks:
        waiting = [rank for rank, how in outcome.deaths.items() if how == "did not end"]
        problems.append(f"ranks {waiting} did not come to an end:\n{outcome.stacks}")
        return problems
    dead = _dead(case)
    for rank, how in outcome.deaths.items():
        # gloo itself ends a process that has no descriptor for who connects
        aborts = case.backend == "gloo" and case.fault == "descriptors" and rank == case.victim
        if not (how == "SIGKILL" and rank in dead) and not (how == "SIGABRT" and aborts):
            problems.append(f"rank {rank} ended by {how}")
    problems += [f"rank {rank} lives" for rank in dead if rank not in outcome.deaths]
    if case.fault not in QUIET and outcome.struck is None:
        problems.append("the fault did not happen")
    problems += [f"left behind: {what}" for what in outcome.left]
    return problems


def judge(case: Case, outcome: Outcome) -> list[str]:
    """What is wrong; empty if nothing is."""
    problems = _outcome_problems(case, outcome)
    if outcome.stacks:
        return problems
    expect = expected(case)
    for rank in range(case.size):
        report = outcome.reports.get(rank)
        if report is None:
            if rank not in outcome.deaths:
                problems.append(f"rank {rank} did not report")
            continue
        found = _common_problems(case, report)
        if case.phase == "shrink" and rank == (case.victim + 1) % case.size:
            found += [] if report.error == "StruckError" else ["it is not lost"]
        elif rank != case.victim:
            found += _survivor_problems(case, report, expect, outcome.struck or 0.0)
        else:
            found += _victim_problems(case, report)
        said = f" ({report.error}: {report.text})" if report.error else ""
        problems += [f"rank {rank}: {problem}{said}" for problem in found]
    return problems


def _is_held_by_gloo(case: Case, report: Report) -> bool:
    """A thread may go on connecting for 30 s."""
    connecting = case.backend in NETWORKS and case.phase in ("init", "split")
    return connecting and all(what.startswith("descriptor ") for what in report.left)


def _common_problems(case: Case, report: Report) -> list[str]:
    problems = list(report.problems)
    # one in fifty aborted groups leaves a thread of gloo behind, with its descriptors: a known limit of gloo
    stuck = case.backend in NETWORKS and any("asynccomm-gloo-end" in what for what in report.left)
    if not stuck and not _is_held_by_gloo(case, report):
        problems += [f"left behind: {what}" for what in report.left]
        if report.closing > CLOSING:
            problems.append(f"closing took {report.closing:.2f} s")
    if report.after not in ("", "ClosedError"):
        problems.append(f"a call on the closed comm raised {report.after}")
    if report.refused not in ("", "BrokenError", "ClosedError"):
        problems.append(f"a call on the broken comm raised {report.refused}")
    return problems


def _survivor_problems(case: Case, report: Report, expect: Expected, struck: float) -> list[str]:
    if case.phase == "shrink":
        late = report.at - struck
        problems = [f"it went on after {late:.2f} s"] if late > SHRUNK else []
        return [*problems, "it did not go on"] if report.error else problems
    if not report.error:
        return [] if not expect.errors or expect.optional else ["it has not noticed"]
    if report.error not in expect.errors:
        return [f"raised {report.error}, not {' or '.join(expect.errors) or 'nothing'}"]
    problems = []
    unknown = "rank 0 did not answer" in report.text  # they give up in the same moment as rank 0, who knows
    if expect.named and not unknown and case.victim not in report.ranks:
        problems.append(f"names ranks {list(report.ranks)}, not rank {case.victim}")
    if not -0.01 <= report.at - struck <= expect.within:
        problems.append(f"raised after {report.at - struck:.2f} s, not within {expect.within:g} s")
    return problems


OURS: Final = (
    "AbortedError",
    "BackendError",
    "UnsuitableError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "PeerLostError",
    "RendezvousError",
    "ClosedError",
)


def _victim_problems(case: Case, report: Report) -> list[str]:
    """It must come to an end, with an error that says why."""
    if not expected(case).errors and case.phase != "shrink":
        return ["it failed"] if report.error else []
    if case.fault == "lose":
        allowed: tuple[str, ...] = ("StruckError",)
    elif case.fault == "stop" and case.phase == "shrink":
        allowed = ("LeftOutError",)
    elif case.phase in ("close", "shrink") or case.fault in ("memory", "descriptors"):
        allowed = ("", *OURS, "CancelledError", "StoreError", "OSError")
    elif case.fault in ("raise", "cancel"):
        allowed = ("StruckError", "ExceptionGroup", "CancelledError", "AbortedError")
    else:
        allowed = OURS
    return [] if report.error in allowed else [f"the victim ended by {report.error or 'nothing'}"]


def delays(case: Case, outcome: Outcome) -> list[float]:
    """Seconds from the fault to when each of the others knew."""
    if outcome.struck is None:
        return []
    others = (report for rank, report in outcome.reports.items() if rank != case.victim)
    return [report.at - outcome.struck for report in others if report.at]
