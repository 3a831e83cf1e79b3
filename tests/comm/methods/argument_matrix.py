"""Every argument of every method, each with a way to hand a value to it: what is said about it is the same everywhere.

The methods are called on rank 1 of 3: on a :class:`Recorder`, which only checks, or on a comm.
"""

from __future__ import annotations

import asyncio
import operator
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from asynccomm import Comm
from asynccomm.comm.methods.collectives import Collectives
from asynccomm.comm.methods.lists import CoalescedCollectives
from asynccomm.comm.methods.p2p import P2P
from asynccomm.comm.methods.variable import VariableCollectives
from asynccomm.ops import Call, Several
from asynccomm.ops.validation import CommInfo
from tests.cases import cases

SIZE = 3
RANK = 1
GROUP = CommInfo("grads", RANK, SIZE, torch.device("cpu"))


class Recorder(Collectives, VariableCollectives, CoalescedCollectives, P2P):
    """All methods; each gives the call, or the calls, that a comm would send."""

    def __init__(self, group: CommInfo = GROUP) -> None:
        self._group = group

    def _call(self, timeout: Any, hints: Any, tag: Any, check: Callable[..., Call | Several], *arguments: Any) -> Any:
        made = check(self._group, *arguments)
        return made if isinstance(made, Call) else (list(made.calls), made.result)

    def _submit(self, call: Call, timeout: Any, hints: Mapping[str, str] | None, tag: str | None = None) -> Any:
        return call

    def _submit_together(self, calls: Sequence[Call], result: Any, timeout: Any, hints: Any, tag: Any = None) -> Any:
        return list(calls), result


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def several(count: int = SIZE, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [t(*(shape or (4,)), dtype=dtype) for _ in range(count)]


def sparse(*shape: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch speaks of checks that it does not make
        return torch.sparse_coo_tensor(torch.zeros(len(shape), 1, dtype=torch.int64), torch.tensor([1.0]), shape)


def is_rank(value: Any, rank: int = RANK) -> bool:
    try:
        return operator.index(value) == rank
    except TypeError:
        return False


def fails(error: type[Exception], use: Callable[..., object], *args: Any) -> str:
    with pytest.raises(error) as caught:
        use(*args)
    return str(caught.value)


async def on_all(comms: Sequence[Comm], call: Callable[[Comm, int], Awaitable[Any]]) -> list[Any]:
    """What each rank's call gives."""
    return list(await asyncio.gather(*[call(comm, rank) for rank, comm in enumerate(comms)]))


Use = Callable[[Any, Any], Any]  # with the comm and the value


class Argument(NamedTuple):
    what: str  #: the method, and how it is called
    name: str  #: of the argument, as errors have it
    use: Use
    written: bool = False
    shape: tuple[int, ...] = (4,)  #: of a tensor that is all right there
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.what}: {self.name}"


def each(arguments: Sequence[Argument]) -> Any:
    return cases("argument", arguments, ids=str)


def _tensor(what: str, name: str, use: Use, shape: tuple[int, ...] = (4,), *, written: bool = False) -> Argument:
    return Argument(what, name, use, written, shape)


def _written(what: str, name: str, use: Use, shape: tuple[int, ...] = (4,)) -> Argument:
    return Argument(what, name, use, True, shape)


def around(x: Any, place: int, *shape: int) -> list[Any]:
    """``x`` in the list of all ranks' tensors."""
    items: list[Any] = several(SIZE, *shape)
    items[place] = x
    return items


TENSORS = [
    _written("all_reduce", "tensor", lambda c, x: c.all_reduce(x)),
    _tensor("all_reduce with out", "tensor", lambda c, x: c.all_reduce(x, out=t(4))),
    _written("all_reduce", "out", lambda c, x: c.all_reduce(t(4), out=x)),
    _tensor("broadcast at the root", "tensor", lambda c, x: c.broadcast(x, RANK)),
    _written("broadcast elsewhere", "tensor", lambda c, x: c.broadcast(x, 0)),
    _written("reduce at the root", "tensor", lambda c, x: c.reduce(x, RANK)),
    _tensor("reduce at the root with out", "tensor", lambda c, x: c.reduce(x, RANK, out=t(4))),
    _written("reduce at the root", "out", lambda c, x: c.reduce(t(4), RANK, out=x)),
    _tensor("reduce elsewhere", "tensor", lambda c, x: c.reduce(x, 0)),
    _written("reduce elsewhere", "out", lambda c, x: c.reduce(t(4), 0, out=x)),
    _tensor("all_gather", "tensor", lambda c, x: c.all_gather(several(), x)),
    _tensor("all_gather, allocated", "tensor", lambda c, x: c.all_gather(None, x)),
    _written("all_gather", "tensor_list[2]", lambda c, x: c.all_gather(around(x, 2), t(4))),
    _written("all_gather", "tensor_list[1]", lambda c, x: c.all_gather(around(x, 1), t(4))),
    _tensor("all_gather_single", "input", lambda c, x: c.all_gather_single(t(12), x)),
    _tensor("all_gather_single, allocated", "input", lambda c, x: c.all_gather_single(None, x)),
    _written("all_gather_single", "output", lambda c, x: c.all_gather_single(x, t(4)), (12,)),
    _tensor("all_gather_single along 1", "input", lambda c, x: c.all_gather_single(t(2, 12), x, 1), (2, 4)),
    _tensor("all_gather_single along -1, allocated", "input", lambda c, x: c.all_gather_single(None, x, -1), (2, 4)),
    _written("all_gather_single along 1", "output", lambda c, x: c.all_gather_single(x, t(2, 4), 1), (2, 12)),
    _written("reduce_scatter", "output", lambda c, x: c.reduce_scatter(x, several())),
    _tensor("reduce_scatter", "input_list[0]", lambda c, x: c.reduce_scatter(t(4), around(x, 0))),
    _tensor("reduce_scatter, allocated", "input_list[0]", lambda c, x: c.reduce_scatter(None, around(x, 0))),
    _tensor("reduce_scatter, allocated", "input_list[1]", lambda c, x: c.reduce_scatter(None, around(x, 1))),
    _tensor("reduce_scatter, allocated", "input_list[2]", lambda c, x: c.reduce_scatter(None, around(x, 2))),
    _written("reduce_scatter_single", "output", lambda c, x: c.reduce_scatter_single(x, t(12))),
    _tensor("reduce_scatter_single", "input", lambda c, x: c.reduce_scatter_single(t(4), x), (12,)),
    _tensor("reduce_scatter_single, allocated", "input", lambda c, x: c.reduce_scatter_single(None, x), (12,)),
    _written(
        "reduce_scatter_single along 1", "output", lambda c, x: c.reduce_scatter_single(x, t(2, 12), dim=1), (2, 4)
    ),
    _tensor("reduce_scatter_single along 1", "input", lambda c, x: c.reduce_scatter_single(t(2, 4), x, dim=1), (2, 12)),
    _tensor(
        "reduce_scatter_single along -1, allocated",
        "input",
        lambda c, x: c.reduce_scatter_single(None, x, dim=-1),
        (2, 12),
    ),
    _written("scatter at the root", "output", lambda c, x: c.scatter(x, several(), RANK)),
    _tensor("scatter at the root", "input_list[1]", lambda c, x: c.scatter(t(4), around(x, 1), RANK)),
    _written("scatter elsewhere", "output", lambda c, x: c.scatter(x, None, 0)),
    _tensor("gather at the root", "input", lambda c, x: c.gather(several(), x, RANK)),
    _tensor("gather at the root, allocated", "input", lambda c, x: c.gather(None, x, RANK)),
    _written("gather at the root", "output_list[1]", lambda c, x: c.gather(around(x, 1), t(4), RANK)),
    _tensor("gather elsewhere", "input", lambda c, x: c.gather(None, x, 0)),
    _tensor("gather_single at the root", "input", lambda c, x: c.gather_single(t(12), x, RANK)),
    _tensor(
        "gather_single at the root along 1, allocated", "input", lambda c, x: c.gather_single(None, x, 1, 1), (2, 4)
    ),
    _tensor("gather_single elsewhere", "input", lambda c, x: c.gather_single(None, x, 0)),
    _written("gather_single at the root", "output", lambda c, x: c.gather_single(x, t(4), RANK), (12,)),
    _written("gather_single along 1", "output", lambda c, x: c.gather_single(x, t(2, 4), RANK, 1), (2, 12)),
    _written("scatter_single at the root", "output", lambda c, x: c.scatter_single(x, t(12), RANK)),
    _written("scatter_single elsewhere", "output", lambda c, x: c.scatter_single(x, None, 0)),
    _tensor("scatter_single at the root", "input", lambda c, x: c.scatter_single(t(4), x, RANK), (12,)),
    _tensor("scatter_single along 1, allocated", "input", lambda c, x: c.scatter_single(None, x, RANK, 1), (2, 12)),
    _tensor("all_to_all", "input_list[1]", lambda c, x: c.all_to_all(several(), around(x, 1))),
    _tensor("all_to_all", "input_list[2]", lambda c, x: c.all_to_all(several(), around(x, 2))),
    _tensor("all_to_all, allocated", "input_list[0]", lambda c, x: c.all_to_all(None, around(x, 0))),
    _tensor("all_to_all, allocated", "input_list[1]", lambda c, x: c.all_to_all(None, around(x, 1))),
    _written("all_to_all", "output_list[1]", lambda c, x: c.all_to_all(around(x, 1), several())),
    _written("all_to_all", "output_list[0]", lambda c, x: c.all_to_all(around(x, 0), several())),
    _tensor("all_to_all_single", "input", lambda c, x: c.all_to_all_single(t(6), x), (6,)),
    _tensor("all_to_all_single, allocated", "input", lambda c, x: c.all_to_all_single(None, x), (6,)),
    _written("all_to_all_single", "output", lambda c, x: c.all_to_all_single(x, t(6)), (6,)),
    _tensor("all_gather_v", "input", lambda c, x: c.all_gather_v(t(8), x, [1, 4, 3])),
    _tensor("all_gather_v, allocated", "input", lambda c, x: c.all_gather_v(None, x, [1, 4, 3])),
    _tensor("all_gather_v, no sizes", "input", lambda c, x: c.all_gather_v(None, x)),
    _tensor("all_gather_v, no sizes, along 1", "input", lambda c, x: c.all_gather_v(t(2, 9), x, dim=1), (2, 4)),
    _written("all_gather_v", "output", lambda c, x: c.all_gather_v(x, t(4), [1, 4, 3]), (8,)),
    _written("all_gather_v, equal sizes", "output", lambda c, x: c.all_gather_v(x, t(4), [4, 4, 4]), (12,)),
    _written("all_gather_v along 1", "output", lambda c, x: c.all_gather_v(x, t(2, 4), [1, 4, 3], 1), (2, 8)),
    _written("all_gather_v, no sizes", "output", lambda c, x: c.all_gather_v(x, t(4)), (9,)),
    _tensor("reduce_scatter_v", "input", lambda c, x: c.reduce_scatter_v(t(4), x, [1, 4, 3]), (8,)),
    _tensor("reduce_scatter_v, allocated", "input", lambda c, x: c.reduce_scatter_v(None, x, [1, 4, 3], dim=1), (2, 8)),
    _tensor("reduce_scatter_v, no sizes", "input", lambda c, x: c.reduce_scatter_v(None, x), (12,)),
    _written("reduce_scatter_v", "output", lambda c, x: c.reduce_scatter_v(x, t(8), [1, 4, 3])),
    _written("reduce_scatter_v, equal sizes", "output", lambda c, x: c.reduce_scatter_v(x, t(12), [4, 4, 4])),
    _written("reduce_scatter_v, no sizes", "output", lambda c, x: c.reduce_scatter_v(x, t(12))),
    _tensor("all_to_all_v_single", "input", lambda c, x: c.all_to_all_v_single(t(6), x, [1, 2, 3], [0, 2, 1])),
    _tensor("all_to_all_v_single, no sizes", "input", lambda c, x: c.all_to_all_v_single(None, x), (6,)),
    _tensor("all_to_all_v_single, half", "input", lambda c, x: c.all_to_all_v_single(None, x, None, [0, 2, 1])),
    _written("all_to_all_v_single", "output", lambda c, x: c.all_to_all_v_single(x, t(4), [1, 2, 3], [0, 2, 1]), (6,)),
    _written("all_to_all_v_single, no sizes", "output", lambda c, x: c.all_to_all_v_single(x, t(6)), (6,)),
    _tensor("gather_v at the root", "input", lambda c, x: c.gather_v(several(), x, RANK)),
    _tensor("gather_v at the root, allocated", "input", lambda c, x: c.gather_v(None, x, RANK)),
    _tensor("gather_v elsewhere", "input", lambda c, x: c.gather_v(None, x, 2)),
    _written("gather_v", "output_list[0]", lambda c, x: c.gather_v(around(x, 0), t(4), RANK)),
    _written("gather_v", "output_list[1]", lambda c, x: c.gather_v(around(x, 1), t(4), RANK)),
    _written("scatter_v at the root", "output", lambda c, x: c.scatter_v(x, several(), RANK)),
    _written("scatter_v elsewhere", "output", lambda c, x: c.scatter_v(x, None, 2)),
    _tensor("scatter_v", "input_list[1]", lambda c, x: c.scatter_v(t(4), around(x, 1), RANK)),
    _tensor("scatter_v, allocated", "input_list[0]", lambda c, x: c.scatter_v(None, around(x, 0), RANK)),
    _written("all_reduce_coalesced", "tensors[1]", lambda c, x: c.all_reduce_coalesced([t(2), x])),
    _tensor("broadcast_coalesced at the root", "tensors[1]", lambda c, x: c.broadcast_coalesced([t(2), x], RANK)),
    _written("broadcast_coalesced elsewhere", "tensors[0]", lambda c, x: c.broadcast_coalesced([x, t(2)], 0)),
    _tensor("all_gather_coalesced, allocated", "tensors[1]", lambda c, x: c.all_gather_coalesced(None, [t(2), x])),
    _tensor("all_gather_coalesced", "tensors[0]", lambda c, x: c.all_gather_coalesced([[t(4)]] * SIZE, [x])),
    _written(
        "all_gather_coalesced",
        "output_lists[2][0]",
        lambda c, x: c.all_gather_coalesced([[t(4)], [t(4)], [x]], [t(4)]),
    ),
    _written(
        "reduce_scatter_coalesced", "outputs[1]", lambda c, x: c.reduce_scatter_coalesced([t(1), x], [t(3), t(12)])
    ),
    _tensor("reduce_scatter_coalesced", "inputs[0]", lambda c, x: c.reduce_scatter_coalesced([t(4)], [x]), (12,)),
    _tensor(
        "reduce_scatter_coalesced, allocated", "inputs[0]", lambda c, x: c.reduce_scatter_coalesced(None, [x]), (12,)
    ),
    _tensor(
        "all_gather_v_coalesced",
        "inputs[1]",
        lambda c, x: c.all_gather_v_coalesced([t(8, 2), t(8)], [t(4, 2), x], [1, 4, 3]),
    ),
    _tensor("all_gather_v_coalesced, no sizes", "inputs[0]", lambda c, x: c.all_gather_v_coalesced(None, [x, t(4)])),
    _written(
        "all_gather_v_coalesced", "outputs[0]", lambda c, x: c.all_gather_v_coalesced([x], [t(4)], [1, 4, 3]), (8,)
    ),
    _written("all_gather_v_coalesced, no sizes", "outputs[0]", lambda c, x: c.all_gather_v_coalesced([x], [t(4)])),
    _tensor(
        "reduce_scatter_v_coalesced",
        "inputs[1]",
        lambda c, x: c.reduce_scatter_v_coalesced(None, [t(8, 2), x], [1, 4, 3]),
        (8,),
    ),
    _written(
        "reduce_scatter_v_coalesced", "outputs[0]", lambda c, x: c.reduce_scatter_v_coalesced([x], [t(8)], [1, 4, 3])
    ),
    _tensor("send", "tensor", lambda c, x: c.send(x, 0)),
    _written("recv", "tensor", lambda c, x: c.recv(x, 0)),
    _tensor("batch send", "tensor", lambda c, x: c.batch_op_create().send(x, 0)),
    _written("batch recv", "tensor", lambda c, x: c.batch_op_create().recv(x, 0)),
]

# Where a list has one tensor for each rank.
LISTS = [
    Argument("all_gather", "tensor_list", lambda c, x: c.all_gather(x, t(4))),
    Argument("reduce_scatter", "input_list", lambda c, x: c.reduce_scatter(t(4), x)),
    Argument("reduce_scatter, allocated", "input_list", lambda c, x: c.reduce_scatter(None, x)),
    Argument("scatter", "input_list", lambda c, x: c.scatter(t(4), x, RANK)),
    Argument("gather", "output_list", lambda c, x: c.gather(x, t(4), RANK)),
    Argument("all_to_all", "input_list", lambda c, x: c.all_to_all(several(), x)),
    Argument("all_to_all, allocated", "input_list", lambda c, x: c.all_to_all(None, x)),
    Argument("all_to_all", "output_list", lambda c, x: c.all_to_all(x, several())),
    Argument("gather_v", "output_list", lambda c, x: c.gather_v(x, t(4), RANK)),
    Argument("scatter_v", "input_list", lambda c, x: c.scatter_v(t(4), x, RANK)),
    Argument("scatter_v, allocated", "input_list", lambda c, x: c.scatter_v(None, x, RANK)),
]

# Where it has any number of them; those of three tensors are all right.
COALESCED = [
    Argument("all_reduce_coalesced", "tensors", lambda c, x: c.all_reduce_coalesced(x)),
    Argument("broadcast_coalesced", "tensors", lambda c, x: c.broadcast_coalesced(x, 0)),
    Argument("all_gather_coalesced, allocated", "tensors", lambda c, x: c.all_gather_coalesced(None, x)),
    Argument("all_gather_coalesced", "tensors", lambda c, x: c.all_gather_coalesced([several()] * 3, x)),
    Argument(
        "all_gather_coalesced",
        "output_lists[1]",
        lambda c, x: c.all_gather_coalesced([several(), x, several()], several()),
    ),
    Argument(
        "reduce_scatter_coalesced, allocated", "inputs", lambda c, x: c.reduce_scatter_coalesced(None, x), shape=(6,)
    ),
    Argument("reduce_scatter_coalesced", "inputs", lambda c, x: c.reduce_scatter_coalesced(several(), x), shape=(12,)),
    Argument("reduce_scatter_coalesced", "outputs", lambda c, x: c.reduce_scatter_coalesced(x, several(3, 12))),
]

COALESCED += [
    Argument("all_gather_v_coalesced", "inputs", lambda c, x: c.all_gather_v_coalesced(None, x, [1, 4, 3])),
    Argument("all_gather_v_coalesced, no sizes", "inputs", lambda c, x: c.all_gather_v_coalesced(None, x)),
    Argument(
        "all_gather_v_coalesced",
        "outputs",
        lambda c, x: c.all_gather_v_coalesced(x, several(), [1, 4, 3]),
        shape=(8,),
    ),
    Argument("all_gather_v_coalesced, no sizes", "outputs", lambda c, x: c.all_gather_v_coalesced(x, several())),
    Argument(
        "reduce_scatter_v_coalesced",
        "inputs",
        lambda c, x: c.reduce_scatter_v_coalesced(None, x, [1, 4, 3]),
        shape=(8,),
    ),
    Argument(
        "reduce_scatter_v_coalesced",
        "outputs",
        lambda c, x: c.reduce_scatter_v_coalesced(x, several(3, 8), [1, 4, 3]),
    ),
]


def _root(root: Any, value: Any) -> Any:
    """``value`` on the root, None elsewhere."""
    return value if is_rank(root) else None


RANKS = [
    Argument("broadcast", "root", lambda c, r: c.broadcast(t(4), r)),
    Argument("reduce", "root", lambda c, r: c.reduce(t(4), r)),
    Argument("scatter", "root", lambda c, r: c.scatter(t(4), _root(r, several()), r)),
    Argument("gather", "root", lambda c, r: c.gather(None, t(4), r)),
    Argument("gather_single", "root", lambda c, r: c.gather_single(None, t(4), r)),
    Argument("scatter_single", "root", lambda c, r: c.scatter_single(t(4), _root(r, t(12)), r)),
    Argument("gather_v", "root", lambda c, r: c.gather_v(None, t(4), r)),
    Argument("scatter_v", "root", lambda c, r: c.scatter_v(None, _root(r, several()), r)),
    Argument("broadcast_coalesced", "root", lambda c, r: c.broadcast_coalesced([t(4)], r)),
    Argument("send", "dst", lambda c, r: c.send(t(4), r)),
    Argument("recv", "src", lambda c, r: c.recv(t(4), r)),
    Argument("batch send", "dst", lambda c, r: c.batch_op_create().send(t(4), r)),
    Argument("batch recv", "src", lambda c, r: c.batch_op_create().recv(t(4), r)),
]

TAGS = [
    Argument("send", "tag", lambda c, tag: c.send(t(4), 0, tag)),
    Argument("recv", "tag", lambda c, tag: c.recv(t(4), 0, tag)),
    Argument("batch send", "tag", lambda c, tag: c.batch_op_create().send(t(4), 0, tag)),
    Argument("batch recv", "tag", lambda c, tag: c.batch_op_create().recv(t(4), 0, tag)),
]

# Of a tensor with two dimensions; ``name`` is that tensor's.
DIMS = [
    Argument("all_gather_single", "input", lambda c, d: c.all_gather_single(None, t(3, 3), d)),
    Argument("reduce_scatter_single", "input", lambda c, d: c.reduce_scatter_single(None, t(3, 3), dim=d)),
    Argument("gather_single", "input", lambda c, d: c.gather_single(None, t(3, 3), RANK, d)),
    Argument("gather_single elsewhere", "input", lambda c, d: c.gather_single(None, t(3, 3), 0, d)),
    Argument("scatter_single", "input", lambda c, d: c.scatter_single(None, t(3, 3), RANK, d)),
    Argument("all_gather_v", "input", lambda c, d: c.all_gather_v(None, t(3, 3), [1, 3, 2], d)),
    Argument("all_gather_v, no sizes", "input", lambda c, d: c.all_gather_v(None, t(3, 3), None, d)),
    Argument("reduce_scatter_v", "input", lambda c, d: c.reduce_scatter_v(None, t(3, 3), [0, 2, 1], dim=d)),
    Argument(
        "all_gather_v_coalesced", "inputs[0]", lambda c, d: c.all_gather_v_coalesced(None, [t(3, 3)], [1, 3, 2], d)
    ),
    Argument(
        "all_gather_v_coalesced, no sizes", "inputs[0]", lambda c, d: c.all_gather_v_coalesced(None, [t(3, 3)], None, d)
    ),
    Argument(
        "reduce_scatter_v_coalesced",
        "inputs[0]",
        lambda c, d: c.reduce_scatter_v_coalesced(None, [t(3, 3)], [0, 2, 1], dim=d),
    ),
    Argument("reduce_scatter_v, no sizes", "input", lambda c, d: c.reduce_scatter_v(None, t(3, 3), dim=d)),
]

# One number for each rank; (1, 4, 3) is all right.
SIZES = [
    Argument("all_gather_v_coalesced", "sizes", lambda c, s: c.all_gather_v_coalesced(None, [t(4, 2)], s)),
    Argument("reduce_scatter_v_coalesced", "sizes", lambda c, s: c.reduce_scatter_v_coalesced(None, [t(8, 2)], s)),
    Argument("all_gather_v", "sizes", lambda c, s: c.all_gather_v(None, t(4, 2), s)),
    Argument("reduce_scatter_v", "sizes", lambda c, s: c.reduce_scatter_v(None, t(8, 2), s)),
    Argument(
        "all_to_all_v_single",
        "output_split_sizes",
        lambda c, s: c.all_to_all_v_single(None, t(9, 2), s, [3, 4, 2]),
    ),
    Argument(
        "all_to_all_v_single",
        "input_split_sizes",
        lambda c, s: c.all_to_all_v_single(None, t(9, 2), [3, 4, 2], s),
    ),
    Argument(
        "all_to_all_v_single, exchanged",
        "input_split_sizes",
        lambda c, s: c.all_to_all_v_single(None, t(9, 2), None, s),
    ),
]

# With an op and a dtype.
Reduction = Callable[[Any, Any, torch.dtype], Any]
REDUCTIONS: dict[str, Reduction] = {
    "all_reduce": lambda c, op, d: c.all_reduce(t(3, dtype=d), op),
    "all_reduce with out": lambda c, op, d: c.all_reduce(t(3, dtype=d), op, out=t(3, dtype=d)),
    "reduce": lambda c, op, d: c.reduce(t(3, dtype=d), 0, op),
    "reduce_scatter": lambda c, op, d: c.reduce_scatter(None, [t(3, dtype=d)] * SIZE, op),
    "reduce_scatter_single": lambda c, op, d: c.reduce_scatter_single(None, t(3, dtype=d), op),
    "reduce_scatter_single along 1": lambda c, op, d: c.reduce_scatter_single(None, t(2, 3, dtype=d), op, 1),
    "reduce_scatter_v": lambda c, op, d: c.reduce_scatter_v(None, t(3, dtype=d), [0, 2, 1], op),
    "reduce_scatter_v, equal sizes": lambda c, op, d: c.reduce_scatter_v(None, t(3, dtype=d), [1, 1, 1], op),
    "reduce_scatter_v, no sizes": lambda c, op, d: c.reduce_scatter_v(None, t(3, dtype=d), op=op),
    "all_reduce_coalesced": lambda c, op, d: c.all_reduce_coalesced([t(3, dtype=torch.int8), t(3, dtype=d)], op),
    "reduce_scatter_v_coalesced": lambda c, op, d: c.reduce_scatter_v_coalesced(None, [t(3, dtype=d)], [0, 2, 1], op),
    "reduce_scatter_coalesced": lambda c, op, d: c.reduce_scatter_coalesced(None, [t(3, dtype=d), t(6, dtype=d)], op),
}

# Everything that is wrong about a value for one argument of one method, on the whole: what to do, and what is raised.
WRONG: list[tuple[str, type[Exception], str, Callable[[Any], Any]]] = [
    *[
        entry
        for a in TENSORS
        for entry in (
            (f"{a}, no tensor", TypeError, a.name, lambda c, a=a: a.use(c, [1.0])),
            (f"{a}, meta", ValueError, a.name, lambda c, a=a: a.use(c, torch.zeros(a.shape, device="meta"))),
            (f"{a}, sparse", ValueError, a.name, lambda c, a=a: a.use(c, sparse(*a.shape))),
        )
    ],
    *[
        (f"{a}, overlapping", ValueError, a.name, lambda c, a=a: a.use(c, torch.zeros(1).expand(a.shape)))
        for a in TENSORS
        if a.written
    ],
    *[(f"{a}, a tensor", TypeError, a.name, lambda c, a=a: a.use(c, t(3, *a.shape))) for a in LISTS + COALESCED],
    *[(f"{a}, empty", ValueError, a.name, lambda c, a=a: a.use(c, [])) for a in LISTS + COALESCED],
    *[(f"{a}, too many", ValueError, a.name, lambda c, a=a: a.use(c, several(SIZE + 1))) for a in LISTS],
    *[(f"{a}, {r!r}", ValueError, a.name, lambda c, a=a, r=r: a.use(c, r)) for a in RANKS for r in (-1, SIZE)],
    *[(f"{a}, {r!r}", TypeError, a.name, lambda c, a=a, r=r: a.use(c, r)) for a in RANKS for r in (True, "1")],
    *[(f"{a}, {tag}", ValueError, a.name, lambda c, a=a, tag=tag: a.use(c, tag)) for a in TAGS for tag in (-1, 2**27)],
    *[(f"{a}, None", TypeError, a.name, lambda c, a=a: a.use(c, None)) for a in TAGS],
    *[(f"{a}, dim {d}", ValueError, "dim", lambda c, a=a, d=d: a.use(c, d)) for a in DIMS for d in (2, -3)],
    *[(f"{a}, dim {d}", TypeError, "dim", lambda c, a=a, d=d: a.use(c, d)) for a in DIMS for d in (None, False, 0.0)],
    *[(f"{a}, {s}", ValueError, a.name, lambda c, a=a, s=s: a.use(c, s)) for a in SIZES for s in ([], [8, 4, -4])],
    *[(f"{a}, {s}", TypeError, a.name, lambda c, a=a, s=s: a.use(c, s)) for a in SIZES for s in (4, [1, 4, 3.0])],
    *[
        (f"{what}, op", TypeError, "op", lambda c, use=use: use(c, "SUM", torch.int8))
        for what, use in REDUCTIONS.items()
    ],
    *[
        (f"{what}, bad op", ValueError, "op", lambda c, use=use: use(c, torch.distributed.ReduceOp.BAND, torch.float16))
        for what, use in REDUCTIONS.items()
    ],
]
wrong = cases("error, name, call", [entry[1:] for entry in WRONG], ids=[entry[0] for entry in WRONG])

# Each method once, with nothing wrong about it.
GOOD: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda c, **k: c.all_reduce(t(4), **k),
    "broadcast": lambda c, **k: c.broadcast(t(4), 0, **k),
    "reduce": lambda c, **k: c.reduce(t(4), 0, **k),
    "all_gather": lambda c, **k: c.all_gather(None, t(4), **k),
    "all_gather_single": lambda c, **k: c.all_gather_single(None, t(4), **k),
    "reduce_scatter": lambda c, **k: c.reduce_scatter(None, several(), **k),
    "reduce_scatter_single": lambda c, **k: c.reduce_scatter_single(None, t(12), **k),
    "scatter": lambda c, **k: c.scatter(t(4), None, 0, **k),
    "gather": lambda c, **k: c.gather(None, t(4), 0, **k),
    "gather_single": lambda c, **k: c.gather_single(None, t(4), 0, **k),
    "scatter_single": lambda c, **k: c.scatter_single(t(4), None, 0, **k),
    "all_to_all": lambda c, **k: c.all_to_all(None, several(), **k),
    "all_to_all_single": lambda c, **k: c.all_to_all_single(None, t(6), **k),
    "barrier": lambda c, **k: c.barrier(**k),
    "all_gather_v": lambda c, **k: c.all_gather_v(None, t(4), **k),
    "reduce_scatter_v": lambda c, **k: c.reduce_scatter_v(None, t(8), [1, 4, 3], **k),
    "all_to_all_v_single": lambda c, **k: c.all_to_all_v_single(None, t(6), **k),
    "gather_v": lambda c, **k: c.gather_v(None, t(4), 0, **k),
    "scatter_v": lambda c, **k: c.scatter_v(None, None, 0, **k),
    "all_reduce_coalesced": lambda c, **k: c.all_reduce_coalesced([t(4), t(4, dtype=torch.int8)], **k),
    "broadcast_coalesced": lambda c, **k: c.broadcast_coalesced([t(4), t(2)], 0, **k),
    "all_gather_coalesced": lambda c, **k: c.all_gather_coalesced(None, [t(4), t(2)], **k),
    "reduce_scatter_coalesced": lambda c, **k: c.reduce_scatter_coalesced(None, [t(6), t(3)], **k),
    "all_gather_v_coalesced": lambda c, **k: c.all_gather_v_coalesced(None, [t(4), t(4)], **k),
    "reduce_scatter_v_coalesced": lambda c, **k: c.reduce_scatter_v_coalesced(None, [t(8)], [1, 4, 3], **k),
    "send": lambda c, **k: c.send(t(4), 0, **k),
    "recv": lambda c, **k: c.recv(t(4), 0, **k),
}
good = pytest.mark.parametrize("use", list(GOOD.values()), ids=list(GOOD))


def _at_root(comm: Any, value: Any) -> Any:
    """``value`` on rank 0, None elsewhere."""
    return value if comm.rank == 0 else None


# Every collective of a comm once, as any rank may call it.
COLLECTIVES: dict[str, Callable[..., Any]] = {
    **{name: use for name, use in GOOD.items() if name not in ("send", "recv")},
    "scatter": lambda c, **k: c.scatter(t(4), _at_root(c, several()), 0, **k),
    "scatter_single": lambda c, **k: c.scatter_single(t(4), _at_root(c, t(12)), 0, **k),
    "scatter_v": lambda c, **k: c.scatter_v(None, _at_root(c, several()), 0, **k),
    "all_gather_object": lambda c, **k: c.all_gather_object("x", **k),
    "gather_object": lambda c, **k: c.gather_object("x", 0, **k),
    "dispatch": lambda c, **k: c.dispatch(t(2, 3), **k),
    "broadcast_object": lambda c, **k: c.broadcast_object("x", 0, **k),
    "broadcast_object_list": lambda c, **k: c.broadcast_object_list(["x"], 0, **k),
    "scatter_object_list": lambda c, **k: c.scatter_object_list(_at_root(c, ["x"] * SIZE), 0, **k),
    "broadcast_tensor_dict": lambda c, **k: c.broadcast_tensor_dict({"x": t(2)}, 0, **k),
    "broadcast_state": lambda c, **k: c.broadcast_state({"x": t(2)}, 0, **k),
}
