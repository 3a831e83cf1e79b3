"""Values of rank fixtures, without a rank; ``test_fixtures.py`` has them in ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from asynccomm.errors import BackendError
from asynccomm.testing import fixtures
from asynccomm.testing.fixtures import FunctionKey, RankOnly
from asynccomm.testing.rank_values import RankValues

said: list[str] = []


def base() -> Iterator[str]:
    said.append("base up")
    yield "base"
    said.append("base down")


async def user(base: str, given: int, comm: str) -> AsyncIterator[str]:
    said.append("user up")
    yield f"{base} {given} {comm}"
    said.append("user down")
    raise BackendError("the comm has ended")


@pytest.fixture
def user_values(monkeypatch: pytest.MonkeyPatch) -> list[RankOnly]:
    keys = {function: FunctionKey(__file__, 0, function.__name__, __name__, __file__, 1) for function in (base, user)}
    monkeypatch.setattr(fixtures, "_functions", {key: function for function, key in keys.items()})
    said.clear()
    arguments = {
        "base": RankOnly("base", keys[base], is_method=False),
        "given": 7,
        "comm": RankOnly("comm", is_method=False),
    }
    return [RankOnly("user", keys[user], arguments, is_method=False)]  # a test may not have the stand-in itself


async def test_made_once_and_ended_in_reverse(user_values: list[RankOnly]) -> None:
    (user_value,) = user_values
    values = RankValues({"comm": "a comm"}, None)
    for _ in range(2):
        assert await values.value(user_value) == "base 7 a comm"
    assert await values.value(user_value.arguments["base"]) == "base"
    assert await values.value(8) == 8
    assert said == ["base up", "user up"]
    failure = await values.close(None)
    assert said == ["base up", "user up", "user down", "base down"]
    assert isinstance(failure, BackendError)
    assert failure.__notes__ == ["in the rest of rank fixture 'user', after the test"]
    assert await values.close(None) is None, "each once"


async def test_after_a_failure_errors_of_the_comm_are_left_out(user_values: list[RankOnly]) -> None:
    (user_value,) = user_values
    values = RankValues({"comm": "a comm"}, None)
    await values.value(user_value)
    cause = LookupError("the cause")
    assert await values.close(cause) is cause
    assert said[2:] == ["user down", "base down"]
    assert not hasattr(cause, "__notes__")
