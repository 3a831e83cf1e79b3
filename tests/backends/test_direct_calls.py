"""Calls that a backend may begin once they are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asynccomm import Comm, ReduceOp
from asynccomm.backends.direct_calls import CheckedCalls
from asynccomm.core.callsite import CallSite
from asynccomm.core.work import Work
from asynccomm.ops import AllReduce, Barrier


class Noted(CheckedCalls):
    """Takes no call."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm._submitter, frozenset({AllReduce.of}))
        self.calls: list[tuple[str, CallSite | None]] = []

    def _begin(self, call: Any, site: CallSite | None, started: float) -> Work[Any] | None:
        self.calls.append((str(call.op), site))
        return None


@pytest.mark.ranks(1)
async def test_the_ordinary_path_takes_the_rest(comm: Comm) -> None:
    direct = Noted(comm)
    tensor = torch.ones(2)
    arguments = tensor, ReduceOp.SUM, None
    for timeout, tag in ((None, None), (20, None), (None, "named")):
        assert await direct.submit(timeout, None, tag, AllReduce.of, *arguments) is tensor
    assert await direct.submit(None, None, None, Barrier.of) is None
    with pytest.raises(TypeError, match=r"tensor must be a torch.Tensor"):
        direct.submit(None, None, None, AllReduce.of, 3, *arguments[1:])
    async with comm.coalesce():
        held = direct.submit(None, None, None, AllReduce.of, *arguments)
    await held
    assert [name for name, _ in direct.calls] == ["all_reduce(float32[2], SUM)"]
