"""The lock that needs no atomic instruction."""

from __future__ import annotations

import os
import sys
import threading
from array import array

import pytest

from asynccomm.backends.shm.bakery import BakeryLock
from asynccomm.backends.shm.fence import Fence


def locks(size: int) -> tuple[memoryview, list[BakeryLock]]:
    words = memoryview(array("Q", [0] * (2 * size + 4)))
    return words, [BakeryLock(words, 3, rank, size, Fence()) for rank in range(size)]


def test_a_free_lock_is_held_at_once_and_leaves_no_trace() -> None:
    words, (lock, _) = locks(2)
    for _ in range(3):
        lock.take()
        assert lock.held()
        lock.leave()
    assert not any(words)


def test_turns_come_in_the_order_of_the_tickets() -> None:
    _, (one, two, three) = locks(3)
    two.take()
    one.take()
    three.take()
    assert [lock.held() for lock in (one, two, three)] == [False, True, False]
    two.leave()
    assert [lock.held() for lock in (one, three)] == [True, False]
    one.leave()
    assert three.held()


def test_of_equal_tickets_that_of_the_lower_rank_counts() -> None:
    words, (one, two) = locks(2)
    words[5] = words[6] = 1  # both have chosen at the same time
    assert [one.held(), two.held()] == [True, False]


def test_a_rank_that_is_choosing_is_waited_for() -> None:
    words, (_, two) = locks(2)
    two.take()
    words[3] = 1  # may come out with the same ticket, and so ahead
    assert not two.held()
    words[3] = 0
    assert two.held()


def test_a_place_in_the_queue_can_be_given_up() -> None:
    _, (one, two) = locks(2)
    one.take()
    two.take()
    one.leave()
    assert two.held()


@pytest.mark.parametrize("size", [2, 5])
def test_only_one_rank_is_in_the_section(size: int) -> None:
    _, all_locks = locks(size)
    inside, counted, wrong = [0], [0], [0]

    def run(lock: BakeryLock) -> None:
        for _ in range(150):
            lock.take()
            while not lock.held():
                os.sched_yield()
            inside[0] += 1
            wrong[0] += inside[0] != 1
            before = counted[0]
            os.sched_yield()
            counted[0] = before + 1
            inside[0] -= 1
            lock.leave()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(lock,)) for lock in all_locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert (counted[0], wrong[0]) == (150 * size, 0)


def test_a_wait_for_a_turn_ends_with_the_turn_or_with_what_it_serves() -> None:
    words, (one, two) = locks(2)
    one.take()
    two.take()
    looks = iter([False, False, True])
    assert not two.wait(lambda: next(looks))
    one.leave()
    assert not any(words)  # the place in the queue was given up
    one.take()
    two.take()
    thread = threading.Timer(0.005, one.leave)
    thread.start()
    assert two.wait(lambda: False)
    two.leave()
    thread.join()
