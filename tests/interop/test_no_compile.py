from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import asynccomm.interop.torch_backend  # noqa: F401  # registers the backend
from asynccomm.interop.no_compile import uncompiled

compiled: Any = torch.compile(backend="eager")


@uncompiled
class Ours:
    def traced(self) -> bool:
        return self._traced()

    def _traced(self) -> bool:
        return torch.compiler.is_compiling()


class Other:
    def traced(self) -> bool:
        return torch.compiler.is_compiling()


def test_methods_are_not_traced() -> None:
    @compiled
    def run(thing: Any, x: Tensor) -> tuple[Tensor, bool]:
        y = x + 1
        found = thing.traced()
        return y * 2, found

    for thing, traced in [(Ours(), False), (Other(), True)]:
        found = run(thing, torch.ones(2))
        assert (found[0].tolist(), found[1]) == ([4, 4], traced)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # torch 2.11's own options
def test_compiled_functions_call_collectives() -> None:
    @compiled
    def run(x: Tensor) -> Tensor:
        y = x * 2
        work: Any = dist.all_reduce(y, async_op=True)
        work.wait()
        work = dist.broadcast(y, 0, async_op=True)
        work.get_future().wait()
        every = [torch.zeros(2)]
        dist.all_gather(every, y)
        dist.barrier()
        return y + every[0]

    dist.init_process_group("asynccomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for value in (1.0, 2.0):
            assert run(torch.full((2,), value)).tolist() == [4 * value, 4 * value]
    finally:
        dist.destroy_process_group()
