"""The admission of connections: limits, refusals and their log, without sockets."""

from __future__ import annotations

import logging
import os

import pytest

from asynccomm.control.transport import admission as module
from asynccomm.control.transport.admission import CROWDED, LATE, OTHER_USER, WRONG_TOKEN, Admission
from tests.waiting import until

ME = os.geteuid()


class Host:
    """An admission of connections that are numbers, and the connections that it closes."""

    def __init__(self, expected: int = 0, read: tuple[int, ...] = ()) -> None:
        self.closed: list[tuple[int, str]] = []
        self.has_hello = set(read)  # connections with a hello that is not read yet
        self.admission = Admission(
            "a test", lambda number, reason: self.closed.append((number, reason)), expected, self._read
        )

    def _read(self, number: int) -> None:
        if number in self.has_hello:
            self.admission.remove(number)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNAUTHENTICATED", 2)


async def test_the_oldest_has_to_go() -> None:
    host = Host(expected=1)
    for number in range(5):
        host.admission.add(number, ME)
    assert host.closed == [(0, CROWDED), (1, CROWDED)]
    assert list(host.admission.waiting) == [2, 3, 4]


async def test_a_hello_that_has_arrived_counts_before_a_limit() -> None:
    host = Host(read=(0, 1))
    for number in range(4):
        host.admission.add(number, None)
    assert host.closed == []
    assert list(host.admission.waiting) == [2, 3]


async def test_a_hello_in_time_stops_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_SECONDS", 0.01)
    host = Host()
    host.admission.add(0, ME)
    assert host.admission.remove(0)
    assert not host.admission.remove(0)
    host.admission.add(1, ME)
    await until(lambda: host.closed)
    assert host.closed == [(1, LATE)]


async def test_another_user() -> None:
    host = Host()
    host.admission.add(0, ME + 1)
    assert host.closed == [(0, OTHER_USER)]
    assert not host.admission.waiting


async def test_the_first_refusal_is_logged_and_the_number_of_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "asynccomm")
    host = Host()
    for number in range(3):
        host.admission.refuse(number, WRONG_TOKEN if number else "garbage")
    for _ in range(2):
        host.admission.log_refusals()
    assert [record.getMessage() for record in caplog.records] == [
        "a test refused a connection: garbage; others are only counted",
        "a test refused 3 connections: 1 garbage, 2 with a wrong token",
    ]


async def test_a_single_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    host.admission.refuse(0, WRONG_TOKEN)
    host.admission.log_refusals()
    assert len(caplog.records) == 1


async def test_reasons_are_limited() -> None:
    host = Host()
    for number in range(1000):
        host.admission.refuse(number, f"garbage {number}")
    assert len(host.admission.refused) == module.REASONS + 1
    assert host.admission.refused.total() == 1000
