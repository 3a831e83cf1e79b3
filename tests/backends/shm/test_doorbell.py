"""Waking other ranks: whom, when, and when not."""

import os
from collections.abc import Iterator

import pytest

from asynccomm.backends.shm.doorbell import Bell, Bells
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.layout import Layout


class World:
    def __init__(self, size: int) -> None:
        self.layout = Layout(size, 64 * size, 4, 1024)
        self.words = memoryview(bytearray(self.layout.total)).cast("Q")
        self.eventfds = [(os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)) for _ in range(size)]
        self.ranks = [Bells(rank, self.layout, self.words, Fence(), self.eventfds) for rank in range(size)]

    def rung(self, rank: int, bell: Bell) -> int:
        """How often since the last look."""
        try:
            return os.eventfd_read(self.eventfds[rank][bell])
        except BlockingIOError:
            return 0

    def close(self) -> None:
        for pair in self.eventfds:
            for fd in pair:
                os.close(fd)


@pytest.fixture
def world() -> Iterator[World]:
    made = World(3)
    yield made
    made.close()


def test_nobody_who_is_awake_is_rung(world: World) -> None:
    world.ranks[0].ring_all()
    world.ranks[0].ring(1)
    assert not any(world.rung(rank, bell) for rank in range(3) for bell in Bell)


@pytest.mark.parametrize("bell", Bell)
def test_a_sleeper_is_rung_once_by_the_bell_it_asked_for(world: World, bell: Bell) -> None:
    world.ranks[1].arm(bell)
    for _ in range(3):
        world.ranks[0].ring_all()
    assert world.rung(1, bell) == 1
    assert world.rung(1, Bell(1 - bell)) == 0
    assert world.rung(2, bell) == 0


def test_one_can_be_rung_alone(world: World) -> None:
    for rank in (1, 2):
        world.ranks[rank].arm(Bell.LOOP)
    world.ranks[0].ring(2)
    assert (world.rung(1, Bell.LOOP), world.rung(2, Bell.LOOP)) == (0, 1)


def test_whoever_woke_by_itself_is_not_rung(world: World) -> None:
    world.ranks[1].arm(Bell.LOOP)
    world.ranks[1].arm(Bell.WORKER)
    world.ranks[1].disarm()
    world.ranks[0].ring_all()
    assert not any(world.rung(1, bell) for bell in Bell)


def test_a_rank_can_ring_its_own_loop(world: World) -> None:
    world.ranks[2].ring_own_loop()
    assert (world.rung(2, Bell.LOOP), world.rung(2, Bell.WORKER)) == (1, 0)


def test_a_bell_that_is_cleared_late_takes_no_other_away(world: World) -> None:
    """Rank 0 has seen that rank 1 sleeps on one bell, and gets to clearing it when that sleeps on the other."""
    real = world.words

    class Slow:
        def __getitem__(self, i: int) -> int:
            value = real[i]
            if value:
                world.ranks[1].disarm()
                world.ranks[1].arm(Bell.WORKER)
            return value

        def __setitem__(self, i: int, value: int) -> None:
            real[i] = value

    world.ranks[1].arm(Bell.LOOP)
    slow = Bells(0, world.layout, Slow(), Fence(), world.eventfds)  # type: ignore[arg-type]
    slow.ring(1)
    assert world.rung(1, Bell.LOOP) == 1
    world.ranks[2].ring(1)  # later news
    assert world.rung(1, Bell.WORKER) >= 1
