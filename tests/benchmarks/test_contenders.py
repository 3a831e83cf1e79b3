"""asynccomm and its peers on the same ranks."""

import asyncio

import pytest

from asynccomm.benchmarks.contenders import measure
from asynccomm.benchmarks.operations import OPS
from asynccomm.benchmarks.rows import OPERATIONS
from asynccomm.testing.local import loopback_world


@pytest.mark.parametrize("op", OPERATIONS)
async def test_every_operation_is_measured(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccomm.benchmarks.rounds.MOST", 3)
    async with loopback_world(2) as comms:
        found = await asyncio.gather(*[measure(comm, OPS[op], 4, [], None, 1) for comm in comms])
    assert found[0].keys() == {"asynccomm"}
    assert found[0]["asynccomm"] > 0
