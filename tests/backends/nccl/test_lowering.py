"""What becomes of an operation before NCCL sees it, and after."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm import ReduceOp
from asynccomm.backends import arithmetic
from asynccomm.backends.base import Submission
from asynccomm.backends.loopback import Hub
from asynccomm.backends.nccl import api
from asynccomm.backends.nccl.lowering import lower
from asynccomm.backends.nccl.plan import Capabilities, LoweredBatch, NcclCall
from asynccomm.backends.regions import bytes_of
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Recv,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    Send,
)
from asynccomm.ops.reduce_op import RedOpType
from asynccomm.ops.validation import CommInfo
from asynccomm.testing.conformance.data import (
    DTYPES,
    FLOATS,
    REDUCTIONS,
    combinations,
    negated,
    sample,
    sentinel,
    strided,
)
from tests.cases import cases
from tests.sampling import examples

REDUCIBLE = frozenset(dtype for dtype in api.DTYPES if dtype.itemsize > 1 or not dtype.is_floating_point)
OWN = frozenset({"all_to_all", "gather", "scatter"})  # calls that only newer libraries have
NATIVE = pytest.mark.parametrize("native", [OWN, frozenset()], ids=["native", "messages"])
CPU = torch.device("cpu")


def group(rank: int = 0, size: int = 2) -> CommInfo:
    return CommInfo("test", rank, size, CPU)


class Memory:
    """Gives new memory, and knows what it gave. It holds no zeros, so what is forgotten shows."""

    def __init__(self) -> None:
        self.rooms: list[Tensor] = []

    def __call__(self, nbytes: int) -> Tensor:
        self.rooms.append(torch.full((nbytes,), 0xA5, dtype=torch.uint8))
        return self.rooms[-1]


def plan_of(
    *calls: Call,
    rank: int = 0,
    size: int = 2,
    native: frozenset[str] = OWN,
    dtypes: frozenset[torch.dtype] = REDUCIBLE,
) -> LoweredBatch:
    """What ``calls`` become, together."""
    plan = LoweredBatch(rank, size, Capabilities(dtypes, native), Memory())
    for call in calls:
        lower(Submission(call, None), plan)  # type: ignore[arg-type]
    return plan


def rooms(plan: LoweredBatch) -> list[Tensor]:
    memory = plan._empty
    assert isinstance(memory, Memory)
    return memory.rooms


def where(tensor: Tensor | None, *known: Tensor) -> str:
    """``"0+4"``: 4 bytes behind the start of the first of ``known``; ``"new"``: elsewhere; ``""``: nowhere."""
    if tensor is None:
        return ""
    for i, one in enumerate(known):
        start, span = one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()
        if start <= tensor.data_ptr() < start + span:
            return f"{i}+{tensor.data_ptr() - start}"
    return "new"


def told(plan: LoweredBatch, *known: Tensor) -> list[tuple[str, str, str, int, torch.dtype, int]]:
    """The calls: name, where the source is, where the target is, count, dtype, peer."""
    return [
        (call.name, where(call.source, *known), where(call.target, *known), call.count, call.dtype, call.peer)
        for call in plan.calls
    ]


def steps(plan: LoweredBatch) -> tuple[int, int]:
    return len(plan.before), len(plan.after)


def only(plan: LoweredBatch) -> NcclCall:
    (call,) = plan.calls
    return call


# -- what NCCL makes of a group, in a few lines -----------------------------------------------------------------------


def span(tensor: Tensor) -> tuple[int, int]:
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def disjoint(a: Tensor, b: Tensor) -> bool:
    return span(a)[1] <= span(b)[0] or span(b)[1] <= span(a)[0]


def check_memory(plan: LoweredBatch) -> None:
    """Nothing is written that another call of the group, or the same one in another place, reads or writes.

    The calls of a group run side by side, so this would be a race. What is written must belong to somebody.
    """
    for call in plan.calls:
        n, share = call.count, call.count * call.dtype.itemsize
        reads, writes = n, n
        if call.name in ("reduce_scatter", "all_to_all", "scatter"):
            reads = n * plan.size
        if call.name in ("all_gather", "all_to_all", "gather"):
            writes = n * plan.size
        for tensor, count in ((call.source, reads), (call.target, writes)):
            assert tensor is None or tensor.nbytes == count * call.dtype.itemsize, call
        if call.source is None or call.target is None or disjoint(call.source, call.target):
            continue
        ahead = call.source.data_ptr() - call.target.data_ptr()
        in_place = {"all_reduce": 0, "reduce": 0, "broadcast": 0, "all_gather": plan.rank * share}
        in_place["reduce_scatter"] = -plan.rank * share
        assert ahead == in_place.get(call.name), f"{call.name} across its own input"
    for one, other in itertools.permutations(plan.calls, 2):
        if one.target is not None:
            for touched in (other.source, other.target):
                assert touched is None or disjoint(one.target, touched), f"{one} writes what {other} uses"


def run(plans: Sequence[LoweredBatch]) -> None:
    """Run the plans of all ranks, every call at the same time."""
    for plan in plans:
        for step in plan.before:
            step()
        check_memory(plan)
    results: list[tuple[Tensor, Tensor]] = []
    sent: defaultdict[tuple[int, int], deque[NcclCall]] = defaultdict(deque)
    collectives: list[list[NcclCall]] = []
    for plan in plans:
        collectives.append([call for call in plan.calls if call.name not in ("send", "recv")])
        for call in plan.calls:
            if call.name == "send":
                sent[plan.rank, call.peer].append(call)
    for plan in plans:
        for call in plan.calls:
            if call.name == "recv":
                message = sent[call.peer, plan.rank].popleft()
                assert (message.count, message.dtype) == (call.count, call.dtype)
                assert call.target is not None
                assert message.source is not None
                results.append((call.target, message.source.flatten().clone()))
    assert not any(sent.values()), "a message that nobody takes"
    for calls in zip(*collectives, strict=True):
        assert len({(c.name, c.count, c.dtype, c.peer, c.reduction) for c in calls}) == 1, calls
        results += collective(calls)
    for target, values in results:
        assert target.dtype == values.dtype
        target.view(-1).copy_(values)
    for plan in plans:
        for step in plan.after:
            step()


def collective(calls: Sequence[NcclCall]) -> list[tuple[Tensor, Tensor]]:
    """What goes where."""
    name, root, size = calls[0].name, calls[0].peer, len(calls)
    ranks = range(size) if root < 0 or name in ("broadcast", "scatter") else [root]
    targets = [calls[rank].target for rank in ranks]

    def given(rank: int) -> Tensor:
        source = calls[rank].source
        assert source is not None
        return source.view(calls[rank].dtype).flatten().clone()

    results: list[Tensor]
    match name:
        case "all_reduce" | "reduce":
            results = [total(calls, [given(rank) for rank in range(size)])] * len(targets)
        case "reduce_scatter":
            results = list(total(calls, [given(rank) for rank in range(size)]).chunk(size))
        case "broadcast":
            results = [given(root)] * size
        case "all_gather" | "gather":
            results = [torch.cat([given(rank) for rank in range(size)])] * len(targets)
        case "scatter":
            results = list(given(root).chunk(size))
        case "all_to_all":
            shares = [given(rank).chunk(size) for rank in range(size)]
            results = [torch.cat([share[rank] for share in shares]) for rank in range(size)]
        case _:
            raise AssertionError(name)
    moves = []
    for target, values in zip(targets, results, strict=True):
        assert target is not None
        moves.append((target, values.clone()))
    return moves


def total(calls: Sequence[NcclCall], rows: list[Tensor]) -> Tensor:
    kind, dtype = calls[0].reduction, calls[0].dtype
    assert dtype in REDUCIBLE
    assert kind in api.REDUCTIONS or kind is RedOpType.PREMUL_SUM
    assert dtype.is_floating_point or kind is not RedOpType.AVG, "NCCL rounds averages of integers in its own way"
    if kind is RedOpType.PREMUL_SUM:
        for i, call in enumerate(calls):
            assert call.factor is not None
            assert call.factor.dtype == dtype
            assert call.factor.shape == (1,)
            rows[i] = rows[i] * call.factor
        kind = RedOpType.SUM
    else:
        assert all(call.factor is None for call in calls)
    assert kind is not None
    reduction = ReduceOp(kind)
    result = torch.empty_like(rows[0])
    wide = torch.stack([arithmetic.widen(row, reduction) for row in rows])
    arithmetic.narrow(arithmetic.combine(wide, reduction), result, reduction, len(rows))
    return result


# -- moves ------------------------------------------------------------------------------------------------------------

BYTE = torch.uint8


@cases("dtype", DTYPES)
@cases("rank", [0, 1])
def test_broadcast_moves_the_bytes_of_any_dtype(dtype: torch.dtype, rank: int) -> None:
    tensor = sample(rank, (3,), dtype)
    plan = plan_of(Broadcast.of(group(rank), tensor, 1), rank=rank)
    assert told(plan, tensor) == [("broadcast", "0+0", "0+0", 3 * dtype.itemsize, BYTE, 1)]
    assert steps(plan) == (0, 0)
    assert rooms(plan) == []


def test_broadcast_of_several_is_a_call_each() -> None:
    tensors = [torch.ones(3), torch.ones(0), strided(torch.ones(2, dtype=torch.bool))]
    plan = plan_of(Broadcast.of_several(group(), tensors, 1))
    assert told(plan, *tensors) == [
        ("broadcast", "0+0", "0+0", 12, BYTE, 1),
        ("broadcast", "new", "new", 2, BYTE, 1),
    ]
    assert steps(plan) == (0, 1)


@pytest.mark.parametrize(
    "tensor",
    [
        strided(torch.ones(3, 2)),
        torch.ones(4, 2).t(),
        torch.ones(8, dtype=torch.complex64).conj(),
        negated(torch.ones(8)),
        torch.ones(1).expand(8),
    ],
    ids=["strided", "transposed", "conjugated", "negated", "expanded"],
)
def test_what_is_not_plain_is_sent_from_a_copy(tensor: Tensor) -> None:
    plan = plan_of(Broadcast.of(group(), tensor, 0))
    call = only(plan)
    assert where(call.source, tensor) == "new"
    assert steps(plan) == (1, 0), "the source is only read"
    plan.before[0]()
    assert call.source is not None
    assert torch.equal(call.source, bytes_of(tensor.resolve_conj().resolve_neg().contiguous()))


@pytest.mark.parametrize(
    "tensor",
    [strided(torch.zeros(4, 2)), torch.zeros(8, dtype=torch.complex64).conj(), negated(torch.zeros(8))],
    ids=["strided", "conjugated", "negated"],
)
def test_what_is_not_plain_is_received_in_memory_beside_it(tensor: Tensor) -> None:
    plan = plan_of(Broadcast.of(group(), tensor, 1))
    call = only(plan)
    assert where(call.target, tensor) == "new"
    assert steps(plan) == (0, 1)
    assert call.target is not None
    values = sample(1, tensor.shape, tensor.dtype)
    call.target.copy_(bytes_of(values))
    plan.after[0]()
    assert torch.equal(tensor, values)


@cases("shape", [(2,), (2, 1), (1, 2)])
def test_all_gather_single(shape: tuple[int, ...]) -> None:
    source, output = torch.ones(shape), torch.zeros(3, 2)
    plan = plan_of(AllGatherSingle.of(group(1, 3), output, source), rank=1, size=3)
    assert told(plan, source, output) == [("all_gather", "0+0", "1+0", 8, BYTE, -1)]
    assert steps(plan) == (0, 0)


@cases("rank", range(3))
def test_all_gather_in_place_needs_no_copy(rank: int) -> None:
    output = torch.zeros(6)
    plan = plan_of(AllGatherSingle.of(group(rank, 3), output, output[2 * rank : 2 * rank + 2]), rank=rank, size=3)
    assert told(plan, output) == [("all_gather", f"0+{8 * rank}", "0+0", 8, BYTE, -1)]
    assert steps(plan) == (0, 0)
    parts = list(output.split(2))
    plan = plan_of(AllGather.of(group(rank, 3), parts, parts[rank]), rank=rank, size=3)
    assert told(plan, output) == [("all_gather", f"0+{8 * rank}", "0+0", 8, BYTE, -1)]


@cases("start", [1, 2, 3])
def test_all_gather_of_something_else_within_the_output_copies_it(start: int) -> None:
    output = torch.zeros(4)
    source = torch.cat([output, torch.zeros(1)])  # one behind the end, for start 3
    plan = plan_of(AllGatherSingle.of(group(), source[:4], source[start : start + 2]))
    assert told(plan, source) == [("all_gather", "new", "0+0", 8, BYTE, -1)]
    assert steps(plan) == (1, 0)


def test_all_gather_in_place_of_a_conjugated_view() -> None:
    output = torch.zeros(4, dtype=torch.complex64)
    plan = plan_of(AllGatherSingle.of(group(), output, output[:2].conj()))
    assert told(plan, output) == [("all_gather", "new", "0+0", 16, BYTE, -1)]


def test_all_gather_into_a_list_that_adjoins_is_one_call() -> None:
    source, whole = torch.ones(2), torch.zeros(6)
    plan = plan_of(AllGather.of(group(2, 3), list(whole.split(2)), source), rank=2, size=3)
    assert told(plan, source, whole) == [("all_gather", "0+0", "1+0", 8, BYTE, -1)]


def test_all_gather_into_any_list_is_the_same_call() -> None:
    """The other ranks' lists may adjoin."""
    source, outputs = torch.ones(2), [torch.zeros(2), strided(torch.zeros(2)), torch.zeros(2)]
    plan = plan_of(AllGather.of(group(2, 3), outputs, source), rank=2, size=3)
    assert told(plan, source, *outputs) == [("all_gather", "0+0", "new", 8, BYTE, -1)]
    assert steps(plan) == (0, 3)


@cases("adjoin", [False, True])
def test_all_gather_of_uneven_shares(adjoin: bool) -> None:
    counts = [1, 0, 3]
    outputs = list(torch.zeros(4).split(counts)) if adjoin else [torch.zeros(n) for n in counts]
    source = torch.ones(3)
    plan = plan_of(AllGather.of(group(2, 3), outputs, source), rank=2, size=3)
    assert [(call.name, call.count, call.peer) for call in plan.calls] == [("broadcast", 4, 0), ("broadcast", 12, 2)]
    assert [where(call.source, source) for call in plan.calls] == ["new", "0+0"]
    assert steps(plan) == (0, 0)


def test_all_gather_of_several() -> None:
    inputs = [torch.ones(2), torch.ones(1, dtype=torch.int64)]
    outputs = [[torch.zeros(2), torch.zeros(1, dtype=torch.int64)] for _ in range(2)]
    plan = plan_of(AllGather.of_several(group(1), outputs, inputs), rank=1)
    assert told(plan, *inputs, *outputs[0], *outputs[1]) == [
        ("broadcast", "2+0", "2+0", 8, BYTE, 0),
        ("broadcast", "3+0", "3+0", 8, BYTE, 0),
        ("broadcast", "0+0", "4+0", 8, BYTE, 1),
        ("broadcast", "1+0", "5+0", 8, BYTE, 1),
    ]


def test_all_gather_of_a_source_around_its_output() -> None:
    """It begins where its output does, and goes on into another one's."""
    memory = torch.arange(4.0)
    outputs = [memory[0:4:2], memory[1:2]]
    plan = plan_of(AllGather.of(group(), outputs, memory[:2]))
    assert where(plan.calls[0].source, memory) == "new"
    other = plan_of(AllGather.of(group(1), [torch.zeros(2), torch.zeros(1)], torch.tensor([9.0])), rank=1)
    run([plan, other])
    assert memory.tolist() == [0, 9, 1, 3]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("adjoin", [False, True])
@NATIVE
def test_gather(rank: int, adjoin: bool, native: frozenset[str]) -> None:
    source, whole = torch.ones(2), torch.zeros(4)
    outputs = list(whole.split(2)) if adjoin else [torch.zeros(2), torch.zeros(2)]
    plan = plan_of(Gather.of(group(rank), outputs if rank == 1 else None, source, 1), rank=rank, native=native)
    if native:
        place = "" if rank == 0 else "1+0" if adjoin else "new"
        assert told(plan, source, whole) == [("gather", "0+0", place, 8, BYTE, 1)]
        assert steps(plan) == (0, 2 if rank == 1 and not adjoin else 0)
        return
    wanted = [("send", "0+0", "", 8, BYTE, 1)]
    if rank == 1:
        wanted += [("recv", "", "1+0", 8, BYTE, 0), ("recv", "", "1+8" if adjoin else "2+0", 8, BYTE, 1)]
    assert told(plan, source, *([whole] if adjoin else outputs)) == wanted
    assert steps(plan) == (0, 0)


@NATIVE
def test_gather_of_one_of_its_outputs_sends_a_copy(native: frozenset[str]) -> None:
    whole = torch.zeros(4)
    plan = plan_of(Gather.of(group(), list(whole.split(2)), whole[1:3], 0), native=native)
    assert where(plan.calls[0].source, whole) == "new"
    assert steps(plan) == (1, 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("adjoin", [False, True])
@NATIVE
def test_scatter(rank: int, adjoin: bool, native: frozenset[str]) -> None:
    whole, output = torch.ones(4), torch.zeros(2)
    inputs = list(whole.split(2)) if adjoin else [torch.ones(2), torch.ones(2)]
    plan = plan_of(Scatter.of(group(rank), output, inputs if rank == 1 else None, 1), rank=rank, native=native)
    if native:
        place = "" if rank == 0 else "1+0" if adjoin else "new"
        assert told(plan, output, whole) == [("scatter", place, "0+0", 8, BYTE, 1)]
        assert steps(plan) == (2 if rank == 1 and not adjoin else 0, 0)
        return
    wanted = [("recv", "", "0+0", 8, BYTE, 1)]
    if rank == 1:
        there = ["1+0", "1+8"] if adjoin else ["1+0", "2+0"]
        wanted = [*[("send", place, "", 8, BYTE, i) for i, place in enumerate(there)], *wanted]
    assert told(plan, output, *([whole] if adjoin else inputs)) == wanted
    assert steps(plan) == (0, 0)


@NATIVE
def test_scatter_into_one_of_its_inputs_sends_copies(native: frozenset[str]) -> None:
    whole = torch.zeros(4)
    plan = plan_of(Scatter.of(group(), whole[:2], list(whole.split(2)), 0), native=native)
    found = [where(call.source, whole) for call in plan.calls if call.source is not None]
    # native, both are collected in one piece; else only the one that is written goes from a copy
    assert (found, steps(plan)) == ((["new"], (3, 0)) if native else (["new", "0+8"], (1, 0)))


@NATIVE
def test_all_to_all_single(native: frozenset[str]) -> None:
    source, output = torch.ones(6), torch.zeros(3, 2)
    plan = plan_of(AllToAllSingle.of(group(1, 3), output, source), rank=1, size=3, native=native)
    if native:
        assert told(plan, source, output) == [("all_to_all", "0+0", "1+0", 8, BYTE, -1)]
    else:
        assert told(plan, source, output) == [
            call
            for peer in range(3)
            for call in (("send", f"0+{8 * peer}", "", 8, BYTE, peer), ("recv", "", f"1+{8 * peer}", 8, BYTE, peer))
        ]
    assert steps(plan) == (0, 0)


@NATIVE
def test_all_to_all_in_place_sends_a_copy(native: frozenset[str]) -> None:
    tensor = torch.arange(4.0)
    plan = plan_of(AllToAllSingle.of(group(), tensor, tensor), native=native)
    assert {where(call.source, tensor) for call in plan.calls if call.source is not None} == {"new"}
    assert where(plan.calls[-1].target, tensor) != "new"
    assert steps(plan) == (1, 0)
    parts = list(tensor.split(2))
    plan = plan_of(AllToAll.of(group(), parts, parts), native=native)
    assert told(plan, tensor) == [
        ("send", "new", "", 8, BYTE, 0),
        ("recv", "", "0+0", 8, BYTE, 0),
        ("send", "new", "", 8, BYTE, 1),
        ("recv", "", "0+8", 8, BYTE, 1),
    ]


def test_all_to_all_of_uneven_shares() -> None:
    inputs, outputs = [torch.ones(0), torch.ones(3)], [torch.zeros(2), strided(torch.zeros(3))]
    plan = plan_of(AllToAll.of(group(1), outputs, inputs), rank=1)
    assert told(plan, *inputs, *outputs) == [
        ("recv", "", "2+0", 8, BYTE, 0),
        ("send", "1+0", "", 12, BYTE, 1),
        ("recv", "", "new", 12, BYTE, 1),
    ]
    assert steps(plan) == (0, 1)


# -- messages, which are NCCL's own only within a graph ---------------------------------------------------------------


@cases("dtype", [torch.float32, torch.complex64, torch.bool])
def test_messages_are_bytes(dtype: torch.dtype) -> None:
    tensor = sample(0, (3,), dtype)
    plan = plan_of(Send.of(group(), tensor, 1, 0), Recv.of(group(), tensor, 1, 0))
    assert told(plan, tensor) == [
        ("send", "0+0", "", tensor.nbytes, BYTE, 1),
        ("recv", "", "0+0", tensor.nbytes, BYTE, 1),
    ]
    assert steps(plan) == (0, 0)


def test_messages_of_strided_tensors_are_staged() -> None:
    tensor = strided(torch.zeros(3))
    plan = plan_of(Send.of(group(), tensor, 1, 0), Recv.of(group(), tensor, 1, 0))
    assert {where(call.source, tensor) + where(call.target, tensor) for call in plan.calls} == {"new"}
    assert steps(plan) == (1, 1)


def test_a_receive_from_anybody_has_no_peer() -> None:
    with pytest.raises(ValueError, match="must name its source: src="):
        plan_of(Recv.of(group(), torch.zeros(1), None, 0))


# -- reductions -------------------------------------------------------------------------------------------------------


@cases(
    "dtype, op",
    [
        (dtype, op)
        for dtype, op in combinations(sorted(REDUCIBLE, key=str))
        if op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
    ],
    ids=str,
)
def test_what_nccl_can_reduce_is_reduced_where_it_is(dtype: torch.dtype, op: ReduceOp) -> None:
    tensor = sample(0, (4, 3), dtype)
    plan = plan_of(AllReduce.of(group(), tensor, op))
    assert told(plan, tensor) == [("all_reduce", "0+0", "0+0", 12, dtype, -1)]
    assert only(plan).reduction is op.type
    assert steps(plan) == (0, 0)


@cases("dtype", FLOATS)
def test_floats_are_averaged_by_nccl(dtype: torch.dtype) -> None:
    tensor = sample(0, (3,), dtype)
    plan = plan_of(AllReduce.of(group(), tensor, ReduceOp.AVG))
    assert told(plan, tensor) == [("all_reduce", "0+0", "0+0", 3, dtype, -1)]
    assert only(plan).reduction is RedOpType.AVG


@cases("dtype", sorted(api.FLOAT8, key=str))
@cases("op, factor", [(ReduceOp.AVG, 1), (ReduceOp.PREMUL_SUM(2.0), 2)])
def test_float8_is_scaled_here_where_nccl_has_one_rank(dtype: torch.dtype, op: ReduceOp, factor: int) -> None:
    tensor = torch.tensor([1.0, -3.0, 0.5]).to(dtype)
    plan = plan_of(AllReduce.of(group(0, 1), tensor, op), size=1, dtypes=frozenset(api.DTYPES))
    assert told(plan, tensor) == [("all_reduce", "new", "new", 3, torch.float32, -1)]
    assert only(plan).reduction is RedOpType.SUM
    run([plan])
    assert tensor.float().tolist() == [factor, -3 * factor, factor / 2]
    several = plan_of(AllReduce.of(group(), tensor, op), dtypes=frozenset(api.DTYPES))
    assert only(several).reduction is op.type


@cases(
    "dtype, wide",
    [
        (torch.int8, torch.int32),
        (torch.uint8, torch.int32),
        (torch.int16, torch.int32),
        (torch.int32, torch.int64),
        (torch.int64, torch.int64),
        (torch.uint16, torch.int32),
        (torch.uint32, torch.int64),
    ],
)
def test_integers_are_added_wide_and_divided_afterwards(dtype: torch.dtype, wide: torch.dtype) -> None:
    tensor = torch.full((3,), 100, dtype=dtype)
    plan = plan_of(AllReduce.of(group(), tensor, ReduceOp.AVG))
    assert told(plan, tensor) == [("all_reduce", "new", "new", 3, wide, -1)]
    assert only(plan).reduction is RedOpType.SUM
    run([plan, plan_of(AllReduce.of(group(1), torch.full((3,), 101, dtype=dtype), ReduceOp.AVG), rank=1)])
    assert tensor.tolist() == [100] * 3, "201 / 2, towards zero, and without a wrap"


@cases(
    "dtype, wide, count",
    [(torch.int16, torch.int32, 3), (torch.uint16, torch.int32, 3), (torch.complex32, torch.float32, 6)],
)
def test_what_nccl_cannot_add_is_widened(dtype: torch.dtype, wide: torch.dtype, count: int) -> None:
    tensor = sample(0, (3,), dtype)
    plan = plan_of(AllReduce.of(group(), tensor, ReduceOp.SUM))
    assert told(plan, tensor) == [("all_reduce", "new", "new", count, wide, -1)]
    assert steps(plan) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG], ids=str)
def test_complex_numbers_are_pairs_in_their_own_memory(dtype: torch.dtype, op: ReduceOp) -> None:
    tensor = sample(0, (3,), dtype)
    plan = plan_of(AllReduce.of(group(), tensor, op))
    assert told(plan, tensor) == [("all_reduce", "0+0", "0+0", 6, dtype.to_real(), -1)]
    assert only(plan).reduction is op.type
    lazy = plan_of(AllReduce.of(group(), tensor.conj(), op))
    assert told(lazy, tensor) == [("all_reduce", "new", "new", 6, dtype.to_real(), -1)]
    assert steps(lazy) == (1, 1)


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (ReduceOp.SUM, RedOpType.MAX),
        (ReduceOp.PRODUCT, RedOpType.MIN),
        (ReduceOp.MIN, RedOpType.MIN),
        (ReduceOp.MAX, RedOpType.MAX),
        (ReduceOp.BAND, RedOpType.MIN),
        (ReduceOp.BOR, RedOpType.MAX),
    ],
    ids=str,
)
def test_bools_are_bytes(op: ReduceOp, kind: RedOpType) -> None:
    tensor = torch.tensor([True, False])
    plan = plan_of(AllReduce.of(group(), tensor, op))
    assert told(plan, tensor) == [("all_reduce", "0+0", "0+0", 2, BYTE, -1)]
    assert only(plan).reduction is kind


@pytest.mark.parametrize("factor", [2.5, 3, torch.tensor(2.5), torch.tensor([[3]])], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_nccl_multiplies_floats_by_a_factor_in_their_own_dtype(dtype: torch.dtype, factor: Any) -> None:
    tensor = sample(0, (3,), dtype)
    plan = plan_of(AllReduce.of(group(), tensor, ReduceOp.PREMUL_SUM(factor)))
    assert told(plan, tensor) == [("all_reduce", "0+0", "0+0", 3, dtype, -1)]
    call = only(plan)
    assert call.reduction is RedOpType.PREMUL_SUM
    assert steps(plan) == (1, 0)
    plan.before[0]()
    assert call.factor is not None
    assert call.factor.tolist() == [float(factor)]
    assert call.factor.dtype == dtype


def test_one_factor_serves_several_tensors_of_an_operation() -> None:
    shares = [[torch.ones(2), torch.ones(3)] for _ in range(2)]
    call = ReduceScatter.of_several(group(), [torch.zeros(2), torch.zeros(3)], shares, ReduceOp.PREMUL_SUM(2))
    plan = plan_of(call)
    assert len(plan.calls) == 4
    assert len({call.factor.data_ptr() for call in plan.calls if call.factor is not None}) == 1


@cases(
    "dtype, factor, wide",
    [
        (torch.int32, 3, torch.int32),
        (torch.uint8, torch.tensor(3), torch.uint8),
        (torch.int16, 3, torch.int32),
        (torch.complex64, 1 + 2j, torch.float32),
        (torch.complex32, 2, torch.float32),
        (torch.complex128, torch.tensor(2j), torch.float64),
    ],
)
def test_other_factors_are_applied_before(dtype: torch.dtype, factor: Any, wide: torch.dtype) -> None:
    tensor = sample(0, (3,), dtype)
    before = tensor.clone()
    plan = plan_of(AllReduce.of(group(size=1), tensor, ReduceOp.PREMUL_SUM(factor)), size=1)
    call = only(plan)
    assert (call.reduction, call.dtype, call.factor) == (RedOpType.SUM, wide, None)
    assert where(call.source, tensor) == "new"
    run([plan])
    number = factor.item() if isinstance(factor, Tensor) else factor
    assert tensor.tolist() == [value * number for value in before.tolist()]


@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR], ids=str)
@pytest.mark.parametrize(("dtype", "wide"), [(torch.int64, 8), (torch.uint8, 1), (torch.int16, 4), (torch.uint32, 8)])
def test_bitwise_reductions_are_gathered(op: ReduceOp, dtype: torch.dtype, wide: int) -> None:
    tensors = [sample(rank, (3,), dtype) for rank in range(2)]
    plans = [plan_of(AllReduce.of(group(r), tensors[r], op), rank=r) for r in range(2)]
    assert told(plans[0], tensors[0]) == [("all_gather", "new", "new", 3 * wide, BYTE, -1)]
    run(plans)
    assert torch.equal(tensors[0].long(), tensors[1].long())


def test_bxor_of_bools_is_gathered_and_the_rest_is_not() -> None:
    tensor = torch.tensor([True, False, True])
    plan = plan_of(AllReduce.of(group(), tensor, ReduceOp.BXOR))
    assert told(plan, tensor) == [("all_gather", "0+0", "new", 3, BYTE, -1)]


@cases("rank", [0, 1])
def test_bitwise_reduce_sends_to_the_root_only(rank: int) -> None:
    tensor = sample(rank, (2,), torch.int32)
    plan = plan_of(Reduce.of(group(rank), tensor, 1, ReduceOp.BAND), rank=rank)
    wanted = [("send", "new", "", 8, BYTE, 1)]
    if rank == 1:
        wanted += [("recv", "", "new", 8, BYTE, 0), ("recv", "", "new", 8, BYTE, 1)]
    assert told(plan, tensor) == wanted


def test_bitwise_reduce_scatter_exchanges_what_is_needed() -> None:
    source, output = sample(0, (4,), torch.int32), torch.zeros(2, dtype=torch.int32)
    plan = plan_of(ReduceScatterSingle.of(group(), output, source, ReduceOp.BOR))
    assert [(call.name, call.count, call.peer) for call in plan.calls] == [
        ("send", 8, 0),
        ("recv", 8, 0),
        ("send", 8, 1),
        ("recv", 8, 1),
    ]


def test_reduce_writes_on_the_root_only() -> None:
    tensor = torch.ones(3)
    plan = plan_of(Reduce.of(group(), tensor, 1, ReduceOp.SUM))
    assert told(plan, tensor) == [("reduce", "0+0", "", 3, torch.float32, 1)]
    plan = plan_of(Reduce.of(group(1), tensor, 1, ReduceOp.SUM), rank=1)
    assert told(plan, tensor) == [("reduce", "0+0", "0+0", 3, torch.float32, 1)]
    out = torch.zeros(3)
    plan = plan_of(Reduce.of(group(1), tensor, 1, ReduceOp.SUM, out), rank=1)
    assert told(plan, tensor, out) == [("reduce", "0+0", "1+0", 3, torch.float32, 1)]


def test_an_output_of_its_own_is_reduced_in() -> None:
    tensor, out = torch.ones(3), torch.zeros(3)
    plan = plan_of(AllReduce.of(group(), tensor, ReduceOp.SUM, out))
    assert told(plan, tensor, out) == [("all_reduce", "0+0", "1+0", 3, torch.float32, -1)]
    assert steps(plan) == (0, 0)
    gaps = strided(out)
    plan = plan_of(AllReduce.of(group(), tensor, ReduceOp.SUM, gaps))
    assert told(plan, tensor, gaps) == [("all_reduce", "0+0", "new", 3, torch.float32, -1)]
    assert steps(plan) == (0, 1)


@cases("start", [0, 1])
def test_an_output_across_the_input_is_reduced_from_a_copy(start: int) -> None:
    memory = torch.arange(5.0)
    plan = plan_of(AllReduce.of(group(), memory[1 - start :][:3], ReduceOp.SUM, memory[start:][:3]))
    assert told(plan, memory) == [("all_reduce", "new", f"0+{4 * start}", 3, torch.float32, -1)]


def test_strided_tensors_are_reduced_in_one_copy() -> None:
    tensor = strided(torch.ones(2, 3))
    plan = plan_of(AllReduce.of(group(), tensor, ReduceOp.SUM))
    assert told(plan, tensor) == [("all_reduce", "new", "new", 6, torch.float32, -1)]
    assert len(rooms(plan)) == 1
    assert steps(plan) == (1, 1)


def test_all_reduce_of_several_is_a_call_each() -> None:
    tensors = [torch.ones(2), torch.ones(0), torch.ones(3)]
    plan = plan_of(AllReduce.of_several(group(), tensors, ReduceOp.SUM))
    assert told(plan, *tensors) == [
        ("all_reduce", "0+0", "0+0", 2, torch.float32, -1),
        ("all_reduce", "2+0", "2+0", 3, torch.float32, -1),
    ]


@cases("dtype", [torch.float32, torch.int16])
def test_a_tensor_that_is_there_twice_is_reduced_once(dtype: torch.dtype) -> None:
    tensors = [torch.full((2,), rank + 1, dtype=dtype) for rank in range(2)]
    calls = [AllReduce.of_several(group(r), [tensors[r], tensors[r]], ReduceOp.SUM) for r in range(2)]
    run([plan_of(call, rank=rank) for rank, call in enumerate(calls)])
    assert [tensor.tolist() for tensor in tensors] == [[3, 3], [3, 3]]


def test_tensors_that_share_memory_are_each_reduced_once() -> None:
    memory = [torch.arange(3.0) for _ in range(2)]
    calls = [AllReduce.of_several(group(r), [memory[r][:2], memory[r][1:]], ReduceOp.SUM) for r in range(2)]
    run([plan_of(call, rank=rank) for rank, call in enumerate(calls)])
    assert [tensor.tolist() for tensor in memory] == [[0, 2, 4]] * 2


@cases("rank", [0, 1])
def test_reduce_scatter_single(rank: int) -> None:
    source, output = torch.ones(4), torch.zeros(2)
    plan = plan_of(ReduceScatterSingle.of(group(rank), output, source, ReduceOp.AVG), rank=rank)
    assert told(plan, source, output) == [("reduce_scatter", "0+0", "1+0", 2, torch.float32, -1)]
    own = source[2 * rank : 2 * rank + 2]
    plan = plan_of(ReduceScatterSingle.of(group(rank), own, source, ReduceOp.SUM), rank=rank)
    assert told(plan, source) == [("reduce_scatter", "0+0", f"0+{8 * rank}", 2, torch.float32, -1)]
    assert steps(plan) == (0, 0)
    another = source[2 - 2 * rank : 4 - 2 * rank]
    plan = plan_of(ReduceScatterSingle.of(group(rank), another, source, ReduceOp.SUM), rank=rank)
    assert told(plan, source) == [("reduce_scatter", "new", f"0+{8 - 8 * rank}", 2, torch.float32, -1)]
    assert steps(plan) == (1, 0)


@cases("dtype", [torch.float32, torch.complex64, torch.bool, torch.uint64])
def test_reduce_scatter_of_a_list_that_adjoins_is_one_call(dtype: torch.dtype) -> None:
    whole, output = sample(0, (5,), dtype)[1:], sentinel((2,), dtype)
    plan = plan_of(ReduceScatter.of(group(), output, list(whole.split(2)), ReduceOp.SUM))
    (call,) = plan.calls
    assert call.name == "reduce_scatter"
    assert (where(call.source, whole), where(call.target, output)) == (f"0+{dtype.itemsize}", "0+0")


def test_reduce_scatter_of_any_list_is_the_same_call() -> None:
    inputs, output = [torch.ones(2), strided(torch.ones(2))], torch.zeros(2)
    plan = plan_of(ReduceScatter.of(group(1), output, inputs, ReduceOp.MAX), rank=1)
    assert told(plan, *inputs, output) == [("reduce_scatter", "new", "2+0", 2, torch.float32, -1)]
    assert steps(plan) == (2, 0)


def test_reduce_scatter_of_uneven_shares_is_a_reduce_each() -> None:
    inputs, output = [torch.ones(1), strided(torch.ones(2))], torch.zeros(2)
    plan = plan_of(ReduceScatter.of(group(1), output, inputs, ReduceOp.MAX), rank=1)
    assert told(plan, *inputs, output) == [
        ("reduce", "0+0", "", 1, torch.float32, 0),
        ("reduce", "new", "2+0", 2, torch.float32, 1),
    ]
    inputs = [torch.ones(0), torch.ones(3)]
    plan = plan_of(ReduceScatter.of(group(), torch.zeros(0), inputs, ReduceOp.MAX))
    assert told(plan, *inputs) == [("reduce", "1+0", "", 3, torch.float32, 1)]


# -- the same calls on all ranks, wherever their tensors lie


def layouts_of(numel: int, count: int) -> list[list[Tensor]]:
    """Lists of tensors: in one piece, apart, strided, shifted over each other, and all the same."""
    whole = torch.ones(count * numel + 1)
    return [
        list(whole[1:].split(numel)),
        [torch.ones(numel) for _ in range(count)],
        [strided(torch.ones(numel)) for _ in range(count)],
        [whole[i : i + numel] for i in range(count)],
        [whole[:numel]] * count,
    ]


@NATIVE
@pytest.mark.parametrize("kind", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.BOR], ids=str)
def test_which_calls_are_made_does_not_depend_on_layouts(native: frozenset[str], kind: ReduceOp) -> None:
    size, n, dtype = 3, 2, torch.int32 if kind is ReduceOp.BOR else torch.float32
    forms: dict[str, list[list[tuple[Any, ...]]]] = {}
    for lists in layouts_of(n, size):
        many = [tensor.view(dtype) for tensor in lists]
        for one in (torch.ones(n, dtype=dtype), many[0], many[1], many[-1]):
            g = group(1, size)
            for call in (
                AllReduce.of_several(g, many, kind),
                AllGather.of(g, many, one),
                Gather.of(g, many, one, 1),
                Scatter.of(g, one, many, 1),
                ReduceScatter.of(g, one, many, kind),
                AllToAll.of(g, many, many[::-1]),
                Broadcast.of_several(g, many, 0),
            ):
                plan = plan_of(call, rank=1, size=size, native=native)
                made = [(c.name, c.count, c.dtype, c.peer, c.reduction) for c in plan.calls]
                forms.setdefault(call.op.kind, []).append(made)
    for name, made_by_layout in forms.items():
        assert all(made == made_by_layout[0] for made in made_by_layout), name


# -- nothing, and several at once --------------------------------------------------------------------------------------


def empty_calls(op: ReduceOp, dtype: torch.dtype) -> list[Call]:
    here = group()

    def nothing() -> Tensor:
        return torch.empty(0, dtype=dtype)

    def two() -> list[Tensor]:
        return [nothing(), nothing()]

    return [
        AllReduce.of(here, nothing(), op),
        AllReduce.of(here, nothing(), op, nothing()),
        Reduce.of(here, nothing(), 0, op),
        Reduce.of(here, nothing(), 1, op),
        ReduceScatterSingle.of(here, nothing(), nothing(), op),
        ReduceScatter.of(here, nothing(), two(), op),
        Broadcast.of(here, nothing(), 0),
        AllGatherSingle.of(here, nothing(), nothing()),
        AllGather.of(here, two(), nothing()),
        Gather.of(here, two(), nothing(), 0),
        Scatter.of(here, nothing(), two(), 0),
        AllToAllSingle.of(here, nothing(), nothing()),
        AllToAll.of(here, two(), two()),
    ]


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64, torch.bool])
def test_nothing_is_no_call(dtype: torch.dtype, native: frozenset[str]) -> None:
    bitwise = [ReduceOp.BXOR] if dtype in (torch.bool, torch.int16) else []
    for op in [ReduceOp.SUM, *bitwise]:
        for call in empty_calls(op, dtype):
            plan = plan_of(call, native=native)
            assert plan.calls == [], call.op
            for step in (*plan.before, *plan.after):
                step()


def test_a_batch_is_one_plan() -> None:
    a, b = torch.ones(2), torch.zeros(4)
    plan = plan_of(AllReduce.of(group(), a, ReduceOp.SUM), Broadcast.of(group(), b, 1))
    assert [call.name for call in plan.calls] == ["all_reduce", "broadcast"]


def test_nothing_runs_while_it_is_described() -> None:
    tensor = strided(torch.ones(2, 3))
    before = tensor.clone()
    plan = plan_of(AllReduce.of(group(), tensor, ReduceOp.PREMUL_SUM(2)))
    assert torch.equal(tensor, before)
    assert all(bool((room == 0xA5).all()) for room in rooms(plan))


def test_what_is_no_tensors_is_refused() -> None:
    with pytest.raises(AssertionError, match="no such collective"):
        plan_of(Barrier.of(group()))


def test_memory_made_in_inference_mode() -> None:
    with torch.inference_mode():
        tensors = [strided(torch.full((2, 2), rank + 1.0)) for rank in range(2)]
    run([plan_of(AllReduce.of(group(r), tensors[r], ReduceOp.SUM), rank=r) for r in range(2)])
    assert tensors[0].eq(3).all()


# -- everything, against another backend -------------------------------------------------------------------------------

LAYOUTS = ["plain", "plain", "strided", "offset", "turned", "lazy"]
KINDS = [
    *("all_reduce", "all_reduce out", "all_reduce several", "reduce", "reduce out"),
    *("reduce_scatter_single", "reduce_scatter", "reduce_scatter several"),
    *("broadcast", "broadcast several", "all_gather_single", "all_gather", "all_gather several"),
    *("gather", "scatter", "all_to_all_single", "all_to_all"),
]


@dataclass
class Scene:
    """One operation of all ranks, as hypothesis has thought it up. Builds equal calls again and again."""

    kind: str
    dtype: torch.dtype
    size: int
    counts: tuple[int, ...]  #: elements / 2, of what has several extents
    layouts: tuple[str, ...]
    op: ReduceOp
    native: frozenset[str]
    shared: int | None  #: input and output lie in one memory, so many elements apart; at 0 "in place" if that is one
    adjoin: bool
    memory: list[Tensor] = field(default_factory=list)  #: of all tensors, for comparing

    def __post_init__(self) -> None:
        self._turns = itertools.cycle(self.layouts)

    def count(self, i: int) -> int:
        return self.counts[i % len(self.counts)]

    def keep(self, tensor: Tensor) -> Tensor:
        self.memory.append(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))
        return tensor

    def laid(self, values: Tensor) -> Tensor:
        match next(self._turns):
            case "strided":
                return self.keep(strided(values))
            case "offset":
                return self.keep(torch.cat([torch.zeros_like(values), values])[len(values) :])
            case "turned":
                return self.keep(values.t().clone(memory_format=torch.contiguous_format).t())
            case "lazy" if values.is_complex():
                return self.keep(values.conj().resolve_conj().conj())
            case "lazy" if values.dtype in (torch.float32, torch.float64):
                return self.keep(negated(values))
        return self.keep(values.clone())

    def input(self, rank: int, n: int, salt: int = 0) -> Tensor:
        return self.laid(sample(rank, (n, 2), self.dtype, salt))

    def output(self, n: int) -> Tensor:
        return self.laid(sentinel((n, 2), self.dtype))

    def list_of(self, rank: int | None, counts: Sequence[int], salt: int = 0) -> list[Tensor]:
        """Inputs of ``rank``, or outputs."""
        if not self.adjoin:
            return [self.output(n) if rank is None else self.input(rank, n, salt + i) for i, n in enumerate(counts)]
        whole = sentinel((sum(counts), 2), self.dtype)
        if rank is not None:
            whole = sample(rank, (sum(counts), 2), self.dtype, salt)
        return list(self.keep(whole).split(list(counts)))

    def beside(self, parts: Sequence[Tensor] | None, own: int, n: int, rank: int | None = None) -> Tensor:
        """Input of ``rank`` or an output: of its own, or one of ``parts``, or across them if they adjoin."""
        if parts is None or self.shared is None:
            return self.output(n) if rank is None else self.input(rank, n)
        if not self.adjoin or sum([part.numel() for part in parts]) < 2 * n + self.shared or not self.shared:
            return parts[own]
        return self.memory[-1].view(self.dtype)[self.shared :][: 2 * n]

    def pair(self, rank: int, inputs: int, outputs: int, own: str = "") -> tuple[Tensor, Tensor]:
        """A single input and a single output; ``own``: which of the two is a share of the other, in place."""
        if self.shared is None:
            return self.input(rank, inputs), self.output(outputs)
        long = 2 * (inputs + outputs) + self.shared + 8
        memory = self.keep(sample(rank, (long,), self.dtype))
        start = [self.shared, 0]
        if not self.shared:
            start = [2 * rank * inputs, 0] if own == "input" else [0, 2 * rank * outputs if own else 0]
            memory = torch.cat([memory, memory, memory, memory])
            self.memory.pop()
            self.keep(memory)
        first, second = (memory[at : at + 2 * n] for at, n in zip(start, (inputs, outputs), strict=True))
        return first, second

    def reduction(self, rank: int) -> ReduceOp:
        """Each rank has its own factor."""
        factor = self.op.factor
        if factor is None:
            return self.op
        return ReduceOp.PREMUL_SUM(factor * (rank + 1))

    def call(self, rank: int) -> Call:
        here, size, n = group(rank, self.size), self.size, self.count(0)
        root = self.counts[-1] % size
        everybody = [self.count(r) for r in range(size)]
        op = self.reduction(rank)
        match self.kind:
            case "all_reduce":
                return AllReduce.of(here, self.input(rank, n), op)
            case "all_reduce out":
                source, out = self.pair(rank, n, n)
                return AllReduce.of(here, source, op, out)
            case "all_reduce several":
                return AllReduce.of_several(here, self.list_of(rank, self.counts), op)
            case "reduce":
                return Reduce.of(here, self.input(rank, n), root, op)
            case "reduce out":
                source, out = self.pair(rank, n, n)
                return Reduce.of(here, source, root, op, out)
            case "reduce_scatter_single":
                source, out = self.pair(rank, n * size, n, "output")
                return ReduceScatterSingle.of(here, out, source, op)
            case "reduce_scatter":
                inputs = self.list_of(rank, everybody)
                return ReduceScatter.of(here, self.beside(inputs, rank, everybody[rank]), inputs, op)
            case "reduce_scatter several":
                shares = [self.list_of(rank, self.counts, salt=r) for r in range(size)]
                return ReduceScatter.of_several(here, self.list_of(None, self.counts), shares, op)
            case "broadcast":
                return Broadcast.of(here, self.input(rank, n), root)
            case "broadcast several":
                return Broadcast.of_several(here, self.list_of(rank, self.counts), root)
            case "all_gather_single":
                source, out = self.pair(rank, n, n * size, "input")
                return AllGatherSingle.of(here, out, source)
            case "all_gather":
                outputs = self.list_of(None, everybody)
                return AllGather.of(here, outputs, self.beside(outputs, rank, everybody[rank], rank))
            case "all_gather several":
                shares = [self.list_of(None, self.counts) for _ in range(size)]
                inputs = shares[rank] if self.shared else self.list_of(rank, self.counts)
                return AllGather.of_several(here, shares, inputs)
            case "gather":
                outs = self.list_of(None, [n] * size) if rank == root else None
                return Gather.of(here, outs, self.beside(outs, rank, n, rank), root)
            case "scatter":
                ins = self.list_of(rank, [n] * size) if rank == root else None
                return Scatter.of(here, self.beside(ins, rank, n), ins, root)
            case "all_to_all_single":
                source, out = self.pair(rank, n * size, n * size)
                return AllToAllSingle.of(here, out, source)
            case "all_to_all":
                sends = [self.count(rank + r) for r in range(size)]
                inputs = self.list_of(rank, sends)
                return AllToAll.of(here, inputs if self.shared else self.list_of(None, sends), inputs)
        raise AssertionError(self.kind)


class Settled:
    """In place of a Work."""

    seq = 0

    def __init__(self) -> None:
        self.done = False

    def settle(self) -> None:
        self.done = True


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Any, ...]:
    dtype = draw(st.sampled_from(DTYPES))
    factors: list[ReduceOp] = []
    if dtype.is_complex:
        factors = [ReduceOp.PREMUL_SUM(1 + 2j), ReduceOp.PREMUL_SUM(torch.tensor(2.0))]
    elif dtype.is_floating_point:
        factors = [ReduceOp.PREMUL_SUM(0.5), ReduceOp.PREMUL_SUM(torch.tensor([-3]))]
    elif dtype != torch.bool:
        factors = [ReduceOp.PREMUL_SUM(3), ReduceOp.PREMUL_SUM(torch.tensor(2))]
    legal = []
    for op in [*REDUCTIONS, *factors]:
        try:
            op.check(dtype)
        except ValueError:
            continue
        legal.append(op)
    kinds = [kind for kind in KINDS if legal or "reduce" not in kind]
    return (
        draw(st.sampled_from(kinds)),
        dtype,
        draw(st.integers(1, 4)),
        tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))),
        tuple(draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=5))),
        draw(st.sampled_from(legal or [ReduceOp.SUM])),
        draw(st.sampled_from([OWN, frozenset()])),
        draw(st.none() | st.integers(0, 5)),
        draw(st.booleans()),
    )


@examples(1500, 150)
@given(scenes())
@example(("all_gather_single", torch.float16, 3, (2,), ("plain",), ReduceOp.SUM, OWN, 0, False))
@example(("reduce_scatter_single", torch.float16, 3, (2,), ("plain",), ReduceOp.SUM, OWN, 0, False))
def test_the_same_as_on_another_backend(settings: tuple[Any, ...]) -> None:
    """Bit for bit, and nothing else is written."""
    size = settings[2]
    theirs, ours = Scene(*settings), Scene(*settings)
    hub = Hub(size)
    works = [Settled() for _ in range(size)]
    for rank in range(size):
        hub.submit(rank, [Submission(theirs.call(rank), works[rank])])  # type: ignore[arg-type]
    assert all(work.done for work in works)
    run([plan_of(ours.call(rank), rank=rank, size=size, native=ours.native) for rank in range(size)])
    for i, (one, other) in enumerate(zip(ours.memory, theirs.memory, strict=True)):
        assert torch.equal(one, other), f"memory {i}: {one.view(ours.dtype)} {other.view(ours.dtype)}"
