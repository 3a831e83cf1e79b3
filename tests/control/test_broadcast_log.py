"""The record of the messages to all: what is new is found once, and repeated until the root returns it."""

from __future__ import annotations

import pytest

from asynccomm.control import broadcast_log
from asynccomm.control.broadcast_log import LOGGED, BroadcastLog
from asynccomm.control.messages import ALL, News, RoutedMessage


def news(source: int, number: int | None, also: tuple[int, ...] = ()) -> RoutedMessage:
    return RoutedMessage(ALL, source, News("comm", {}), number, also=also)


def test_a_message_is_new_once() -> None:
    log = BroadcastLog()
    first = news(1, 1)
    assert not log.knows(first)
    assert log.add(first) is first
    assert log.knows(first)
    assert log.add(first) is None
    assert log.add(news(2, 1)) == news(2, 1), "each source has numbers of its own"
    assert log.add(news(1, 3)) == news(1, 3)
    assert log.add(news(1, 2)) is None, "a lower number comes again only"


def test_a_message_of_several_sources_is_new_from_some() -> None:
    log = BroadcastLog()
    log.add(news(1, 4))
    together = news(0, 4, (1, 2))
    assert not log.knows(together)
    assert log.add(together) == news(0, 4, (2,))
    assert log.knows(together)
    assert list(log.recent) == [news(1, 4), news(0, 4, (2,))]


def test_a_message_without_a_number_is_always_new() -> None:
    log = BroadcastLog()
    for _ in range(2):
        assert log.add(news(0, None)) == news(0, None)
    assert not log.knows(news(0, None))
    assert not log.recent


def test_a_message_is_repeated_until_the_root_returns_it() -> None:
    log = BroadcastLog()
    numbers = [log.number(), log.number()]
    assert numbers == [1, 2]
    for number in numbers:
        log.repeat(news(0, number), number)
    log.repeat(news(1, 1, (2,)), 1)
    assert log.repeated == [news(0, 1), news(0, 2), news(1, 1), news(2, 1)]
    log.add(news(0, 1, (1,)))
    assert log.repeated == [news(0, 2), news(2, 1)]


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_log, "REPEATED", 3)
    log = BroadcastLog()
    for number in range(1, 6):
        log.repeat(news(0, number), number)
    assert log.repeated == [news(0, number) for number in (3, 4, 5)]
    for number in range(1, LOGGED + 3):
        log.add(news(1, number))
    assert [message.number for message in log.recent] == list(range(3, LOGGED + 3))
