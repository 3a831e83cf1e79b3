"""What differs between versions of torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

import asynccomm.interop.torch_backend  # noqa: F401  # registers the backend
from asynccomm.interop import torch_version
from asynccomm.interop.torch_version import uncompiled

compiled: Any = torch.compile(backend="eager")


def options(**fields: Any) -> Any:
    made = dist.AllreduceOptions()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_python_backends_are_used_from_where_they_are_taken() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert torch_version.PYTHON_BACKENDS or version < (2, 14)
    assert not (torch_version.PYTHON_BACKENDS and version <= (2, 13))


def test_time_limits() -> None:
    assert torch_version.time_limit(None) is None
    assert torch_version.time_limit(options()) is None
    assert torch_version.time_limit(options(timeout=timedelta(seconds=2))) == timedelta(seconds=2)
    assert torch_version.checked_limit(timedelta(milliseconds=-1)) is None
    least = torch_version.checked_limit(timedelta(0))
    assert least is not None
    assert timedelta(0) < least < timedelta(seconds=0.001)


def test_a_group_is_made_with_its_store_where_that_works() -> None:
    class Group(c10d.ProcessGroup):  # type: ignore[misc]
        pass

    group = Group(*torch_version.group_arguments(dist.HashStore(), 1, 3))
    assert (group.rank(), group.size()) == (1, 3)
    assert torch_version.group_arguments(None, 1, 3) == (1, 3)


def test_a_class_answers_all_that_a_backend_is_asked() -> None:
    class Group(c10d.ProcessGroup):  # type: ignore[misc]
        supports_splitting = True

        def name(self) -> str:
            return "ours"

    group = torch_version.as_backend(Group)(0, 1)
    assert group.supports_splitting is True
    assert group.supports_shrinking is False
    assert group.supports_tensor_alloc(0) is False
    assert group.Options is c10d.Backend.Options
    for call in (lambda: group.mem_allocator, lambda: group.shrink([0])):
        with pytest.raises(RuntimeError, match="Backend ours does not support"):
            call()
    with pytest.raises(AttributeError):
        _ = group.anything_else


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
