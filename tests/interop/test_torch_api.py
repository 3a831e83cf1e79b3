"""Functions of torch.distributed that take a group: on ours they give what they give on a group of gloo.

Each is called with the defaults of torch. It gives the same value or the same type of error, or is listed with its
reason; an error of the internals of either side (RecursionError, AttributeError, AssertionError) is none of these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as private

from tests.interop.world import world

Call = Callable[[Any], Any]
CPU = torch.device("cpu")
INTERNAL = (RecursionError, AttributeError, AssertionError, KeyError, IndexError, NameError)

#: results that differ for a reason
DIFFERENT = {
    "get_backend": "the name of the backend",
    "get_backend_config": "the name of the backend",
    "get_backend_impl": "the backend itself",
    "_get_pg_config": "has the name of the backend, and of the group",
    "_get_process_group_name": "the name of the group",
    "_get_group_tag": "is made of the name of the group",
    "_get_reconfigure_handle": "ranks of ours cannot be exchanged, so there is no handle",
    "_supports_reconfigure": "ranks of ours cannot be exchanged",
    "_device_capability": "the device types come in another order",
    "monitored_barrier": "torch before 2.15 takes it for gloo alone, by the name of the backend",
    "split_group": "torch before 2.15 splits no groups on the CPU, and none of gloo",
    "_group_or_default_group": "the group itself",
    "all_to_all": "gloo has none on the CPU in torch before 2.14",
}


def plain(value: Any) -> Any:
    """What two runs have in common."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dist.Work):
        value.wait()
        return "work"
    return value if isinstance(value, (int, float, str, dict, torch.device, type(None))) else type(value).__name__


def mine(size: int = 2) -> Tensor:
    return torch.arange(float(size)) + 10 * dist.get_rank()


def into(call: Callable[..., Any], output: Any, *arguments: Any, **options: Any) -> Any:
    return plain(call(output, *arguments, **options)), plain(output)


def rooted(call: Callable[..., Any], values: list[Any], **options: Any) -> Any:
    call(*values, **options)
    return [plain(value) for value in values]


def on_root(value: Any) -> Any:
    return value if dist.get_rank() == 0 else None


def to_the_other(group: Any, send: Callable[..., Any], receive: Callable[..., Any], value: Any, room: Any) -> Any:
    """Rank 0 sends ``value``, and rank 1 receives it in ``room``."""
    found = send(value, dst=1, group=group) if dist.get_rank() == 0 else receive(room, src=0, group=group)
    return plain(found), plain(room) if dist.get_rank() else None


def coalesced(group: Any) -> Any:
    tensors = [mine(), mine(3)]
    with private._coalescing_manager(group, None, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    return tensors


def pairs(group: Any) -> Any:
    other, room = 1 - dist.get_rank(), torch.zeros(2)
    operations = [dist.P2POp(dist.isend, mine(), other, group), dist.P2POp(dist.irecv, room, other, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return room


def shape_of(group: Any) -> Any:
    return [group.rank(), group.size()] if group != dist.GroupMember.NON_GROUP_MEMBER else "no member"


def of_two(name: str, output: Callable[[], Any], given: Callable[[], Any]) -> tuple[str, Call]:
    return name, lambda group: into(getattr(dist, name), output(), given(), group=group)


#: functions of a group alone
PRIVATE = [
    "_device_capability", "_get_group_size", "_get_group_tag", "_get_object_coll_device", "_get_pg_config",
    "_get_pg_default_device", "_get_process_group_name", "_get_process_group_store", "_get_process_group_uid",
    "_get_reconfigure_handle", "_group_or_default_group", "_rank_not_in_group", "_supports_reconfigure",
    "_supports_window",
]  # fmt: skip

#: by name of the function; a call with the defaults of torch
CALLS: dict[str, Call] = {
    "all_reduce": lambda g: into(dist.all_reduce, mine(), group=g),
    "all_reduce_coalesced": lambda g: into(dist.all_reduce_coalesced, [mine(), mine(3)], group=g),
    "reduce": lambda g: into(dist.reduce, mine(), 0, group=g)[0],
    "broadcast": lambda g: into(dist.broadcast, mine(), 0, group=g),
    **dict(
        [
            of_two("all_gather", lambda: [torch.zeros(2), torch.zeros(2)], mine),
            of_two("all_gather_coalesced", lambda: [[torch.zeros(2)], [torch.zeros(2)]], lambda: [mine()]),
            of_two("all_gather_into_tensor", lambda: torch.zeros(4), mine),
            of_two("all_gather_single", lambda: torch.zeros(4), mine),
            of_two("reduce_scatter", lambda: torch.zeros(2), lambda: [mine(), mine()]),
            of_two("reduce_scatter_tensor", lambda: torch.zeros(2), lambda: mine(4)),
            of_two("reduce_scatter_single", lambda: torch.zeros(2), lambda: mine(4)),
            of_two("all_to_all", lambda: [torch.zeros(2), torch.zeros(2)], lambda: [mine(), mine()]),
            of_two("all_to_all_single", lambda: torch.zeros(4), lambda: mine(4)),
        ]
    ),
    "gather": lambda g: rooted(dist.gather, [mine(), on_root([torch.zeros(2), torch.zeros(2)]), 0], group=g),
    "gather_single": lambda g: rooted(dist.gather_single, [mine(), on_root(torch.zeros(4)), 0], group=g),
    "gather_into_tensor": lambda g: rooted(dist.gather_into_tensor, [mine(), on_root(torch.zeros(4)), 0], group=g),
    "scatter": lambda g: rooted(dist.scatter, [torch.zeros(2), on_root([mine(), mine() + 1]), 0], group=g),
    "all_gather_object": lambda g: into(dist.all_gather_object, [None, None], {"rank": dist.get_rank()}, group=g),
    "gather_object": lambda g: rooted(dist.gather_object, ["x" * dist.get_rank(), on_root([None, None]), 0], group=g),
    "broadcast_object_list": lambda g: into(dist.broadcast_object_list, [dist.get_rank(), "b"], 0, group=g),
    "scatter_object_list": lambda g: rooted(dist.scatter_object_list, [[None], on_root(["a", "b"]), 0], group=g),
    "send": lambda g: to_the_other(g, dist.send, dist.recv, mine(), torch.zeros(2)),
    "recv": lambda g: to_the_other(g, dist.send, dist.recv, mine(3), torch.zeros(3)),
    "isend": lambda g: to_the_other(g, dist.isend, dist.irecv, mine(), torch.zeros(2)),
    "irecv": lambda g: to_the_other(g, dist.isend, dist.recv, mine(), torch.zeros(2)),
    "send_object_list": lambda g: to_the_other(g, dist.send_object_list, dist.recv_object_list, ["s"], [None]),
    "recv_object_list": lambda g: to_the_other(g, dist.send_object_list, dist.recv_object_list, [1, 2], [0, 0]),
    "batch_isend_irecv": pairs,
    "barrier": lambda g: [dist.barrier(g), dist.barrier(g, device_ids=[0]), plain(dist.barrier(g, async_op=True))],
    "monitored_barrier": lambda g: dist.monitored_barrier(g),
    "get_backend": dist.get_backend,
    "get_backend_config": dist.get_backend_config,
    "get_backend_impl": lambda g: dist.get_backend_impl(g, CPU),
    "get_global_rank": lambda g: dist.get_global_rank(g, 1),
    "get_group_rank": lambda g: dist.get_group_rank(g, 1),
    "get_process_group_ranks": dist.get_process_group_ranks,
    "get_rank": dist.get_rank,
    "get_world_size": dist.get_world_size,
    "get_pg_count": lambda g: dist.get_pg_count() > 1,
    "set_timeout": lambda g: dist.set_timeout(timedelta(seconds=50), g),
    "new_subgroups": lambda g: [shape_of(each) for each in dist.new_subgroups(1, g)[1]],
    "shrink_group": lambda g: dist.shrink_group([1], g),
    "split_group": lambda g: shape_of(dist.split_group(g, [[0, 1]])),
    "_all_gather_base": lambda g: into(private._all_gather_base, torch.zeros(4), mine(), group=g),
    "_reduce_scatter_base": lambda g: into(private._reduce_scatter_base, torch.zeros(2), mine(4), group=g),
    "_coalescing_manager": coalesced,
    "_time_estimator": lambda g: private._time_estimator(g, CPU).__enter__(),
    "_set_pg_timeout": lambda g: private._set_pg_timeout(timedelta(seconds=50), g),
    "_new_window": lambda g: private._new_window(group=g),
    "_canonicalize_group_rank": lambda g: private._canonicalize_group_rank(g, global_rank=1),
    "_get_split_source": lambda g: plain(private._get_split_source(g)),
    **{
        name: lambda g, name=name: plain(getattr(private, name)(g))  # type: ignore[misc]
        for name in [
            "_device_capability",
            "_get_group_size",
            "_get_group_tag",
            "_get_object_coll_device",
            "_get_pg_config",
            "_get_pg_default_device",
            "_get_process_group_name",
            "_get_process_group_store",
            "_get_process_group_uid",
            "_get_reconfigure_handle",
            "_group_or_default_group",
            "_rank_not_in_group",
            "_supports_reconfigure",
            "_supports_window",
        ]
    },
    "_abort_process_group": lambda g: dist.distributed_c10d._abort_process_group(g),
    "destroy_process_group": dist.destroy_process_group,
}

MAKING = {"init_process_group", "new_group", "new_subgroups_by_enumeration"}  # see test_torch_backend


def outcome(name: str, group: Any) -> Any:
    try:
        return plain(CALLS[name](group))
    except INTERNAL as exc:
        return f"internal error: {exc!r}"
    except Exception as exc:
        return type(exc).__name__


def test_every_function_with_a_group_is_called() -> None:
    taking = {
        name
        for name in private.__all__
        if type(function := vars(private)[name]) is FunctionType
        and any("group" in parameter for parameter in inspect.signature(function).parameters)
    }
    assert taking - MAKING <= set(CALLS)


@pytest.mark.filterwarnings("ignore")  # torch's own about names that it will drop
@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", range(6))
async def test_functions_that_take_a_group(part: int) -> None:
    problems = []
    with world(label=f"part {part}"):
        for name in [name for name in CALLS if hasattr(private, name)][part::6]:
            gloo, ours = dist.new_group(backend="gloo"), dist.new_group()
            wanted = outcome(name, gloo)
            dist.barrier()
            found = outcome(name, ours)
            if str(found).startswith("internal error") or (found != wanted and name not in DIFFERENT):
                problems.append((name, found, wanted))
    assert not problems
