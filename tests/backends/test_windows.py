"""The part of a window that one rank gives."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from asynccomm.backends.windows import LocalPart, SignalWaits, accumulate, put
from asynccomm.ops import WindowInfo
from asynccomm.ops.validation import CommInfo

INFO = WindowInfo(CommInfo("c", 0, 2, torch.device("cpu")), 0, (1 << 12, 0), 4)


def test_memory_and_signals_are_zero_at_first() -> None:
    part = LocalPart(INFO, 0)
    assert part.memory.numel() == 1 << 12
    assert not part.memory.count_nonzero()
    assert [part.load(slot) for slot in range(part.count)] == [0] * 4
    assert LocalPart(INFO, 1).memory.numel() == 0


def test_accumulates_and_added_signals_of_threads_are_all_counted() -> None:
    part = LocalPart(INFO, 0)

    def run() -> None:
        for _ in range(200):
            part.accumulate(8, torch.ones(100))
            part.signal(1, 2, add=True)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert part.memory[8:408].view(torch.float32).tolist() == [800.0] * 100
    assert part.load(1) == 1600


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.uint64, torch.bool])
def test_sums_are_those_of_the_collectives(dtype: torch.dtype) -> None:
    place = torch.ones(6, dtype=torch.uint8).to(dtype)
    accumulate(place, torch.tensor([[0, 1, 2], [3, 0, 1]], dtype=torch.uint8).to(dtype))
    expected = torch.tensor([1, 2, 3, 4, 1, 2], dtype=torch.uint8).to(dtype)
    assert torch.equal(place.view(torch.uint8), expected.view(torch.uint8))


def test_a_put_from_overlapping_memory_writes_the_old_values() -> None:
    memory = torch.arange(100.0)
    put(memory[1:], memory[:-1])
    assert memory.tolist() == [0.0, *range(99)]


def test_waits_that_have_ended_otherwise_are_dropped() -> None:
    class Ended:
        op = None

        class work:
            settled, started = 0, 0.0

            @classmethod
            def done(cls) -> bool:
                return True

            @classmethod
            def settle(cls) -> None:
                cls.settled += 1

    waits = SignalWaits(lambda slot: 0)
    ended: Any = Ended()
    waits.add(ended)
    assert waits
    waits.look()
    assert not waits
