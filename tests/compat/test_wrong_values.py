"""Arguments of wrong kinds and values, to the blocking functions of the faces.

Each error is one of a check, and names an argument of the function.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
import torch

from asynccomm import AsyncCommError, Comm
from asynccomm.compat import bagua, torchcomms, vllm
from asynccomm.compat.torchcomms import ReduceOp, SignalCmpOp, functional, objcol

LIMIT: Final = timedelta(seconds=20)
WRONG: Final[list[Any]] = [
    *(None, "x", -1, 99, 1.5, True, [], {}, [None]),
    *(torch.ones(0), torch.ones(2, device="meta"), torch.ones(3, dtype=torch.int32)),
]
#: parts of the messages of Python's own errors
UNCHECKED: Final = (
    *("has no attribute", "not iterable", "not subscriptable", "unsupported operand", "not supported between"),
    *("positional argument", "unexpected keyword", "object of type", "indices must be"),
)
NAMED: Final = re.compile(r"(\w+)(?:\[\d+\])* (?:must|has) ")  # the argument in a check's error

Cases = dict[str, Callable[[], list[Any]]]  # by name of a function: right arguments


def t() -> torch.Tensor:
    return torch.ones(2)


def problems(owner: Any, cases: Cases) -> list[str]:
    """The calls, with one argument replaced by a wrong one, that raised an error of no check or with a wrong name."""
    found = []
    for name, make in cases.items():
        names = inspect.signature(getattr(owner, name)).parameters
        for place, wrong in itertools.product(range(len(make())), WRONG):
            arguments = make()
            arguments[place] = wrong
            try:
                getattr(owner, name)(*arguments)
            except (AsyncCommError, RuntimeError, TypeError, ValueError) as exc:
                named = NAMED.match(str(exc))
                if not any(part in str(exc) for part in UNCHECKED) and (named is None or named[1] in names):
                    continue
                found.append(f"{name} with {wrong!r} as argument {place}: {exc!r}")
            except Exception as exc:
                found.append(f"{name} with {wrong!r} as argument {place}: {exc!r}")
    return found


def of_torchcomms(backend: str) -> list[str]:
    comm = torchcomms.new_comm(backend, torch.device("cpu"), "wrong", timeout=LIMIT)
    names = (f"child{number}" for number in itertools.count())
    methods: Cases = {
        "all_reduce": lambda: [t(), ReduceOp.SUM, False, None, None],
        "reduce": lambda: [t(), 0, ReduceOp.SUM, False],
        "broadcast": lambda: [t(), 0, False],
        "all_gather": lambda: [[t()], t(), False],
        "all_gather_single": lambda: [t(), t(), False],
        "reduce_scatter": lambda: [t(), [t()], ReduceOp.SUM, False],
        "reduce_scatter_single": lambda: [t(), t(), ReduceOp.SUM, False],
        "all_to_all": lambda: [[t()], [t()], False],
        "all_to_all_single": lambda: [t(), t(), False],
        "all_to_all_v_single": lambda: [t(), t(), [2], [2], False],
        "scatter": lambda: [t(), [t()], 0, False],
        "gather": lambda: [[t()], t(), 0, False],
        "gather_single": lambda: [t(), t(), 0, False],
        "split": lambda: [[0], next(names), None],
        "set_hints": lambda: [{}],
    }
    objects: Cases = {
        "all_gather_object": lambda: [comm, [None], 1],
        "gather_object": lambda: [comm, 1, 0, [None]],
        "broadcast_object_list": lambda: [comm, [1], 0],
        "scatter_object_list": lambda: [comm, 0, [None], [1]],
    }
    operators: Cases = {
        "all_reduce": lambda: [comm, t(), ReduceOp.SUM],
        "reduce": lambda: [comm, t(), 0, ReduceOp.SUM],
        "broadcast": lambda: [comm, t(), 0],
        "all_gather": lambda: [comm, t()],
        "all_gather_single": lambda: [comm, t(), 0],
        "reduce_scatter": lambda: [comm, [t()], ReduceOp.SUM],
        "reduce_scatter_single": lambda: [comm, t(), ReduceOp.SUM, 0],
        "all_to_all_single": lambda: [comm, t()],
        "all_to_all_v_single": lambda: [comm, t(), [2], [2]],
    }
    found = problems(comm, methods)
    comm.set_hints({})
    found += problems(objcol, objects) + problems(functional, operators)
    for method in ("send", "recv"):
        found += problems(comm.batch_op_create(), {method: lambda: [t(), 0]})
    windows: Cases = {
        "put": lambda: [t(), 0, 0, False],
        "signal": lambda: [0, 1, 0, False],
        "wait_signal": lambda: [0, 1, SignalCmpOp.LE, False],
        "get_tensor": lambda: [0, [2], torch.float32, 0],
    }
    found += problems(comm.window_allocate(64), windows)
    found += problems(comm, {"window_allocate": lambda: [8, False, 4]})
    comm.finalize()
    elastic = torchcomms.new_comm(backend, torch.device("cpu"), "elastic", timeout=LIMIT, enable_reconfigure=True)
    found += problems(elastic, {"reconfigure": lambda: [next(names), [elastic.get_init_handle()], None, None]})
    elastic.finalize()
    return found


def of_bagua(backend: str) -> list[str]:
    bagua.init_process_group(backend=backend, timeout=LIMIT)
    comm = bagua.new_group().get_global_communicator()
    pair: list[Any] = ["allgather", "alltoall", "allreduce", "reduce_scatter"]
    cases: Cases = {
        **dict.fromkeys(pair, lambda: [t(), t()]),
        **dict.fromkeys(["allgather_inplace", "alltoall_inplace"], lambda: [t(), comm]),
        **dict.fromkeys(["allreduce_inplace", "reduce_scatter_inplace"], lambda: [t(), 0, comm]),
        **dict.fromkeys(["gather", "scatter"], lambda: [t(), t(), 0, comm]),
        **dict.fromkeys(["gather_inplace", "scatter_inplace"], lambda: [t(), 2, 0, comm]),
        "reduce": lambda: [t(), t(), 0, 0, comm],
        "reduce_inplace": lambda: [t(), 0, 0, comm],
        "broadcast": lambda: [t(), 0, comm],
        "broadcast_object": lambda: [1, 0, comm],
        "barrier": lambda: [comm],
        "new_group": lambda: [[0]],
        "from_torch_group": lambda: [None],
    }
    found = problems(bagua, cases)
    bagua.destroy_process_group()
    return found


def of_vllm(backend: str) -> list[str]:
    vllm.init_distributed_environment(backend=backend, timeout=LIMIT)
    group = vllm.GroupCoordinator([[0]], 0, "gloo", True)
    cases: Cases = {
        "all_reduce": lambda: [t()],
        "all_gather": lambda: [t(), 0],
        "all_gatherv": lambda: [t(), 0, [2]],
        "reduce_scatter": lambda: [t(), 0],
        "reduce_scatterv": lambda: [t(), 0, [2]],
        "gather": lambda: [t(), 0, 0],
        "broadcast": lambda: [t(), 0],
        "broadcast_object": lambda: [1, 0],
        "broadcast_object_list": lambda: [[1], 0, None],
        "send_object": lambda: [1, 1],
        "recv_object": lambda: [1],
        "broadcast_tensor_dict": lambda: [{}, 0, None],
        "send": lambda: [t(), 1],
        "recv": lambda: [(2,), torch.float32, 1],
        "dispatch": lambda: [t(), t(), False],
        "combine": lambda: [t(), False],
        "create_single_reader_mq_broadcasters": lambda: [0],
    }
    made: Cases = {"GroupCoordinator": lambda: [[[0]], 0, "gloo", True, False, "group"]}
    found = problems(group, cases) + problems(vllm, made)
    group.destroy()
    vllm.destroy_distributed_environment()
    return found


@pytest.mark.parametrize("face", [of_torchcomms, of_bagua, of_vllm])
@pytest.mark.ranks(1, backend="shm")
async def test_errors_are_those_of_checks(comm: Comm, face: Callable[[str], list[str]]) -> None:
    assert await asyncio.to_thread(face, comm.backend) == []
