"""Hints of the backend, and how long it looks out for peers."""

import math
import os
from itertools import product

import pytest

from asynccomm.backends.shm.settings import (
    HINTS,
    SPIN_SECONDS,
    YIELD_SECONDS,
    Settings,
    cores,
    spin_seconds,
    thread_spin_seconds,
    yield_seconds,
)
from tests.cases import cases


def test_defaults() -> None:
    settings = Settings.of({})
    assert settings == Settings()
    assert set(settings.as_dict()) == HINTS.keys() - {"spin_us", "thread_spin_us", "yield_us"}
    for key, value in settings.as_dict().items():
        assert str(value) in HINTS[key], f"the text of {key} names another default"


def test_the_number_of_cores_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = cores()
    assert known == os.cpu_count()
    monkeypatch.setattr("os.cpu_count", lambda: known + 1)
    assert cores() == known


def test_the_spin_of_the_thread_follows_that_of_calls_where_each_rank_has_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asynccomm.backends.shm.settings.cores", lambda: 3)
    assert thread_spin_seconds({"spin_us": "100"}, 3) == pytest.approx(4e-4)
    assert thread_spin_seconds({"spin_us": "100"}, 4) == 0.0
    for size in (3, 4):
        assert thread_spin_seconds({"thread_spin_us": "20"}, size) == pytest.approx(2e-5)
    assert thread_spin_seconds({"thread_spin_us": "20"}, 1) == 0.0
    with pytest.raises(ValueError, match="hint 'thread_spin_us' must be an integer from 0"):
        thread_spin_seconds({"thread_spin_us": "-1"}, 2)


def test_values_are_taken() -> None:
    values = {"chunk_bytes": 4096, "message_bytes": 8192, "inline_bytes": 0, "single_copy": 0, "whole_bytes": 0}
    settings = Settings.of({name: str(value) for name, value in values.items()})
    assert settings.as_dict() == values


def test_whole_reductions_are_limited_by_the_chunk() -> None:
    assert Settings.of({"chunk_bytes": "1024"}).whole_bytes == 1024
    with pytest.raises(ValueError, match="'whole_bytes' must be at most chunk_bytes \\(1024\\), got 2048"):
        Settings.of({"chunk_bytes": "1024", "whole_bytes": "2048"})


@cases(
    "key, value",
    product(
        ["chunk_bytes", "message_bytes", "inline_bytes", "whole_bytes"], ["-1", "1.5", "many", "", "²", str(1 << 31)]
    ),
)
def test_what_is_no_size_is_named(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' must be an integer"):
        Settings.of({key: value})


@cases("key, value", product(["chunk_bytes", "message_bytes"], ["0", "64", "1025"]))
def test_what_cannot_be_laid_out_is_named(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' must be a multiple of 64 and at least 1024, got {value}"):
        Settings.of({key: value})


def test_spin() -> None:
    assert spin_seconds({}, 2) == SPIN_SECONDS
    assert f"default {SPIN_SECONDS * 1e6:.0f})" in HINTS["spin_us"]
    assert spin_seconds({"spin_us": "0"}, 2) == 0
    assert spin_seconds({"spin_us": "150"}, 2) == pytest.approx(150e-6)
    assert spin_seconds({"spin_us": "150"}, 1) == 0, "no other rank can be late"
    with pytest.raises(ValueError, match="'spin_us' must be an integer"):
        spin_seconds({"spin_us": "fast"}, 2)


def test_a_slot_has_a_line_for_every_rank() -> None:
    assert Settings.of({"chunk_bytes": "1024", "whole_bytes": "0"}).layout(64).chunk == 64 * 64


def test_how_long_it_keeps_a_core() -> None:
    assert yield_seconds({}) == YIELD_SECONDS
    assert yield_seconds({"yield_us": "0"}) == math.inf
    assert yield_seconds({"yield_us": "1000"}) == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="'yield_us' must be an integer"):
        yield_seconds({"yield_us": "often"})
