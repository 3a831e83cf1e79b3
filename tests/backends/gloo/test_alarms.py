"""Alarms in a ring of ranks. What they are for is in test_predictions.py."""

from __future__ import annotations

import threading
from collections.abc import Callable

from asynccomm.backends.gloo import alarms as module
from asynccomm.backends.gloo.alarms import Alarms
from tests.backends.gloo.network import Network
from tests.waiting import until


class Ring:
    def __init__(self, size: int) -> None:
        self.network = Network()
        self.raised: list[tuple[int, int]] = []
        self.alarms = [
            Alarms(self.network.of(rank), f"rank-{rank}", rank, size, self._taken_by(rank)) for rank in range(size)
        ]

    def _taken_by(self, rank: int) -> Callable[[int], object]:
        return lambda place: self.raised.append((rank, place))

    def close(self) -> None:
        for alarms in self.alarms:
            alarms.close(10)


async def test_an_alarm_reaches_every_rank_once() -> None:
    ring = Ring(4)
    for alarms in ring.alarms:
        alarms.listen()
        alarms.listen()
    ring.alarms[2].tell(7)
    await until(lambda: len(ring.raised) == 4)  # it comes back to where it was raised
    assert sorted(ring.raised) == [(rank, 7) for rank in range(4)]
    assert len(ring.network.sent) == 4
    ring.close()
    await until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("rank-")])


async def test_an_alarm_waits_for_a_rank_that_does_not_listen_yet() -> None:
    ring = Ring(2)
    ring.alarms[0].tell(1)
    ring.alarms[0].tell(2)
    assert not ring.raised
    ring.alarms[1].listen()
    await until(lambda: ring.raised == [(1, 1), (1, 2)])
    ring.close()


async def test_alarms_of_several_ranks_are_each_passed_on_once() -> None:
    ring = Ring(3)
    for alarms in ring.alarms:
        alarms.listen()
        alarms.tell(5)
    await until(lambda: len(ring.raised) == 3)
    assert len(ring.network.sent) == 3
    ring.close()


async def test_no_memory_is_kept_of_old_alarms() -> None:
    ring = Ring(2)
    for place in range(module.REMEMBERED + 10):
        ring.alarms[0].tell(place)
    assert len(ring.alarms[0]._passed_on) == module.REMEMBERED
    ring.close()


async def test_a_closed_one_tells_nothing() -> None:
    ring = Ring(2)
    ring.close()
    ring.alarms[0].listen()
    ring.alarms[0].tell(1)
    assert not ring.network.sent
    await until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("rank-")])
