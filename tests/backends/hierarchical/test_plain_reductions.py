"""Kept plans of all_reduces have the same results as plans made for one call, in any order of calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from asynccomm import Comm, ReduceOp
from asynccomm.backends.hierarchical import reductions
from tests.pretended_hosts import comm_on

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


@pytest.mark.parametrize("limit", [1 << 20, 4], ids=["by leaders", "on rails"])
@pytest.mark.parametrize("hosts", ["aabb", "abba", "aaab"])
@pytest.mark.ranks(4)
async def test_results_of_calls_that_take_turns(monkeypatch: pytest.MonkeyPatch, hosts: str, limit: int) -> None:
    monkeypatch.setattr(reductions, "SMALL", limit)
    async with comm_on(monkeypatch, hosts) as comm:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.complex64):
            for _ in range(3):
                for name, call in FORMS.items():
                    if dtype.is_complex and name == "maximum":
                        continue
                    tensor = torch.full((2, 3), float(comm.rank), dtype=dtype)
                    await call(comm, tensor)  # type: ignore[misc]
                    assert tensor.eq(EXPECTED.get(name, 6.0)).all(), (name, dtype)
