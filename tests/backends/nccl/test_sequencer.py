"""Who is last, and who is next."""

from __future__ import annotations

import random
import threading

from asynccomm.backends.nccl.sequencer import Sequencer


def test_turns_come_as_they_were_announced() -> None:
    turns = Sequencer()
    first, second, third = (turns.announce("line") for _ in range(3))
    done: list[int] = []
    turns.ready(third, lambda: done.append(3))
    turns.ready(second, lambda: done.append(2))
    assert not done
    turns.ready(turns.announce("another line"), lambda: done.append(0))
    turns.ready(first, lambda: done.append(1))
    assert done == [0, 1, 2, 3]


def test_turns_of_many_threads() -> None:
    turns = Sequencer()
    count = 400
    announced = [turns.announce(None) for _ in range(count)]
    done: list[int] = []
    order = list(range(count))
    random.Random(0).shuffle(order)

    def some(mine: list[int]) -> None:
        for i in mine:
            turns.ready(announced[i], lambda i=i: done.append(i))  # type: ignore[misc]

    threads = [threading.Thread(target=some, args=(order[k::8],)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == list(range(count))
