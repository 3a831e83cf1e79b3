"""The advice about kernels that CUDA loads at their first use."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asynccomm import CollectiveTimeoutError
from asynccomm.backends.nccl.kernel_loading import ADVICE, VARIABLE, advice, mode

from .conftest import World
from .simulation import SimulatedStream


def test_modes() -> None:
    assert mode({}) == mode({VARIABLE: "lazy"}) == "LAZY"
    assert mode({VARIABLE: "Eager"}) == "EAGER"
    assert advice({}) == ADVICE
    assert not advice({VARIABLE: "EAGER"})


@pytest.mark.parametrize("setting", [None, "EAGER"])
@pytest.mark.parametrize("late", [False, True])
async def test_a_timeout_of_an_operation_that_all_ranks_have_called(
    world: World, monkeypatch: pytest.MonkeyPatch, setting: str | None, late: bool
) -> None:
    if setting is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, setting)
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
        advised = not late and setting is None
        assert getattr(caught.value, "__notes__", []) == ([ADVICE] if advised else [])
        await asyncio.gather(*works, return_exceptions=True)
        stuck.set()


async def test_nothing_is_advised_where_the_ranks_were_not_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    async with world(2, timeout=20.0) as comms:
        await asyncio.gather(*(comm.all_reduce(torch.ones(7)) for comm in comms))
        monkeypatch.setattr(comms[1]._session, "reporter", None)
        with pytest.raises(CollectiveTimeoutError) as caught:
            await comms[1].all_reduce(torch.ones(7), timeout=0.2)
        assert not getattr(caught.value, "__notes__", [])
