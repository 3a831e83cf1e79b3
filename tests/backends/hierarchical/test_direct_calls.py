"""Small all_reduces whose first step begins before anything else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm import AsyncCommError, ReduceOp, Work
from asynccomm.backends.hierarchical.direct_calls import DirectAllReduces
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.observe.watchers import Watcher
from asynccomm.ops import Call
from tests.ordinary_path import noted
from tests.pretended_hosts import comm_on

REPEATED = 5


def skip_unless_built() -> None:
    if isinstance(load_core(), CoreUnavailable):
        pytest.skip("the fast path is not built")


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abba"])
@pytest.mark.parametrize("name", ["SUM", "AVG", "MAX"])
@pytest.mark.ranks(4)
async def test_repeated_calls_are_direct(monkeypatch: pytest.MonkeyPatch, hosts: str, name: str) -> None:
    skip_unless_built()
    submitted = noted(monkeypatch)
    async with comm_on(monkeypatch, hosts) as comm:
        reduction = getattr(ReduceOp, name)
        expected = {"SUM": 10.0, "AVG": 2.5, "MAX": 4.0}[name]
        before = comm.statistics().submitted
        works = []
        for number in range(REPEATED):
            tensor = torch.full((3,), 1.0 + comm.rank)
            works.append(comm.all_reduce(tensor, reduction))
            assert works[-1].seq == works[0].seq + number
            assert await works[-1] is tensor
            assert tensor.tolist() == [expected] * 3
        assert comm.statistics()[:2] == (before + REPEATED, 0)
        direct = hosts.count(hosts[comm.rank]) > 1
        assert isinstance(comm._fast, DirectAllReduces) is direct
        if direct:
            # the fast path leaves a step alone while another thread drives the lane, which is rare
            assert len([work for work in works if work in submitted]) < REPEATED


@pytest.mark.ranks(4)
async def test_works_not_awaited_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, "aabb") as comm:
        await comm.all_reduce(torch.zeros(2))
        for _ in range(REPEATED):
            tensor, other = torch.ones(2), torch.full((2,), 1.0 + comm.rank)
            works = [comm.all_reduce(tensor), comm.all_reduce(other), comm.all_reduce(tensor), comm.barrier()]
            for work in works:
                await work
            assert tensor.tolist() == [16.0, 16.0]
            assert other.tolist() == [10.0, 10.0]


@pytest.mark.ranks(4)
async def test_unusual_calls_take_the_ordinary_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_unless_built()
    submitted = noted(monkeypatch)
    async with comm_on(monkeypatch, "aabb") as comm:
        for _ in range(2):
            await comm.all_reduce(torch.zeros(4))
        plain = torch.ones(4)
        out = torch.zeros(4)
        strided = torch.ones(8)[::2]
        negated = torch.complex(torch.zeros(4), torch.full((4,), -1.0)).conj().imag
        with torch.inference_mode():
            inferred = torch.ones(4)
        calls = [
            lambda: comm.all_reduce(plain, out=out),
            lambda: comm.all_reduce(plain, timeout=40),
            lambda: comm.all_reduce(strided),
            lambda: comm.all_reduce(negated),
            lambda: comm.all_reduce(inferred),
            lambda: comm.all_reduce(torch.ones(4), ReduceOp.PREMUL_SUM(2.0)),
        ]
        for call in calls:
            work = call()
            assert work in submitted
            await work
        for tensor, expected in ((out, 4.0), (plain, 4.0), (strided, 4.0), (negated, 4.0), (inferred, 4.0)):
            assert tensor.tolist() == [expected] * 4
        held = torch.ones(4)
        async with comm.coalesce():
            work = comm.all_reduce(held)
            assert not work.done()
        await work
        assert held.tolist() == [4.0] * 4
        with pytest.raises(TypeError, match="tensor"):
            comm.all_reduce([1.0, 2.0])  # type: ignore[arg-type]


@pytest.mark.ranks(4)
async def test_a_direct_call_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, "aabb") as comm:
        for _ in range(2):
            await comm.all_reduce(torch.zeros(2))
        if comm.rank != 3:
            comm.set_timeout(0.5)
            with pytest.raises(AsyncCommError, match=r"not arrived: ranks \[3\]"):  # its own, or another rank's
                await comm.all_reduce(torch.zeros(2))
        else:
            with pytest.raises(AsyncCommError):
                await comm.recv(torch.zeros(1), 0)  # which is never sent


class Watched(Watcher):
    def __init__(self) -> None:
        self.works: list[Work[Any]] = []
        self.inputs: list[Tensor] = []

    def called(self, call: Call, work: Work[Any]) -> None:
        self.works.append(work)
        self.inputs += call.inputs


@pytest.mark.ranks(4)
async def test_watchers_are_told_of_direct_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    async with comm_on(monkeypatch, "aabb") as comm:
        comm._submitter.watch(watched)
        works, results = [], []
        for _ in range(REPEATED):
            works.append(comm.all_reduce(torch.zeros(2)))
            results.append(await works[-1])
        comm._submitter.unwatch(watched)
    assert watched.works == works
    assert all(given is result for given, result in zip(watched.inputs, results, strict=True))


@pytest.mark.ranks(4)
async def test_direct_calls_can_be_waited_for_by_a_blocked_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with comm_on(monkeypatch, "aabb") as comm:
        await comm.all_reduce(torch.zeros(2))

        def wait() -> list[float]:
            tensor = torch.ones(2)
            for _ in range(REPEATED):
                comm.all_reduce(tensor).wait()
            return tensor.tolist()

        assert await asyncio.to_thread(wait) == [4.0**REPEATED] * 2
