"""The NCCL backend under the name "simulated": on CPU tensors, with all ranks in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from asynccomm import Comm, MemoryStore, new_comm
from asynccomm.backends import registry
from asynccomm.comm import session

from . import simulation

World = Callable[..., AbstractAsyncContextManager[list[Comm]]]


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "simulated", (simulation.__name__, "SimulatedBackend"))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """``world(size, **settings)``: the comms of all ranks; ``settings`` are SimulatedNccl's and new_comm's."""

    @asynccontextmanager
    async def make(
        size: int, *, native: Any = None, connects: bool = True, hints: dict[str, str] | None = None, **options: Any
    ) -> AsyncIterator[list[Comm]]:
        settings: dict[str, Any] = {"connects": connects}
        if native is not None:
            settings["native"] = native
        monkeypatch.setattr(simulation.SimulatedBackend, "settings", settings)
        store = MemoryStore()
        chosen = {"side": "loopback", **(hints or {})}
        comms = await asyncio.gather(
            *(
                new_comm("simulated", name="test", store=store, rank=rank, size=size, hints=chosen, **options)
                for rank in range(size)
            )
        )
        try:
            yield list(comms)
        finally:
            await asyncio.gather(*(comm.aclose() for comm in comms))
        assert not simulation.SimulatedNccl.comms, "communicators were left open"

    return make


@pytest.fixture
def unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the transport is known to its rank alone, which does not wait for another reason."""
    monkeypatch.setattr(session, "EXPLAIN_SECONDS", 0.01)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[simulation.SimulatedEvent]:
    """All that are recorded."""
    made: list[simulation.SimulatedEvent] = []

    class Recorded(simulation.SimulatedEvent):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(simulation, "SimulatedEvent", Recorded)
    return made
