"""Trainers and servers in one event loop, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import Comm
from asynccomm.weights import Publisher, Server, Updates, transmission
from tests.waiting import until

LIMIT = 20.0
_served: list[tuple[str, Served]] = []  # with the name of the publisher


def state(value: float = 0.0, *, tensors: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {f"t{number}": torch.full((2, 3), value, dtype=dtype) for number in range(tensors)}


def fill(tensors: dict[str, Tensor], value: float) -> None:
    for tensor in tensors.values():
        tensor.fill_(value)


def content(tensors: dict[str, Tensor]) -> float:
    """The one value of all elements."""
    values = {float(edge) for tensor in tensors.values() for edge in torch.aminmax(tensor)}
    assert len(values) == 1, values
    return values.pop()


class Served:
    """A server whose updates are taken by a task."""

    def __init__(self, comm: Comm, tensors: Any, *, automatic: bool = True, **options: Any) -> None:
        self.tensors = tensors
        self.server = Server(tensors, store=comm, **{"timeout": 10, **options})
        self.updates: Updates = self.server.updates(automatic=automatic)
        self.versions: list[int] = []
        self.infos: list[object] = []
        self.error: Exception | None = None
        self._task = asyncio.ensure_future(self._take())
        _served.append((options.get("name", "weights"), self))

    async def _take(self) -> None:
        try:
            async with self.updates:
                async for update in self.updates:
                    update.apply()
                    self.versions.append(update.version)
                    self.infos.append(update.info)
        except Exception as exc:
            self.error = exc

    async def reached(self, version: int) -> None:
        async with asyncio.timeout(LIMIT):
            while version not in self.versions and not self._task.done():
                await asyncio.sleep(0)
        assert version in self.versions, self.error

    def is_here(self) -> bool:
        """Whether it is of the running test."""
        return self._task.get_loop() is asyncio.get_running_loop()

    async def end(self) -> None:
        async with asyncio.timeout(LIMIT):
            await asyncio.wait([self._task])

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def publishers(comms: list[Comm], states: list[Any], **options: Any) -> AsyncIterator[list[Publisher]]:
    """A publisher on each trainer; at the end its servers end, too."""
    made = [Publisher(comm, each, **{"timeout": 10, **options}) for comm, each in zip(comms, states, strict=True)]
    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*(publisher.__aenter__() for publisher in made))
        try:
            yield made
        finally:
            await asyncio.gather(*(publisher.__aexit__(None, None, None) for publisher in made))
            name = options.get("name", "weights")
            await asyncio.gather(*(each.end() for other, each in _served if other == name and each.is_here()))
            _served[:] = [entry for entry in _served if entry[0] != name and entry[1].is_here()]


class Gate:
    """Stops the trainers' copies into messages, from one of them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.open = asyncio.Event()
        self._left = number
        self._waiting = 0
        self._aside = transmission.aside
        monkeypatch.setattr(transmission, "aside", self._gated)

    async def blocked(self, count: int) -> None:
        """Wait until ``count`` copies have been stopped."""
        await until(lambda: self._waiting == count)

    async def _gated(self, function: Any, nbytes: int, device: torch.device) -> None:
        if function.func is transmission.pack:
            self._left -= 1
            if self._left < 0:
                self._waiting += 1
                await self.open.wait()
        await self._aside(function, nbytes, device)
