"""What differs between versions of torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from asynccomm.interop import torch_version


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
