"""Operations on tensors that share memory: what is copied, and where results are received first."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends.arithmetic import is_plain
from asynccomm.backends.base import Submission
from asynccomm.backends.hazards import accesses, apart, find, load, separated
from asynccomm.backends.regions import overlap, region
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Broadcast,
    Call,
    Gather,
    Parcel,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
)
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import CommInfo

RANK, SIZE, ROOM = 1, 3, 64
GROUP = CommInfo("grads", RANK, SIZE, torch.device("cpu"))
SUM = ReduceOp.SUM


def test_accesses() -> None:
    one, other, third, nothing = torch.zeros(8), torch.zeros(8), torch.zeros(4), torch.zeros(0)

    def of(call: Call) -> tuple[list[Any], list[Any]]:
        return accesses(Submission(call, None))  # type: ignore[arg-type]

    both = (one, nothing)
    op = AllReduce.of(GROUP, one, SUM).op
    assert of(Call(op, both, both, None)) == ([], [region(one)])
    assert of(Call(op, (one, nothing), (other[::2],), None)) == ([region(one)], [region(other[::2])])
    parcels = (Parcel(b"", (one[:4], nothing)), Parcel(b"", (third,)))
    assert of(Call(op, (), (other,), None, parcels=parcels)) == ([region(one[:4]), region(third)], [region(other)])


def taken(call: Call, out_of_place: frozenset[Any] = frozenset()) -> tuple[frozenset[int], bool]:
    copied, staged = find(call.op, call.inputs, call.outputs, RANK, out_of_place)
    return copied, staged


def memory(n: int = ROOM) -> Tensor:
    return torch.arange(float(n))


def thirds(tensor: Tensor) -> list[Tensor]:
    return list(tensor.chunk(SIZE))


def test_in_place_nothing_is_copied() -> None:
    whole = memory(6)
    parts = thirds(whole)
    calls = [
        AllReduce.of(GROUP, whole, SUM),
        AllReduce.of(GROUP, whole, SUM, whole),
        AllReduce.of(GROUP, whole.view(2, 3).t(), SUM, whole.view(2, 3).t()),
        AllReduce.of_several(GROUP, parts, SUM),
        Reduce.of(GROUP, whole, RANK, SUM),
        AllGather.of(GROUP, parts, parts[RANK]),
        AllGatherSingle.of(GROUP, whole, parts[RANK]),
        Gather.of(GROUP, parts, parts[RANK], RANK),
        Scatter.of(GROUP, parts[RANK], parts, RANK),
        ReduceScatter.of(GROUP, parts[RANK], parts, SUM),
        ReduceScatterSingle.of(GROUP, parts[RANK], whole, SUM),
        AllToAll.of(GROUP, parts, parts),
        AllToAllSingle.of(GROUP, whole, whole),
    ]
    for call in calls:
        assert taken(call) == (frozenset(), False), call.op


def test_a_transport_may_not_be_able_to_do_that() -> None:
    parts = thirds(memory(6))
    call = AllToAll.of(GROUP, parts, parts)
    assert taken(call, frozenset({AllToAll})) == (frozenset(range(SIZE)), False)
    assert taken(call, frozenset({Scatter})) == (frozenset(), False)


def test_what_lies_elsewhere_in_the_output_is_copied() -> None:
    whole = memory(6)
    parts = thirds(whole)
    other = parts[(RANK + 1) % SIZE]
    for call in (
        AllReduce.of(GROUP, whole[1:], SUM, whole[:5]),
        AllReduce.of(GROUP, whole.view(2, 3), SUM, whole.view(2, 3).t()),
        AllReduce.of(GROUP, whole.view(torch.complex64).conj(), SUM, whole.view(torch.complex64)),
        AllGather.of(GROUP, parts, other),
        AllGatherSingle.of(GROUP, whole, other),
        Gather.of(GROUP, parts, other, RANK),
        ReduceScatterSingle.of(GROUP, other, whole, SUM),
        AllToAllSingle.of(GROUP, whole.view(3, 2).t(), whole.view(2, 3)),
    ):
        assert taken(call) == (frozenset({0}), False), call.op
    assert taken(Scatter.of(GROUP, other, parts, RANK)) == (frozenset({(RANK + 1) % SIZE}), False)
    assert taken(ReduceScatter.of(GROUP, whole[1:3], parts, SUM)) == (frozenset({0, 1}), False)
    assert taken(AllToAll.of(GROUP, parts, parts[::-1])) == (frozenset({0, 2}), False)


def test_outputs_that_share_memory_are_staged() -> None:
    whole = memory(8)
    shifted = [whole[i : i + 4] for i in range(SIZE)]
    for call in (
        AllReduce.of_several(GROUP, [whole, whole], SUM),
        AllReduce.of_several(GROUP, shifted, SUM),
        AllGather.of(GROUP, shifted, memory(4)),
        AllGather.of(GROUP, shifted, shifted[RANK]),
        Gather.of(GROUP, [whole] * SIZE, memory(8), RANK),
        Broadcast.of_several(GROUP, [whole, whole[:2]], 0),
        AllToAll.of(GROUP, shifted, thirds(memory(12))),
    ):
        assert taken(call) == (frozenset(), True), call.op


def test_what_interleaves_is_left_alone() -> None:
    whole = memory(12).view(4, 3)
    columns = [column.contiguous() for column in whole.unbind(1)]
    assert taken(AllGather.of(GROUP, list(whole.unbind(1)), columns[0])) == (frozenset(), False)
    assert taken(AllReduce.of_several(GROUP, whole.unbind(1), SUM)) == (frozenset(), False)
    assert taken(AllReduce.of(GROUP, whole[:, 0], SUM, whole[:, 2])) == (frozenset(), False)


def submission(call: Call) -> Submission:
    return Submission(call, None)  # type: ignore[arg-type]


def test_later_outputs_stay() -> None:
    whole = torch.zeros(6)
    outputs = [whole[i : i + 4] for i in range(SIZE)]
    buffers = separated(submission(AllGather.of(GROUP, outputs, torch.ones(4))), RANK)
    for i, output in enumerate(buffers.outputs):
        output.fill_(i + 1)
    assert not whole.any()
    for land in buffers.lands:
        land()
    assert whole.tolist() == [1, 2, 3, 3, 3, 3]


def test_a_list_is_gathered_as_if_tensor_by_tensor() -> None:
    whole, alone = torch.zeros(2), [torch.zeros(2) for _ in range(SIZE)]
    lists = [[whole, alone[0]], [alone[1], whole], [alone[2], torch.zeros(2)]]
    buffers = separated(submission(AllGather.of_several(GROUP, lists, [torch.ones(2)] * 2)), RANK)
    for i, output in enumerate(buffers.outputs):
        output.fill_(i + 1)
    for land in buffers.lands:
        land()
    assert whole.tolist() == [4, 4], "the second tensor of rank 1, behind the first of rank 0"
    assert [tensor[0].item() for tensor in alone] == [2, 3, 5]


def test_a_copy_is_taken_when_it_starts() -> None:
    whole = torch.zeros(5)
    waiting = submission(AllReduce.of(GROUP, whole[1:], SUM, whole[:4]))
    whole.fill_(7)  # as an operation does that was called before
    buffers = separated(waiting, RANK)
    assert buffers.inputs[0].tolist() == [7] * 4
    buffers.outputs[0].fill_(1)
    assert buffers.inputs[0].tolist() == [7] * 4


def test_inputs_that_are_no_views_are_copied_once_when_it_starts() -> None:
    whole, room = torch.zeros(2, 3, requires_grad=True), torch.zeros(3, 2)
    call = ReduceScatter.of(GROUP, torch.empty(2), room.unbind(), SUM)._replace(copies=((room.copy_, whole.t()),))
    for starts in (load, lambda waiting: separated(waiting, RANK)):
        waiting = submission(call)
        whole.data.fill_(7)  # as an operation does that was called before
        starts(waiting)
        assert room.tolist() == [[7, 7]] * 3
        room.zero_()
        starts(waiting)
        assert not room.any(), "gloo reads them from its frames or later, and copies before either"
        assert not waiting.copies, "it reads them no more"


def test_stand_ins_can_be_written_by_any_thread() -> None:
    with torch.inference_mode():
        whole = torch.zeros(4)
        buffers = separated(submission(AllReduce.of_several(GROUP, [whole, whole], SUM)), RANK)
    buffers.outputs[1].fill_(1)
    for land in buffers.lands:
        land()
    assert whole.tolist() == [1] * 4


def test_parcels_are_copied_where_results_come() -> None:
    whole = memory(6)
    parcels = [Parcel(b"a", (whole[:2], memory(3))), Parcel(b"b", (memory(0),))]
    kept, outputs, lands = apart(parcels, (whole[1:],))
    assert [parcel.head for parcel in kept] == [b"a", b"b"]
    assert kept[0].tensors[0].data_ptr() != whole.data_ptr()
    assert kept[0].tensors[0].tolist() == [0, 1]
    assert kept[0].tensors[1] is parcels[0].tensors[1]
    assert outputs[0].data_ptr() == whole[1:].data_ptr()
    assert not lands
    kept, outputs, lands = apart(parcels, (whole, whole[1:]))
    assert kept[0].tensors[0].data_ptr() != whole.data_ptr(), "other ranks may read it when the outputs are written"
    assert len(lands) == 2


# -- any layout -------------------------------------------------------------------------------------------------------


def view(draw: st.DrawFn, arena: Tensor, n: int) -> Tensor:
    """``n`` elements of the arena, in row-major order or in one of two others; or in memory of their own."""
    form = draw(st.sampled_from(["plain", "plain", "steps", "turned", "elsewhere"]))
    if form == "elsewhere":
        return torch.empty(n)
    if form == "steps":
        step = draw(st.integers(2, 4))
        offset = draw(st.integers(0, ROOM - step * n))
        return arena.as_strided((n,), (step,), offset)
    offset = draw(st.integers(0, ROOM - n))
    if form == "turned" and n % 2 == 0:
        return arena.as_strided((2, n // 2), (1, 2), offset)
    return arena[offset : offset + n]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    arena = torch.arange(float(ROOM))
    n = draw(st.integers(0, 5))

    def one(times: int = 1) -> Tensor:
        return view(draw, arena, times * n)

    def some(count: int = SIZE) -> list[Tensor]:
        return [one() for _ in range(count)]

    made: list[Any] = [
        lambda: AllReduce.of(GROUP, one(), SUM, one()),
        lambda: AllReduce.of_several(GROUP, some(draw(st.integers(2, 6))), SUM),
        lambda: Reduce.of(GROUP, one(), RANK, SUM, one()),
        lambda: Broadcast.of_several(GROUP, some(), draw(st.integers(0, 1))),
        lambda: AllGather.of(GROUP, some(), one()),
        lambda: AllGather.of_several(GROUP, [some(2) for _ in range(SIZE)], some(2)),
        lambda: AllGatherSingle.of(GROUP, one(SIZE), one()),
        lambda: Gather.of(GROUP, some(), one(), RANK),
        lambda: Scatter.of(GROUP, one(), some(), RANK),
        lambda: ReduceScatter.of(GROUP, one(), some(), SUM),
        lambda: ReduceScatter.of_several(GROUP, some(2), [some(2) for _ in range(SIZE)], SUM),
        lambda: ReduceScatterSingle.of(GROUP, one(), one(SIZE), SUM),
        lambda: AllToAll.of(GROUP, some(), some()),
        lambda: AllToAllSingle.of(GROUP, one(SIZE), one(SIZE)),
    ]
    call: Call = draw(st.sampled_from(made))()
    return call


def shares(one: Tensor, other: Tensor) -> bool:
    return bool(one.numel() and other.numel() and overlap(region(one), region(other)))


@given(call=calls())
def test_whatever_lies_where(call: Call) -> None:
    """Afterwards outputs are apart, and so are inputs from them, but for those in place; nothing else is touched."""
    given = submission(call)
    load(given)  # memory of the operation's own is not set before, and may hold NaN
    before = [tensor.clone() for tensor in given.inputs]
    buffers = separated(given, RANK)
    assert all(torch.equal(a, b) for a, b in zip(buffers.inputs, before, strict=True))
    assert not any(shares(a, b) for a, b in combinations(buffers.outputs, 2))
    for i, tensor in enumerate(buffers.inputs):
        sharing = [output for output in buffers.outputs if shares(tensor, output)]
        assert len(sharing) <= 1
        for output in sharing:
            plain = is_plain(output) and is_plain(tensor)
            same = output.data_ptr() == tensor.data_ptr() and (plain or output.stride() == tensor.stride())
            single = isinstance(call.op, (AllGatherSingle, ReduceScatterSingle))
            assert same or (single and plain), (i, call.op)
    clean = not any(shares(a, b) for a, b in combinations(given.outputs, 2))
    if clean and not any(shares(a, b) for a in given.inputs for b in given.outputs):
        assert buffers.inputs is given.inputs
        assert buffers.outputs is given.outputs


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_shares_nothing(n: int) -> None:
    whole = torch.zeros(n)
    empty = whole[:0]
    assert taken(AllGather.of(GROUP, [empty] * SIZE, empty)) == (frozenset(), False)
