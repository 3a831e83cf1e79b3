"""A signal stands behind the earlier puts and accumulates of its rank: random programs, on each kind of window."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pytest
import torch

from asynccomm import Comm, new_comm
from asynccomm.testing import loopback_world
from asynccomm.windows.window import Window
from tests.pretended_hosts import HINTS, pretend
from tests.sampling import some

RANKS: Final = 3
SIZES: Final = (1, 7, 1000, 5000, 20000)  # elements: in a request of gloo and beyond, in a call of shm and beyond
INLINE: Final = "16384"  # bytes that shm copies in the call
SEEDS: Final = range(12)
KINDS: Final = {"shm": "aaa", "gloo": "abc", "hierarchical": "aab"}


class Step(NamedTuple):
    """An operation of rank ``origin`` that writes ``numel`` times its number to memory that no other step writes."""

    origin: int
    target: int
    offset: int
    numel: int
    adds: bool
    signals: bool  #: whether a signal follows, with the number of the step

    def value(self, number: int) -> torch.Tensor:
        return torch.full((self.numel,), float(number))


def program(seed: int) -> tuple[list[Step], list[int]]:
    """The steps, numbered from 1 on; and the elements of each rank's memory."""
    chance = random.Random(seed)
    steps, sizes = [], [0] * RANKS
    for _ in range(40):
        origin, target, numel = chance.randrange(RANKS), chance.randrange(RANKS), chance.choice(SIZES)
        steps.append(Step(origin, target, sizes[target], numel, chance.random() < 0.3, chance.random() < 0.4))
        sizes[target] += numel
    return steps, sizes


async def act(window: Window, steps: Sequence[Step]) -> None:
    """The operations of this rank, without waiting for any; a signal to a rank says how far its steps have come."""
    works: list[Any] = []
    for number, step in enumerate(steps, 1):
        if step.origin == window.rank:
            operation = window.accumulate if step.adds else window.put
            works.append(operation(step.value(number), step.target, step.offset))
            if step.signals:
                works.append(window.signal(step.target, step.origin, number))
    await asyncio.gather(*works)


async def look(window: Window, steps: Sequence[Step], origin: int) -> None:
    """Wait for the signals of ``origin``, and read what must be there."""
    seen: list[tuple[int, Step]] = []
    for number, step in enumerate(steps, 1):
        if (step.origin, step.target) != (origin, window.rank):
            continue
        seen.append((number, step))
        if step.signals:
            await window.wait_signal(origin, number)
            for earlier, put in seen:
                memory = window.tensor(None, (put.numel,), torch.float32, put.offset)
                assert torch.equal(memory, put.value(earlier)), f"{put}, at signal {number}"
            seen.clear()


async def run(comm: Comm, seed: int) -> None:
    steps, sizes = program(seed)
    async with await comm.window(4 * sizes[comm.rank], signals=RANKS) as window:
        await asyncio.gather(act(window, steps), *[look(window, steps, origin) for origin in range(RANKS)])


@pytest.mark.parametrize("backend", KINDS)
@pytest.mark.ranks(RANKS)
async def test_puts_are_seen_with_the_signals_behind_them(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    pretend(monkeypatch, KINDS[backend])
    hints = {**({} if backend == "gloo" else {"inline_bytes": INLINE}), **({} if backend == "shm" else HINTS)}
    async with new_comm(backend, name="order", timeout=30, hints=hints) as comm:
        for seed in some(SEEDS, 4):
            await run(comm, seed)


@pytest.mark.parametrize("seed", some(SEEDS, 4))
async def test_puts_are_seen_with_the_signals_behind_them_in_one_process(seed: int) -> None:
    async with loopback_world(RANKS, timeout=30) as comms:
        hub: Any = comms[0].unsafe_get_backend()
        hub.hub.hold()
        over = asyncio.gather(*[run(comm, seed) for comm in comms])
        while not over.done():  # one operation at a time takes effect
            hub.hub.release(1)
            await asyncio.sleep(0)
        await over
