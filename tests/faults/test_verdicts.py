"""What counts as going wrong."""

from __future__ import annotations

from .plans import Case
from .reports import Outcome, Report
from .verdicts import delays, judge

CASE = Case(0, "shm", "all_reduce", "abort", "flight", 3, 1, "", False, 0.5, False)


def report(rank: int, **changed: object) -> Report:
    usual = Report(rank, "AbortedError", "aborted by rank 1: struck", (1,), 10.1, "BrokenError", 0.1, "ClosedError")
    return usual._replace(**changed)  # type: ignore[arg-type]


def outcome(**changed: object) -> Outcome:
    reports = {rank: report(rank) for rank in range(3)}
    return Outcome(10.0, reports, {})._replace(**changed)  # type: ignore[arg-type]


def wrong(rank: int, **changed: object) -> list[str]:
    """What is said of a rank."""
    reports = {**outcome().reports, rank: report(rank, **changed)}
    return judge(CASE, outcome(reports=reports))


def test_nothing() -> None:
    assert judge(CASE, outcome()) == []
    assert delays(CASE, outcome()) == [10.1 - 10.0] * 2


def test_the_wrong_error() -> None:
    assert "raised BackendError" in wrong(0, error="BackendError")[0]
    assert "has not noticed" in wrong(0, error="")[0]
    assert "not rank 1" in wrong(2, ranks=(0,))[0]


def test_too_late_or_too_early() -> None:
    assert "after 1.20 s" in wrong(0, at=11.2)[0]
    assert "after -0.50 s" in wrong(0, at=9.5)[0]


def test_a_comm_that_is_not_closed() -> None:
    assert "closing took 4.00 s" in wrong(0, closing=4.0)[0]
    assert "raised nothing" in wrong(0, after="nothing")[0]
    assert "raised nothing" in wrong(0, refused="nothing")[0]


def test_what_is_left_behind() -> None:
    assert "descriptor 7" in wrong(2, left=("descriptor 7: pipe",))[0]
    assert "never awaited" in wrong(1, problems=("warning: x was never awaited",))[0]
    assert "left behind: @asynccomm" in judge(CASE, outcome(left=("@asynccomm",)))[0]


def test_a_failed_connection_may_leave_a_thread_in_gloo() -> None:
    for backend, phase, left, problems in [
        ("gloo", "split", "descriptor 7: pipe", 0),
        ("gloo", "init", "descriptor 7: pipe", 0),
        ("gloo", "split", "task", 1),
        ("shm", "split", "descriptor 7: pipe", 1),
    ]:
        reports = {**outcome().reports, 2: report(2, left=(left,))}
        found = judge(CASE._replace(backend=backend, phase=phase), outcome(reports=reports))
        assert len([problem for problem in found if "left behind" in problem]) == problems


def test_a_rank_that_did_not_end() -> None:
    deaths = {2: "did not end"}
    found = judge(CASE, outcome(stacks="File x, line 1", deaths=deaths))
    assert "ranks [2] did not come to an end" in found[0]
    assert "line 1" in found[0]


def test_a_rank_that_ended_otherwise() -> None:
    reports = {rank: report(rank) for rank in range(2)}
    assert judge(CASE, outcome(reports=reports, deaths={2: "SIGSEGV"})) == ["rank 2 ended by SIGSEGV"]
    assert judge(CASE, outcome(reports=reports)) == ["rank 2 did not report"]


def test_the_victim() -> None:
    assert "the victim ended by nothing" in wrong(1, error="")[0]
    assert "the victim ended by UnnoticedError" in wrong(1, error="UnnoticedError")[0]
    killed = CASE._replace(fault="kill")
    assert "rank 1 lives" in judge(killed, outcome())[0]


def test_the_fault_did_not_happen() -> None:
    assert "did not happen" in judge(CASE, outcome(struck=None))[0]


def shrunk(fault: str, backend: str, **victim: object) -> list[str]:
    """What is said of ranks 0 and 3, which go on, of the victim, 1, and of 2, which was lost before."""
    case = CASE._replace(fault=fault, backend=backend, phase="shrink", size=4)
    reports = {rank: report(rank, error="", refused="") for rank in (0, 3)}
    reports |= {1: report(1, **victim), 2: report(2, error="StruckError")}
    if backend == "loopback":
        return judge(case, Outcome(10.0, reports, {}))
    del reports[2]
    return judge(case, Outcome(10.0, reports, {2: "SIGKILL"}))


def test_who_is_stopped_while_the_others_shrink_is_left_out() -> None:
    assert shrunk("stop", "shm", error="LeftOutError") == []
    assert "the victim ended by nothing" in shrunk("stop", "shm", error="")[0]
    assert "the victim ended by AbortedError" in shrunk("stop", "shm")[0]


def test_who_is_lost_in_the_process_of_the_others() -> None:
    assert shrunk("lose", "loopback", error="StruckError") == []
    assert "the victim ended by AbortedError" in shrunk("lose", "loopback")[0]


def test_a_shortage_that_nobody_need_notice() -> None:
    spare = CASE._replace(fault="memory", phase="init", detail="spare", victim=0)
    fine = {rank: report(rank, error="", refused="") for rank in range(3)}
    assert judge(spare, outcome(reports=fine)) == []
    assert "it failed" in judge(spare, outcome(reports={**fine, 0: report(0, error="BackendError")}))[0]
    assert "raised BackendError" in judge(spare, outcome(reports={**fine, 1: report(1, error="BackendError")}))[0]
