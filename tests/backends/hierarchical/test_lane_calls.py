"""Steps that run in the fast path of shared memory: small all_reduces that a program repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from asynccomm import CollectiveMismatchError, Comm, ReduceOp
from asynccomm.backends.hierarchical.backend import HierarchicalBackend
from asynccomm.backends.hierarchical.lane_calls import Begun, LaneCalls
from asynccomm.backends.hierarchical.pipeline import Lane
from tests.pretended_hosts import comm_on

REPEATED = 5


def fast_lanes(comm: Comm) -> list[Lane]:
    backend = comm.unsafe_get_backend()
    assert isinstance(backend, HierarchicalBackend)
    return sorted(backend._pipeline._fast)


@pytest.mark.ranks(4)
async def test_the_steps_in_the_host_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Begun | None] = []
    begin = LaneCalls.begin

    def noted(calls: LaneCalls, number: int, check: Callable[..., object], tensors: Sequence[Tensor]) -> Begun | None:
        taken.append(begin(calls, number, check, tensors))  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(LaneCalls, "begin", noted)
    async with comm_on(monkeypatch, "aabb") as comm:
        if not fast_lanes(comm):
            pytest.skip("the fast path is not built")
        assert fast_lanes(comm) == [Lane.UP, Lane.DOWN]
        for _ in range(REPEATED):
            tensor = torch.full((3,), 1.0 + comm.rank)
            await comm.all_reduce(tensor)
            assert tensor.tolist() == [10.0] * 3
    assert len(taken) == 2 * REPEATED
    # the fast path leaves a step alone while another thread drives the lane, which is rare
    assert any(each is not None for each in taken[::2]), "up"
    assert any(each is not None for each in taken[1::2]), "down"
    if comm.rank in (1, 3):
        assert Begun(None) in taken[::2], "a contribution is given at once"


FORMS: dict[str, Callable[[Comm, Tensor], object]] = {
    "sum": lambda comm, tensor: comm.all_reduce(tensor),
    "average": lambda comm, tensor: comm.all_reduce(tensor, ReduceOp.AVG),
    "maximum": lambda comm, tensor: comm.all_reduce(tensor, ReduceOp.MAX),
    "product with a factor": lambda comm, tensor: comm.all_reduce(tensor, ReduceOp.PREMUL_SUM(2.0)),
    "tag": lambda comm, tensor: comm.all_reduce(tensor, tag="x"),
    "into another tensor": lambda comm, tensor: comm.all_reduce(tensor.clone(), out=tensor),
    "strides": lambda comm, tensor: comm.all_reduce(tensor.t()),
}
EXPECTED = {"average": 1.5, "maximum": 3.0, "product with a factor": 12.0}


@pytest.mark.parametrize("hosts", ["aabb", "abba", "aaab"])
@pytest.mark.ranks(4)
async def test_results_of_calls_that_take_turns(monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    async with comm_on(monkeypatch, hosts) as comm:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.complex64):
            for _ in range(3):
                for name, call in FORMS.items():
                    if dtype.is_complex and name == "maximum":
                        continue
                    tensor = torch.full((2, 3), float(comm.rank), dtype=dtype)
                    await call(comm, tensor)  # type: ignore[misc]
                    assert tensor.eq(EXPECTED.get(name, 6.0)).all(), (name, dtype)


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.ranks(4)
async def test_a_difference_after_equal_calls_is_named(monkeypatch: pytest.MonkeyPatch, odd: int) -> None:
    async with comm_on(monkeypatch, "aabb") as comm:
        for _ in range(REPEATED):
            await comm.all_reduce(torch.ones(3))
        with pytest.raises(CollectiveMismatchError) as caught:
            await comm.all_reduce(torch.ones(4 if comm.rank == odd else 3))
        assert caught.value.seq == REPEATED
        assert {caught.value.op, caught.value.other_op} == {
            "all_reduce(float32[3], SUM)",
            "all_reduce(float32[4], SUM)",
        }
        assert odd in (caught.value.rank, caught.value.other_rank)


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
