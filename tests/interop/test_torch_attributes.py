"""All that torch's ProcessGroup and Backend have, asked of a group of ours and of one of gloo.

Each attribute has the same value, or raises the same type of error, or is listed with its reason. No answer of ours is
an error of the internals of either side.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from tests.interop.world import world

CPU = torch.device("cpu")
INTERNAL = (RecursionError, AttributeError, AssertionError, KeyError, IndexError, NameError)

#: arguments, where a call needs them
GIVEN: dict[str, tuple[Any, ...]] = {
    "_add_ephemeral_timeout": (timedelta(seconds=1),),
    "_backend_id": (c10d.ProcessGroup.BackendType.UNDEFINED,),
    "_get_backend": (CPU,),
    "_register_on_completion_hook": (lambda _: None,),
    "_set_default_timeout": (timedelta(seconds=40),),
    "_set_group_desc": ("said",),
    "eager_connect_single_device": (CPU,),
    "get_backend": (CPU,),
    "register_abort_hook": (1, lambda: None),
    "register_post_hook": (1, lambda *_: None),
    "register_pre_hook": (1, lambda *_: None),
    "set_timeout": (timedelta(seconds=40),),
    "shrink": ([], 0, None),
    "supports_tensor_alloc": (CPU,),
    "unregister_abort_hook": (1,),
    "unregister_post_hook": (1,),
    "unregister_pre_hook": (1,),
}

#: the same, for groups only
OF_GROUPS: dict[str, tuple[Any, ...]] = {"_start_coalescing": (CPU,), "_end_coalescing": (CPU,)}

#: end the group
ENDING = {"abort", "shutdown"}

#: differ by what a group is called, and by which object it is
IDENTITY = {
    "_backend_id", "_get_backend", "_get_backend_name", "_id", "_set_group_name", "_set_group_uid", "boxed",
    "get_backend", "get_group_store", "group_desc", "group_name", "name",
}  # fmt: skip

#: differ for a reason
DIFFERENT = {
    "_device_types": "gloo's come in another order",
    "_start_coalescing": "ours coalesces",
    "allocate_tensor": "a Python group that is its own backend has no arguments to check",
    "get_reconfigure_handle": "ranks of ours cannot be exchanged",
    "options": "of a class of gloo's own",
    "setUsePgForSymmMemRendezvous": "there is no symmetric memory over a Python group",
    "supports_coalescing": "ours coalesces",
    "supports_reconfigure": "ranks of ours cannot be exchanged",
}


def answer(kind: type, asked: Any, name: str) -> Any:
    """The value of an attribute, or what a call of it gives; the type of the error it raises."""
    try:
        found = getattr(asked, name)
        if callable(found) and not isinstance(found, type):
            found = found(*({**GIVEN, **OF_GROUPS} if kind is c10d.ProcessGroup else GIVEN).get(name, ()))
    except INTERNAL as exc:
        return f"internal error: {exc!r}"
    except Exception as exc:
        return type(exc)
    if isinstance(found, dist.Work):
        found.wait()
        return dist.Work
    return found if isinstance(found, (bool, int, float, str, list, dict, type(None))) else type(found)


def is_error(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Exception)


def walk(kind: type, ours: Any, gloos: Any) -> dict[str, tuple[Any, Any]]:
    """By name, what both answer."""
    names = [name for name in sorted(vars(kind)) if not name.startswith(("__", "_pybind"))]
    return {name: (answer(kind, ours, name), answer(kind, gloos, name)) for name in names if name not in ENDING}


@pytest.mark.filterwarnings("ignore")  # torch's own about names that it will drop
@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", [c10d.ProcessGroup, c10d.Backend], ids=["ProcessGroup", "Backend"])
async def test_all_attributes(kind: type) -> None:
    with world(label=kind.__name__):
        ours: Any = dist.new_group()
        gloos: Any = dist.new_group(backend="gloo")
        if kind is c10d.Backend:
            ours, gloos = ours._get_backend(CPU), gloos._get_backend(CPU)
        answers = walk(kind, ours, gloos)
        internal = {name: found for name, (found, _) in answers.items() if str(found).startswith("internal error")}
        assert not internal
        unlike = {name: pair for name, pair in answers.items() if pair[0] != pair[1]}
        assert not {name: unlike[name] for name in unlike.keys() - IDENTITY - DIFFERENT.keys()}
        errors = [each for name in unlike.keys() & IDENTITY for each in unlike[name] if is_error(each)]
        assert not errors


@pytest.mark.ranks(1)
async def test_what_a_group_supports() -> None:
    with world() as group:
        backend = group._get_backend(CPU)
        assert backend.supports_splitting
        for asked in (group, backend):
            for name in ("supports_window", "supports_reconfigure", "supports_shrinking", "supports_time_estimate"):
                if hasattr(type(asked), name):
                    assert getattr(asked, name) is False, name
        for name in ("_supports_window", "_supports_reconfigure"):
            if hasattr(dist.distributed_c10d, name):
                assert getattr(dist.distributed_c10d, name)(group) is False
        with pytest.raises(RuntimeError, match="without _start_coalescing"):
            group._end_coalescing(CPU)
        group._enable_collectives_timing()
