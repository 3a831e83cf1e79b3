"""How much a rank can make the coordinator of an agreed order remember."""

from __future__ import annotations

import pytest

from asynccomm.batching.ordering import protocol
from asynccomm.batching.ordering.codec import MAX_TAG, MAX_TEXT, MessageWriter, OrderMessageError, op_request
from asynccomm.batching.ordering.protocol import Announcer, OrderCoordinator

from .mutations import little_memory

LIMIT = 100


REAL = protocol.UNDECIDED


@pytest.fixture(autouse=True)
def _lower_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "UNDECIDED", LIMIT)


def announced(count: int, tag: str = "tag") -> bytes:
    announcer: Announcer[int] = Announcer()
    for _ in range(count):
        announcer.issue(tag, (1, 2), "barrier()", 0, 0)
    message = announcer.message()
    assert message is not None
    return message


def knowing() -> OrderCoordinator:
    """One that knows an operation by the id 0, as all ranks do."""
    coordinator = OrderCoordinator(2)
    for rank in range(2):
        coordinator.hear(rank, announced(1))
    assert coordinator.message() is not None
    return coordinator


def test_the_limit_is_far_above_what_is_decided_together() -> None:
    assert REAL >= 32 * 4096


def test_ids_in_a_row_take_no_memory() -> None:
    """64 MiB of them would be two thousand million announcements."""
    coordinator = knowing()
    with (
        little_memory(64 << 20),
        pytest.raises(OrderMessageError, match=f"more than {LIMIT} operations that are undecided"),
    ):
        coordinator.hear(1, b"\4" * (16 << 20))  # the id 0, again and again


def test_nothing_of_what_is_too_much_is_taken() -> None:
    coordinator = OrderCoordinator(2)
    with pytest.raises(OrderMessageError):
        coordinator.hear(1, announced(LIMIT + 1))
    assert coordinator.undecided is None
    coordinator.hear(1, announced(LIMIT))
    with pytest.raises(OrderMessageError):
        coordinator.hear(1, announced(1))


@pytest.mark.parametrize("rank", [0, 1])
def test_messages_that_never_end(rank: int) -> None:
    coordinator = OrderCoordinator(2)
    with pytest.raises(OrderMessageError, match="undecided"):
        for turn in range(LIMIT + 1):
            coordinator.hear(rank, announced(1, tag=str(turn)))
    coordinator.hear(1 - rank, announced(1, tag="0"))  # the others are heard
    assert coordinator.message() is not None


def test_what_is_decided_does_not_count() -> None:
    coordinator = OrderCoordinator(2)
    for _ in range(5):
        for rank in range(2):
            coordinator.hear(rank, announced(LIMIT))
        assert coordinator.message() is not None
    coordinator.hear(1, announced(LIMIT))
    with pytest.raises(OrderMessageError):
        coordinator.hear(1, announced(1))


def test_a_description_is_as_long_as_its_writer_may_make_it() -> None:
    writer = MessageWriter()
    writer.announced(op_request("t" * MAX_TAG, (0, 0), "ä" * (2 * MAX_TEXT), 0))
    OrderCoordinator(2).hear(1, writer.written())
    writer = MessageWriter()
    writer.announced(("t", (0, 0), "x" * (MAX_TEXT + 1), 0))
    with pytest.raises(OrderMessageError, match="a text of 1025 characters"):
        OrderCoordinator(2).hear(1, writer.written())
