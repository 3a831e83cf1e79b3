"""Reports of ranks become the outcome of a test; the plugin's tests show the texts of failures."""

from __future__ import annotations

import pytest

from asynccomm.testing.outcome import raise_outcome, uneven
from asynccomm.testing.protocol import CommCalls, Failed, Passed, RankWorld, Report, Skipped, TimedOut

WORLD = RankWorld(2, "auto", "cpu", 60.0, {})


def calls(called: int, *sites: str, broken: bool = False, key: str = "key") -> CommCalls:
    first = called - len(sites)
    return CommCalls(key, "main", called, [(first + i, "barrier()", site) for i, site in enumerate(sites)], broken)


def test_all_ranks_decide() -> None:
    raise_outcome([Passed(0.1), Passed(0.1)], WORLD, "note")
    with pytest.raises(pytest.skip.Exception, match="first"):
        raise_outcome([Skipped("first"), Skipped("second")], WORLD, "note")
    with pytest.raises(pytest.fail.Exception, match=r"only 1 of 2 ranks skipped(.|\n)*\n\nnote$"):
        raise_outcome([Skipped("first"), Passed(0.1)], WORLD, "note")
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2 passed, but operations failed(.|\n)*\n  a Work\n"):
        raise_outcome([Passed(0.1), Passed(0.1, unretrieved=["a Work"])], WORLD, "note")


def test_equal_calls_are_fine() -> None:
    assert uneven([Passed(0.1, [calls(3, "a.py:1")]), Passed(0.1, [calls(3, "b.py:2")])]) == []
    assert uneven([Passed(0.1, [calls(3)]), Passed(0.1, [calls(1, key="another comm")])]) == []


def test_calls_of_some_ranks() -> None:
    reports: list[Report] = [
        Passed(0.1, [calls(4, "a.py:1", "a.py:2")]),
        Passed(0.1, [calls(1, "a.py:1")]),
        Passed(0.1, [calls(4, "a.py:1", "b.py:2")]),
    ]
    assert uneven(reports) == [
        "comm 'main': ranks [1] never called these collectives of other ranks:\n"
        "  #1 to #1, which are not recorded any more\n"
        "  #2 barrier() on ranks [0, 2] at a.py:1\n"
        "  #3 barrier() on ranks [0] at a.py:2\n"
        "  #3 barrier() on ranks [2] at b.py:2"
    ]


def test_broken_comms_and_failures() -> None:
    assert uneven([Passed(0.1, [calls(2, "")]), Passed(0.1, [calls(1, broken=True)])]) == [], "the test knows of it"
    failed = Failed("summary", "traceback", None, None, [calls(2, "", broken=True)])
    assert uneven([failed, Passed(0.1, [calls(1)])])[0].endswith("\n  #1 barrier() on ranks [0]")
    behind = Failed("summary", "traceback", None, None, [calls(1, broken=True)])
    assert uneven([behind, Passed(0.1, [calls(2, "")])]) == [], "it would have gone on"
    assert uneven([TimedOut("stacks"), Passed(0.1, [calls(2, "")])]) == []
