"""Options of a comm."""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
from datetime import timedelta
from itertools import product
from typing import Any

import pytest

from asynccomm.options import DEFAULT_TIMEOUT, CommOptions, check_bool, check_hints, check_name, seconds, whole_number
from tests.cases import cases

KNOWN = {"interface": "name of the network interface", "threads": "how many"}


@cases(
    "value, expected",
    [
        (None, 7.0),
        (3, 3.0),
        (0.25, 0.25),
        (math.inf, math.inf),
        (10**400, math.inf),
        (timedelta(minutes=2), 120.0),
        (timedelta(milliseconds=1), 0.001),
    ],
)
def test_seconds(value: Any, expected: float) -> None:
    result = seconds("timeout", value, 7.0)
    assert result == expected
    assert type(result) is float


@cases("value", ["3", True, [1], 1j])
def test_seconds_of_the_wrong_type(value: Any) -> None:
    with pytest.raises(TypeError, match="patience must be seconds or a timedelta") as caught:
        seconds("patience", value, 7.0)
    assert repr(value) in str(caught.value)


@cases("value", [0, -1, -(10**400), -0.5, math.nan, -math.inf, timedelta(0), timedelta(seconds=-1)])
def test_seconds_must_be_positive(value: Any) -> None:
    with pytest.raises(ValueError, match="patience must be positive, got") as caught:
        seconds("patience", value, 7.0)
    number = value.total_seconds() if isinstance(value, timedelta) else value
    assert repr(number) in str(caught.value)


def test_a_bool_is_no_other_value() -> None:
    for flag in (True, False):
        check_bool("flag", flag)
    for value in ("0", 0, 1, None, []):
        with pytest.raises(TypeError, match="flag must be True or False, got") as caught:
            check_bool("flag", value)
        assert repr(value) in str(caught.value)


def test_whole_numbers() -> None:
    assert [whole_number(text) for text in ("0", "12", "007")] == [0, 12, 7]
    assert [whole_number(text) for text in ("", "-1", "1.0", " 1", "\u0663", "9" * 5000)] == [None] * 6


def test_hints() -> None:
    assert check_hints(None, KNOWN, "gloo") == {}
    assert check_hints({}, KNOWN, "gloo") == {}
    given = {"threads": "2"}
    checked = check_hints(given, KNOWN, "gloo")
    assert checked == given
    assert checked is not given


def test_unknown_hints_are_logged_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asynccomm"):
        assert check_hints({"thread": "2", "interface": "lo", "algo": "x"}, KNOWN, "gloo") == {"interface": "lo"}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    for message, hint in zip(messages, ("'algo'", "'thread'"), strict=True):
        assert message.startswith(f"hint {hint} ")
        assert "'gloo'" in message
        assert "['control', 'interface', 'metrics', 'recorder', 'threads']" in message


@cases("value", ["on", "off"])
def test_every_backend_knows_the_hint_for_the_control_channel(value: str) -> None:
    assert check_hints({"control": value}, {}, "gloo") == {"control": value}


@cases("value", ["", "no", "OFF"])
def test_the_control_channel_is_on_or_off(value: str) -> None:
    with pytest.raises(ValueError, match=f"hint 'control' must be 'on' or 'off', got {value!r}"):
        check_hints({"control": value}, KNOWN, "gloo")


@cases("hints", ["threads=2", [("threads", "2")], 3])
def test_hints_must_be_a_mapping(hints: Any) -> None:
    with pytest.raises(TypeError, match="hints must be a mapping of strings to strings") as caught:
        check_hints(hints, KNOWN, "gloo")
    assert repr(hints) in str(caught.value)


@cases("hints", [{"threads": 2}, {2: "threads"}, {"threads": None}, {"unknown": 1}])
def test_hints_must_hold_strings(hints: Any) -> None:
    with pytest.raises(TypeError, match="hints must map strings to strings") as caught:
        check_hints(hints, KNOWN, "gloo")
    ((key, value),) = hints.items()
    assert f"{key!r}: {value!r}" in str(caught.value)


def test_names() -> None:
    check_name("main")
    check_name("trainé 🦊")


@cases("name", ["", None, b"main", 3])
def test_a_name_must_be_a_text(name: Any) -> None:
    with pytest.raises(ValueError, match="name must be a non-empty str, got") as caught:
        check_name(name)
    assert repr(name) in str(caught.value)


def test_a_name_must_be_fit_for_the_store() -> None:
    with pytest.raises(ValueError, match=r"name must be a str that UTF-8 can encode, got 'a\\ud800'"):
        check_name("a\ud800")


def test_options_are_frozen_values() -> None:
    options = CommOptions(max_ops=3)
    assert options.timeout == DEFAULT_TIMEOUT
    assert options.hints == {}
    assert options == CommOptions(max_ops=3)
    assert options != CommOptions()
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.max_ops = 4  # type: ignore[misc]
    with pytest.raises(TypeError, match="max_op"):
        CommOptions(max_op=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        CommOptions(3.0)  # type: ignore[misc]


@cases("name, value", product(["max_ops", "max_bytes"], [0, -1, True, 1.5, "9", None]))
def test_limits_must_be_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer") as caught:
        CommOptions(**{name: value})
    assert repr(value) in str(caught.value)
