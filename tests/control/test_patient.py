"""Messages to all that wait: each is sent once and in order, at the latest after some pauses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from asynccomm.control import patient
from asynccomm.control.messages import ALL, MessageBatch, News, RoutedMessage
from asynccomm.control.patient import PATIENT_TIMES, EntrustedMessages, PatientMessages


def news(number: int) -> RoutedMessage:
    return RoutedMessage(ALL, number, News("comm", {"what": number}), 1, patient=True)


class Root:
    """A root that records what is sent, and what its heir gets."""

    def __init__(self, *, waits: bool = True) -> None:
        self.sent: list[list[int]] = []  # the sources of the messages of each frame
        self.entrusted: list[int] = []
        self.pauses: list[Callable[[], object]] = []
        self.messages = PatientMessages(self._send, self._entrust, self.pauses.append if waits else None)

    def _send(self, frame: RoutedMessage | MessageBatch) -> None:
        messages = frame.messages if isinstance(frame, MessageBatch) else [frame]
        self.sent.append([message.source for message in messages])

    def _entrust(self, messages: Sequence[RoutedMessage]) -> None:
        self.entrusted += [message.source for message in messages]

    def pause(self) -> None:
        """Let a pause end."""
        (resume,) = self.pauses
        self.pauses.clear()
        resume()


def test_the_first_message_is_sent_at_once_and_later_ones_wait_for_a_quiet_pause() -> None:
    root = Root()
    for number in range(3):
        root.messages.add(news(number))
    assert (root.sent, root.entrusted) == ([[0]], [1, 2])
    root.pause()
    assert root.sent == [[0]], "more may come"
    root.pause()
    assert root.sent == [[0], [1, 2]]
    root.pause()
    assert not root.pauses, "nothing waits"
    root.messages.add(news(3))
    assert root.sent == [[0], [1, 2], [3]]


def test_a_stream_of_messages_waits_for_a_limited_number_of_pauses() -> None:
    root = Root()
    root.messages.add(news(0))
    for number in range(1, PATIENT_TIMES + 1):
        assert root.sent == [[0]]
        root.messages.add(news(number))
        root.pause()
    assert root.sent == [[0], list(range(1, PATIENT_TIMES + 1))]


def test_a_flush_sends_each_message_once() -> None:
    root = Root()
    for number in range(3):
        root.messages.add(news(number))
    root.messages.flush()
    root.messages.flush()
    assert root.sent == [[0], [1, 2]]
    assert root.messages.waiting == []


def test_without_a_clock_no_message_waits() -> None:
    root = Root(waits=False)
    for number in range(2):
        root.messages.add(news(number))
    assert (root.sent, root.entrusted) == ([[0], [1]], [])


def test_an_heir_keeps_messages_until_the_root_has_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "HELD", 2)
    sent = {0, 2}
    entrusted = EntrustedMessages(lambda message: message.source in sent)
    for number in range(2):
        entrusted.add(news(number))
    assert len(entrusted) == 2
    entrusted.add(news(2))
    assert len(entrusted) == 1
    for number in range(3, 6):  # the next look is at the fifth
        entrusted.add(news(number))
    assert [message.source for message in entrusted.take()] == [1, 3, 4, 5]
    assert entrusted.take() == []
