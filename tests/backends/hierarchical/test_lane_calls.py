"""Steps without a submission: all_reduces that a program repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asynccomm import CollectiveMismatchError, Comm
from asynccomm.backends.hierarchical import reductions
from asynccomm.backends.hierarchical.backend import HierarchicalBackend
from asynccomm.backends.hierarchical.lane_calls import LaneCalls, QuickStep, RailCalls
from asynccomm.backends.hierarchical.pipeline import Lane
from tests.pretended_hosts import comm_on

REPEATED = 5


def quick_lanes(comm: Comm) -> list[Lane]:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, HierarchicalBackend)
    return sorted(backend._pipeline._quick)


def noted(monkeypatch: pytest.MonkeyPatch, kind: type[LaneCalls | RailCalls]) -> list[QuickStep | bool]:
    """The results of ``begin`` from now on."""
    taken: list[QuickStep | bool] = []
    begin = kind.begin

    def begun(*arguments: Any) -> QuickStep | bool:
        taken.append(begin(*arguments))
        return taken[-1]

    monkeypatch.setattr(kind, "begin", begun)
    return taken


@pytest.mark.parametrize("limit", [1 << 20, 4], ids=["by leaders", "on rails"])
@pytest.mark.ranks(4)
async def test_steps_of_repeated_calls_need_no_submission(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(reductions, "SMALL", limit)
    monkeypatch.setattr(HierarchicalBackend, "fast_path", lambda self, calls: None)
    inside, between = noted(monkeypatch, LaneCalls), noted(monkeypatch, RailCalls)
    async with comm_on(monkeypatch, "aabb") as comm:
        if Lane.UP not in quick_lanes(comm):
            pytest.skip("the fast path is not built")
        assert quick_lanes(comm) == [*Lane]
        for _ in range(REPEATED):
            tensor = torch.full((3,), 1.0 + comm.rank)
            await comm.all_reduce(tensor)
            assert tensor.tolist() == [10.0] * 3
    assert len(inside) == 2 * REPEATED
    # the fast path leaves a step alone while another thread drives the lane, which is rare
    assert any(inside[::2]), "up"
    assert any(inside[1::2]), "down"
    assert len(between) == (REPEATED if limit == 4 or comm.rank in (0, 2) else 0)
    assert all(between)
    if limit != 4 and comm.rank in (1, 3):
        assert True in inside[::2], "a contribution is given at once"


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.ranks(4)
async def test_a_difference_after_equal_calls_is_named(monkeypatch: pytest.MonkeyPatch, odd: int) -> None:
    async with comm_on(monkeypatch, "aabb") as comm:
        with pytest.raises(CollectiveMismatchError) as caught:
            for _ in range(REPEATED):  # the last may fail, too, where the other host was faster
                await comm.all_reduce(torch.ones(3))
            await comm.all_reduce(torch.ones(4 if comm.rank == odd else 3))
        assert caught.value.seq == REPEATED
        assert {caught.value.op, caught.value.other_op} == {
            "all_reduce(float32[3], SUM)",
            "all_reduce(float32[4], SUM)",
        }
        assert odd in (caught.value.rank, caught.value.other_rank)


@pytest.mark.ranks(4)
async def test_a_difference_between_hosts_after_equal_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, "aabb") as comm:
        with pytest.raises(CollectiveMismatchError) as caught:
            for _ in range(REPEATED):
                await comm.all_reduce(torch.ones(3))
            await comm.all_reduce(torch.ones(4 if comm.rank < 2 else 3))
        assert caught.value.seq == REPEATED
        assert {caught.value.op, caught.value.other_op} == {
            "all_reduce(float32[3], SUM)",
            "all_reduce(float32[4], SUM)",
        }


@pytest.mark.ranks(4)
async def test_many_at_once_and_messages_between(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, "aabb") as comm:
        tensors = [torch.full((3,), float(i)) for i in range(50)]
        works = [comm.all_reduce(tensor) for tensor in tensors]
        for other in range(4):
            if other != comm.rank:
                works.append(comm.send(torch.full((2,), float(comm.rank)), other))
        for other in range(4):
            if other != comm.rank:
                got = torch.zeros(2)
                await comm.recv(got, other)
                assert got.eq(other).all()
        for work in works:
            await work
        assert [tensor.unique().tolist() for tensor in tensors] == [[4.0 * i] for i in range(50)]
