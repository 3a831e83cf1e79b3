"""The hierarchical backend on pretended hosts: the conformance suite, placing, equal bits."""

import pytest
import torch

from asynccomm import new_comm
from asynccomm.testing import check_backend
from tests.pretended_hosts import HINTS, LAYOUTS, comm_on, pretend


async def conform(monkeypatch: pytest.MonkeyPatch, layout: str, only: list[str] | None = None) -> None:
    pretend(monkeypatch, LAYOUTS[layout])
    await check_backend(lambda name: new_comm("hierarchical", name=name, timeout=50, hints=HINTS), only=only)


@pytest.mark.ranks(4, timeout=240)
async def test_conformance(monkeypatch: pytest.MonkeyPatch) -> None:
    await conform(monkeypatch, "2x2")


@pytest.mark.ranks(4, timeout=240)
async def test_conformance_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    await conform(monkeypatch, "mixed")


@pytest.mark.ranks(4, timeout=240)
async def test_conformance_uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    await conform(monkeypatch, "3+1")


@pytest.mark.ranks(4)
async def test_simple(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, LAYOUTS["2x2"]) as comm:
        t = torch.ones(3) * (comm.rank + 1)
        await comm.all_reduce(t)
        assert t.tolist() == [10.0] * 3
        big = torch.ones(1 << 23) * (comm.rank + 1)
        await comm.all_reduce(big)
        assert big.min() == big.max() == 10
