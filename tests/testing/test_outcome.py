"""Reports of ranks become the outcome of a test; the plugin's tests show the texts of failures."""

from __future__ import annotations

import pickle
import unittest

import pytest

from asynccomm import AbortedError, BrokenError, PeerLostError
from asynccomm.testing.outcome import raise_outcome, uneven
from asynccomm.testing.protocol import CommCalls, Died, Exited, Failed, Passed, RankWorld, Report, Skipped, TimedOut

WORLD = RankWorld(2, "auto", "cpu", 60.0, {})


def calls(called: int, *sites: str, broken: bool = False, key: str = "key") -> CommCalls:
    first = called - len(sites)
    return CommCalls(key, "main", called, [(first + i, "barrier()", site) for i, site in enumerate(sites)], broken)


def test_all_ranks_decide() -> None:
    raise_outcome([Passed(0.1), Passed(0.1)], WORLD, "note")
    with pytest.raises(pytest.skip.Exception, match="first") as skipped:
        raise_outcome([Skipped("first"), Skipped("second")], WORLD, "note")
    assert skipped.value._use_item_location
    with pytest.raises(pytest.xfail.Exception, match="first"):
        raise_outcome([Skipped("first", xfail=True), Skipped("second", xfail=True)], WORLD, "note")
    with pytest.raises(pytest.skip.Exception, match="second"):
        raise_outcome([Skipped("first", xfail=True), Skipped("second")], WORLD, "note")
    with pytest.raises(pytest.fail.Exception, match=r"only 1 of 2 ranks skipped(.|\n)*\n\nnote$"):
        raise_outcome([Skipped("first"), Passed(0.1)], WORLD, "note")
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2 passed, but operations failed(.|\n)*\n  a Work\n"):
        raise_outcome([Passed(0.1), Passed(0.1, unretrieved=["a Work"])], WORLD, "note")


def test_an_xfail_on_some_ranks_is_told_as_such() -> None:
    some: Report = Skipped("known", xfail=True)
    with pytest.raises(pytest.fail.Exception) as failure:
        raise_outcome([Passed(0.1), some], WORLD, "note")
    assert failure.value.msg == (
        "only 1 of 2 ranks called pytest.xfail; all have to, or none\n\nrank 1 of 2 called pytest.xfail: known\n\nnote"
    )
    with pytest.raises(pytest.fail.Exception, match=r"only 2 of 3 ranks called pytest.xfail or skipped the test;"):
        raise_outcome([some, Skipped("other"), Passed(0.1)], RankWorld(3, "auto", "cpu", 60.0, {}), "note")


def test_an_exit_on_one_rank_ends_the_run() -> None:
    with pytest.raises(pytest.exit.Exception, match=r"^enough$") as caught:
        raise_outcome([failed(by=1), Exited("enough", 3)], WORLD, "note")
    assert caught.value.returncode == 3


def test_an_exit_tells_the_failures_of_other_ranks() -> None:
    with pytest.raises(pytest.exit.Exception) as caught:
        raise_outcome(
            [failed(KeyError), Exited("enough", 3), failed(by=1), Died("was killed")],
            RankWorld(4, "auto", "cpu", 60.0, {}),
            "note",
        )
    assert caught.value.msg == "enough\n\nrank 0 of 4 failed: summary\ntraceback\n\nrank 3 of 4 was killed"


def failed(*kinds: type[BaseException], by: int | None = None) -> Failed:
    return Failed("summary", "traceback", by, None, kinds=pickle.dumps(kinds))


def test_a_failure_is_of_the_class_that_all_failed_ranks_raise() -> None:
    """Else ``xfail(raises=...)`` would never apply."""
    key = failed(KeyError, LookupError, Exception, BaseException, object)
    index = failed(IndexError, LookupError, Exception, BaseException, object)
    lost = failed(PeerLostError, BrokenError, BaseException, object)
    for reports, expected, other in [
        ([key, key], KeyError, IndexError),
        ([key, Passed(0.1)], KeyError, IndexError),
        ([key, failed(by=0)], KeyError, IndexError),
        ([key, index], LookupError, KeyError),
        ([key, lost], pytest.fail.Exception, Exception),
        ([lost, lost], PeerLostError, AbortedError),
        ([key, TimedOut("stacks")], pytest.fail.Exception, KeyError),
        ([Failed("summary", "traceback", None, None, kinds=b"unreadable"), key], pytest.fail.Exception, KeyError),
    ]:
        with pytest.raises(pytest.fail.Exception) as found:
            raise_outcome(reports, WORLD, "note")
        assert isinstance(found.value, expected)
        assert not isinstance(found.value, other)
        assert str(found.value).endswith("note")
        assert not found.value.pytrace


def test_the_time_limit_is_named_where_it_has_ended_the_test() -> None:
    for other, said in [
        (Passed(0.1), "not done after 60 s (timeout= of @pytest.mark.ranks)"),
        (TimedOut("stacks"), "not done after 60 s (timeout= of @pytest.mark.ranks)"),
        (failed(KeyError), "still waiting"),
        (Died("exited with code 3"), "still waiting"),
    ]:
        with pytest.raises(pytest.fail.Exception) as found:
            raise_outcome([TimedOut("stacks"), other], WORLD, "note")
        assert f"rank 0 of 2 was {said} and had to be ended, here:\nstacks" in str(found.value)


@pytest.mark.parametrize("kind", [OSError, UnicodeDecodeError, SystemExit, StopIteration, ExceptionGroup, SyntaxError])
def test_a_failure_of_any_class_has_its_text(kind: type[BaseException]) -> None:
    with pytest.raises(pytest.fail.Exception, match="note"):
        raise_outcome([failed(*kind.__mro__)], RankWorld(1, "auto", "cpu", 60.0, {}), "note")


class ReadOnly(Exception):
    @property
    def msg(self) -> str:
        return "of the class"


@pytest.mark.parametrize("kind", [unittest.SkipTest, KeyboardInterrupt, pytest.exit.Exception, ReadOnly])
def test_a_failure_is_never_of_a_class_that_means_something_else(kind: type[BaseException]) -> None:
    """pytest would skip the test, or end; or the text would be lost."""
    with pytest.raises(pytest.fail.Exception, match=r"summary(.|\n)*note") as found:
        raise_outcome([failed(*kind.__mro__), Passed(0.1)], WORLD, "note")
    assert not isinstance(found.value, kind)


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
