"""Events are used again, and the pool is bounded."""

from __future__ import annotations

from asynccomm.backends.nccl.event_pool import EventPool


class Made:
    """Makes events."""

    def __init__(self) -> None:
        self.made: list[object] = []

    def make(self) -> object:
        self.made.append(object())
        return self.made[-1]


def test_the_pool_uses_events_again() -> None:
    made = Made()
    pool = EventPool(made.make)
    first = pool.take()
    assert pool.take() is not first
    pool.give(first)
    assert pool.take() is first
    assert len(made.made) == 2


def test_the_pool_is_bounded() -> None:
    made = Made()
    pool = EventPool(made.make, limit=3)
    taken = [pool.take() for _ in range(5)]
    for event in taken:
        pool.give(event)
    again = [pool.take() for _ in range(5)]
    assert again[:3] == taken[:1:-1]
    assert again[3:] == made.made[5:], "no more than three were kept"
