"""The advice about settings of CUDA with which operations can wait for ever."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asynccomm import CollectiveTimeoutError
from asynccomm.backends.nccl.cuda_settings import (
    CONNECTIONS_ADVICE,
    LOADING_ADVICE,
    MAX_CONNECTIONS,
    MODULE_LOADING,
    advice,
    max_connections,
    module_loading,
)

from .conftest import World
from .simulation import SimulatedStream


def test_settings() -> None:
    assert module_loading({}) == module_loading({MODULE_LOADING: "lazy"}) == "LAZY"
    assert module_loading({MODULE_LOADING: "Eager"}) == "EAGER"
    assert max_connections({}) == "8"
    assert max_connections({MAX_CONNECTIONS: "1"}) == "1"


def test_advice() -> None:
    assert advice({}) == [LOADING_ADVICE, CONNECTIONS_ADVICE]
    assert advice({MODULE_LOADING: "EAGER"}) == [CONNECTIONS_ADVICE]
    assert advice({MAX_CONNECTIONS: "32"}) == [LOADING_ADVICE]
    assert advice({MODULE_LOADING: "EAGER", MAX_CONNECTIONS: "1"}) == []


@pytest.mark.parametrize("setting", [None, "EAGER"])
@pytest.mark.parametrize("late", [False, True])
async def test_a_timeout_of_an_operation_that_all_ranks_have_called(
    world: World, monkeypatch: pytest.MonkeyPatch, setting: str | None, late: bool
) -> None:
    if setting is None:
        monkeypatch.delenv(MODULE_LOADING, raising=False)
    else:
        monkeypatch.setenv(MODULE_LOADING, setting)
    monkeypatch.delenv(MAX_CONNECTIONS, raising=False)
    async with world(2, timeout=20.0) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(7)) for comm in comms))
        stuck = asyncio.Event()
        for comm in comms:
            stream: SimulatedStream = comm._session.backend._collectives.communicator.stream  # type: ignore[attr-defined]
            stream.attempt(stuck.is_set)
        first, last = comms
        works = [] if late else [first.all_reduce(torch.ones(7))]
        works.append(last.all_reduce(torch.ones(7), timeout=0.2))  # one deadline: the other rank would report its own
        with pytest.raises(CollectiveTimeoutError) as caught:
            await works[-1]
        advices = [LOADING_ADVICE, CONNECTIONS_ADVICE] if setting is None else [CONNECTIONS_ADVICE]
        assert getattr(caught.value, "__notes__", []) == ([] if late else advices)
        await asyncio.gather(*works, return_exceptions=True)
        stuck.set()


async def test_nothing_is_advised_where_the_ranks_were_not_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODULE_LOADING, raising=False)
    async with world(2, timeout=20.0) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(7)) for comm in comms))
        monkeypatch.setattr(comms[1]._session, "reporter", None)
        with pytest.raises(CollectiveTimeoutError) as caught:
            await comms[1].all_reduce(torch.ones(7), timeout=0.2)
        assert not getattr(caught.value, "__notes__", [])
