"""Fences: that they exist and can be used; order itself shows between processes only."""

import os
import threading

import pytest

from asynccomm.backends.shm import fence
from asynccomm.backends.shm.fence import Fence
from asynccomm.backends.shm.segment import Segment, create
from tests.forking import fork


@pytest.mark.parametrize("in_order", [True, False])
def test_again_and_again(monkeypatch: pytest.MonkeyPatch, in_order: bool) -> None:
    monkeypatch.setattr(fence, "_STORES_IN_ORDER", in_order)
    one = Fence()
    for _ in range(1000):
        one.full()
        one.order()


def test_each_thread_with_its_own() -> None:
    def many() -> None:
        mine = Fence()
        for _ in range(10_000):
            mine.full()

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_of_two_that_meet_one_sees_the_other() -> None:
    """Each says "here" and then looks for the other: without a fence in between, both may see nobody."""
    rounds = 3000
    fd = create(4096)
    words = Segment(fd, 4096).words
    os.close(fd)
    ready, here, seen = 0, 128, 256  # a line apart for each of the two

    def wait_for(place: int, number: int) -> int:
        while words[place] < number:
            os.sched_yield()
        return words[place]

    def take_part(me: int) -> int:
        mine, other, fence, nobody_seen = 16 * me, 16 * (1 - me), Fence(), 0
        for number in range(1, rounds + 1):
            words[ready + mine] = number
            wait_for(ready + other, number)
            words[here + mine] = number
            fence.full()
            saw = words[here + other] == number
            words[seen + mine] = 2 * number + saw
            nobody_seen += wait_for(seen + other, 2 * number) == 2 * number and not saw
        return nobody_seen

    pid = fork()
    if pid == 0:
        os._exit(min(take_part(1), 255))
    assert take_part(0) == 0
    assert os.waitpid(pid, 0)[1] == 0
