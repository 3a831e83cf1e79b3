"""The options of a queue, and its handle."""

import pickle
from typing import Any

import pytest

from asynccomm.queues.options import QueueHandle, QueueOptions

HANDLE = QueueHandle("here", "name", "", 0, "a" * 32, "b" * 32, "reader", "rank 0", 0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"capacity": 0}, ValueError, "capacity must be a positive number of bytes up to 1099511627776, got 0"),
        ({"capacity": "4"}, TypeError, "capacity must be an integer, got '4'"),
        ({"capacity": 1 << 50}, ValueError, "number of bytes up to 1099511627776, got 1125899906842624"),
        ({"max_bytes": -1}, ValueError, "max_bytes"),
        ({"overflow": "drop"}, ValueError, "overflow must be 'wait' or 'drop_oldest', got 'drop'"),
        ({"on_lost": None}, ValueError, "on_lost must be 'raise' or 'continue', got None"),
        ({"address": 7}, TypeError, "address must be a str, got 7"),
        ({"weights_only": 1}, TypeError, "weights_only must be True or False, got 1"),
        ({"expect": "int"}, TypeError, "expect must be a class, got 'int'"),
        ({"expect": Any}, TypeError, r"expect must be a class that isinstance\(\) can check, got typing.Any"),
        ({"busy_poll": 0}, ValueError, "busy_poll must be positive, got 0"),
        ({"busy_poll": "1 ms"}, TypeError, "busy_poll must be seconds or a timedelta, got '1 ms'"),
    ],
)
def test_a_bad_option_is_named(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        QueueOptions(**arguments)


def test_a_handle_is_a_string_that_can_be_pickled() -> None:
    text = pickle.loads(pickle.dumps(HANDLE.text()))
    assert QueueHandle.parse(text) == HANDLE


def test_other_strings_are_no_handles() -> None:
    for text in ("", "{}", HANDLE.text()[:-3], HANDLE.text().replace('"port":0', '"port":70000')):
        with pytest.raises(ValueError, match="handle must be a queue's handle"):
            QueueHandle.parse(text)
    with pytest.raises(TypeError, match="handle must be a str"):
        QueueHandle.parse(b"")
