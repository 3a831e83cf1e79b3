"""What hints are understood, and what they become."""

from __future__ import annotations

import pytest

from asynccomm import MemoryStore, new_comm

from .conftest import World
from .test_backend import backend_of


async def test_hints_become_the_configuration(world: World) -> None:
    hints = {"max_ctas": "4", "min_ctas": "2", "net_name": "Socket"}
    async with world(2, hints=hints) as comms:
        (config,) = backend_of(comms[1]).nccl.configs
        assert (config.min_ctas, config.max_ctas, config.net_name, config.name) == (2, 4, "Socket", "test")
        assert config.blocking


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"max_ctas": "many"}, "'max_ctas' must be a number, got 'many'"),
        ({"max_ctas": "9" * 5000}, "'max_ctas' must be a number, got '999"),
        ({"blocking": "no"}, "'blocking' must be 0 or 1, got 'no'"),
        ({"connect": "soon"}, "'connect' must be eager or lazy, got 'soon'"),
        ({"side": "nothing"}, "'side' must name a backend for the CPU"),
    ],
)
def test_wrong_hints(hints: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_comm("simulated", store=MemoryStore(), rank=0, size=1, hints=hints)
