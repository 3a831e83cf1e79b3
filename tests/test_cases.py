"""Many cases in one test."""

import inspect

import pytest

from tests.cases import cases


def test_all_cases_run_and_each_that_fails_is_named() -> None:
    seen = []

    @cases("a, b", [(1, 2), (3, 3), (5, 6)])
    def differ(a: int, b: int, fixture: str) -> None:
        seen.append((a, b, fixture))
        assert a == b

    assert list(inspect.signature(differ).parameters) == ["fixture"]
    with pytest.raises(ExceptionGroup, match="2 of 3 cases") as caught:
        differ(fixture="x")
    assert seen == [(1, 2, "x"), (3, 3, "x"), (5, 6, "x")]
    assert [error.__notes__ for error in caught.value.exceptions] == [["in the case 1, 2"], ["in the case 5, 6"]]


def test_what_pytest_fails_with_is_reported_as_well() -> None:
    @cases("value", [1, 2], ids=["one", "two"])
    def fails(value: int) -> None:
        pytest.fail(f"not {value}")

    with pytest.raises(BaseExceptionGroup, match="2 of 2 cases") as caught:
        fails()
    assert caught.value.exceptions[1].__notes__ == ["in the case two"]


def test_nothing_fails() -> None:
    @cases("value", [1, 2])
    def passes(value: int) -> None:
        assert value

    passes()
