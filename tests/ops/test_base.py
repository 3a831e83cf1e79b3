"""Operations as values: compared, printed, pickled; all of them are here."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from asynccomm import ops
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
    GroupedOp,
    MessageSpace,
    Op,
    Parcel,
    Parcels,
    PeerOp,
    PeerParcel,
    Recv,
    RecvParcel,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    Send,
    SendParcel,
    TensorOp,
)
from asynccomm.ops.base import described, layout_of, layout_of_shares, moved
from asynccomm.ops.reduce_op import ReduceOp
from tests.cases import cases

F = torch.float32
SUM, PREMUL = ReduceOp.SUM, ReduceOp.PREMUL_SUM
OPS: list[tuple[Op, str]] = [
    (AllReduce(F, 7, SUM), "all_reduce(float32[7], SUM)"),
    (AllReduce(torch.bfloat16, 0, PREMUL(0.5)), "all_reduce(bfloat16[0], PREMUL_SUM(0.5))"),
    (AllReduce(F, 7, SUM, layout=5), "all_reduce(float32[7] in pieces, SUM)"),
    (Broadcast(torch.int8, 7, 2), "broadcast(int8[7], root=2)"),
    (Broadcast(torch.uint8, 7, 2, layout=5), "broadcast(uint8[7] in pieces, root=2)"),
    (Reduce(F, 7, 2, ReduceOp.MAX), "reduce(float32[7], root=2, MAX)"),
    (AllGather(F, 7), "all_gather(float32[7])"),
    (AllGather(F, 7, layout=9, counts=(7, 0, 1)), "all_gather(float32[7, 0, 1])"),
    (AllGather(torch.uint8, 7, layout=5), "all_gather(uint8[7] in pieces)"),
    (AllGatherSingle(F, 7), "all_gather_single(float32[7])"),
    (ReduceScatter(F, 7, SUM), "reduce_scatter(float32[7], SUM)"),
    (ReduceScatter(F, 7, SUM, layout=9, counts=(7, 0, 1)), "reduce_scatter(float32[7, 0, 1], SUM)"),
    (ReduceScatterSingle(F, 7, SUM), "reduce_scatter_single(float32[7], SUM)"),
    (Scatter(F, 7, 0), "scatter(float32[7], root=0)"),
    (Gather(F, 7, 0), "gather(float32[7], root=0)"),
    (AllToAll(F, (1, 2), (3, 2)), "all_to_all(float32, sends [1, 2], receives [3, 2])"),
    (AllToAllSingle(F, 6), "all_to_all_single(float32[6])"),
    (Barrier(), "barrier()"),
    (Send(F, 7, 1, 5), "send(float32[7], dst=1, tag=5)"),
    (Recv(F, 7, 1, 5), "recv(float32[7], src=1, tag=5)"),
    (Recv(F, 7, None, 5), "recv(float32[7], src=any, tag=5)"),
    (Parcels("gather_v", taker=2), "gather_v(root=2)"),
    (Parcels("scatter_v", shared=False, giver=0), "scatter_v(root=0)"),
    (Parcels("all_gather_v"), "all_gather_v()"),
    (Parcels("dispatch", form="routing=None"), "dispatch(routing=None)"),
    (AllGather(F, 7, method="dispatch"), "dispatch(float32[7])"),
    (AllToAll(F, (1, 2), (3, 2), method="combine"), "combine(float32, sends [1, 2], receives [3, 2])"),
    (SendParcel("send_object", 1, 5), "send_object(dst=1, tag=5)"),
    (RecvParcel("recv_object", 1, 5), "recv_object(src=1, tag=5)"),
    (RecvParcel("recv_object", None, 5, MessageSpace.STREAMS), "recv_object(src=any, tag=5)"),
    (GroupedOp((Barrier(), Send(F, 7, 1, 5))), "together(barrier(), send(float32[7], dst=1, tag=5))"),
    (GroupedOp((Barrier(),) * 4), "together(barrier(), barrier(), barrier(), barrier())"),
    (GroupedOp((Barrier(),) * 7), "together(barrier(), barrier(), barrier(), barrier() and 3 more)"),
]
values = cases("op, text", OPS, ids=[text for _, text in OPS])

OTHER: dict[str, Any] = {
    "label": "layer3.bias",
    "dtype": torch.float16,
    "numel": 99,
    "layout": 77,
    "counts": (1, 1, 1),
    "root": 1,
    "reduction": ReduceOp.MIN,
    "peer": 0,
    "tag": 0,
    "method": "another",
    "shared": None,
    "giver": 1,
    "taker": 1,
    "form": "another",
    "channel": MessageSpace.INTERNAL,
    "ops": (),
}

CLASSES = {  # the kinds of operations that each attribute selects
    "root": {"broadcast", "reduce", "gather", "scatter"},
    "reduction": {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"},
    "counts": {"all_gather", "reduce_scatter"},
    "sizes_known": {op.kind for op, _ in OPS} - {"all_to_all", "parcels"},
    "split": {"scatter", "all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_single"},
    "replicates": {"broadcast"},
    "one_sided": {"reduce", "gather", "scatter", "all_to_all", "parcels", "all_gather", "reduce_scatter"},
}


def test_every_op_is_among_them() -> None:
    found = {cls for cls in vars(ops).values() if isinstance(cls, type) and issubclass(cls, Op)}
    found = {cls for cls in found if cls.__module__ != "asynccomm.ops.windows"}  # test_windows.py has these
    assert {type(op) for op, _ in OPS} == found - {Op, TensorOp, PeerOp, PeerParcel}


@values
def test_text(op: Op, text: str) -> None:
    assert str(op) == text
    assert text.startswith(op.name + "(")
    assert op.name == (op.method or op.kind)


@values
def test_text_of_what_has_a_tag(op: Op, text: str) -> None:
    if op.p2p or isinstance(op, GroupedOp):  # one has tags of another kind, the other several collectives' own
        return
    separator = "" if text.endswith("()") else ", "
    assert str(dataclasses.replace(op, label="layer3.bias")) == f"{text[:-1]}{separator}tag='layer3.bias')"
    assert str(dataclasses.replace(op, label="it's\n")) == f'{text[:-1]}{separator}tag="it\'s\\n")'


def test_several_operations_show_a_tag_each() -> None:
    op = GroupedOp((Barrier(label="a"), Barrier()))
    assert str(op) == "together(barrier(tag='a'), barrier())"
    assert not op.fits(GroupedOp((Barrier(), Barrier())))


def test_a_call_is_labelled() -> None:
    call = Call(AllReduce(F, 7, SUM), (torch.zeros(7),), (), None)
    labelled = call.labelled("layer3.bias")
    assert labelled == call._replace(op=AllReduce(F, 7, SUM, label="layer3.bias"))
    assert labelled.op != AllReduce(F, 7, SUM)
    assert hash(labelled.op) == hash(AllReduce(F, 7, SUM, label="layer3.bias"))
    assert call.op.label == "", "other calls may share it"


def test_what_is_no_tag_labels_nothing() -> None:
    call = Call(Barrier(), (), (), None)
    with pytest.raises(TypeError, match=r"^tag must be a str, got 3 "):
        call.labelled(3)
    assert call.op == Barrier()


def test_point_to_point_has_no_label() -> None:
    with pytest.raises(AssertionError, match="cannot have a label"):
        Call(Send(F, 7, 1, 5), (), (), None).labelled("x")


def test_kinds_differ() -> None:
    kinds = {type(op): op.kind for op, _ in OPS}
    assert len(set(kinds.values())) == len(kinds)


@values
def test_pickle(op: Op, text: str) -> None:
    again = pickle.loads(pickle.dumps(op))
    assert again == op
    assert hash(again) == hash(op)
    assert str(again) == text


@values
def test_frozen(op: Op, text: str) -> None:
    for field in dataclasses.fields(op):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(op, field.name, 0)
    assert not hasattr(op, "__dict__")


@values
def test_point_to_point(op: Op, text: str) -> None:
    assert op.p2p == isinstance(op, PeerOp) == isinstance(op, (Send, Recv, SendParcel, RecvParcel))
    if isinstance(op, PeerOp):
        assert op.is_send == isinstance(op, (Send, SendParcel))
        assert op.key == (MessageSpace.TENSORS if isinstance(op, TensorOp) else op.channel).key(op.tag)


def test_classes_of_operations() -> None:
    for trait, kinds in CLASSES.items():
        values = [(op.kind, getattr(op, trait)) for op, _ in OPS]
        assert {kind for kind, value in values if value is not None and value is not False and value != ()} == kinds
    assert not AllGather(F, 7).one_sided
    assert AllGather(F, 7, counts=(7, 0, 1)).one_sided


NEEDED: list[tuple[Op, bool]] = [
    (Barrier(), True),
    (AllReduce(F, 3, SUM), True),
    (AllReduce(F, 0, SUM), False),
    (AllGather(F, 3), True),
    (AllGather(F, 3, counts=(3, 1)), True),
    (AllGather(F, 3, counts=(3, 0)), False),
    (ReduceScatter(F, 3, SUM, counts=(3, 1)), True),
    (ReduceScatter(F, 0, SUM, counts=(3, 0)), False),
    (AllToAllSingle(F, 3), True),
    (AllToAllSingle(F, 0), False),
    (AllToAll(F, (1, 1), (1, 1)), False),
    (Broadcast(F, 3, 0), False),
    (Reduce(F, 3, 0, SUM), False),
    (Gather(F, 3, 0), False),
    (Scatter(F, 3, 0), False),
    (Parcels("all_gather_object"), False),
]


@cases("op, needed", NEEDED)
def test_which_collectives_end_only_when_all_have_called_them(op: Op, needed: bool) -> None:
    assert op.needs_every_rank is needed


def test_required_fields_have_no_defaults() -> None:
    for kind in (Broadcast, Reduce, Scatter, Gather, AllReduce, ReduceScatter, ReduceScatterSingle):
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            kind(*[F, 7, 0][: 3 if kind is Reduce else 2])  # type: ignore[call-arg, arg-type]


def test_size_of_a_part() -> None:
    assert AllToAllSingle(F, 6).part_nbytes(3) == 8
    assert ReduceScatter(F, 7, SUM, layout=9, counts=(7, 0, 1)).part_nbytes(3) == 28


@values
def test_equal_to_itself_and_nothing_else(op: Op, text: str) -> None:
    for other, _ in OPS:
        assert (op == other) == (op is other)
    for field in dataclasses.fields(op):
        if field.name not in ("sends", "receives"):
            assert op != dataclasses.replace(op, **{field.name: OTHER[field.name]}), field.name


@values
def test_fits_itself_and_nothing_else(op: Op, text: str) -> None:
    assert op.fits(pickle.loads(pickle.dumps(op)))
    for other, _ in OPS:
        assert op.fits(other) == (other == op)
    for field in dataclasses.fields(op):
        if field.name not in ("sends", "receives"):  # the rank's own
            assert not op.fits(dataclasses.replace(op, **{field.name: OTHER[field.name]})), field.name


@values
def test_bytes(op: Op, text: str) -> None:
    expected = op.numel * op.dtype.itemsize if isinstance(op, TensorOp) else 0
    assert op.nbytes == expected


def test_layouts_tell_lists_apart() -> None:
    lists = [[], [0], [1], [0, 0], [1, 2], [2, 1], [3], [2**63], [1, 2, 3], [12, 3]]
    layouts = [layout_of(numbers) for numbers in lists]
    assert len(set(layouts)) == len(lists)
    assert all(0 < layout < 2**24 for layout in layouts)
    assert layout_of([4, 5]) == layout_of((4, 5))


def test_layouts_are_the_same_in_every_process() -> None:
    assert layout_of([1, 2, 3]) == 13340083
    assert layout_of(range(5)) == layout_of([0, 1, 2, 3, 4])


def test_descriptions() -> None:
    op = AllGather(torch.int64, 3)
    assert described(op) == "int64[3]"
    assert described(dataclasses.replace(op, counts=(1, 2))) == "int64[1, 2]"
    assert described(dataclasses.replace(op, layout=1)) == "int64[3] in pieces"
    assert described(dataclasses.replace(op, layout=1, counts=(1, 2))) == "int64[1, 2]"


def test_parcels_have_the_bytes_of_their_payload() -> None:
    assert Parcel(b"head", ()).nbytes == 0
    assert Parcel(b"", (torch.zeros(3), torch.zeros(2, 2, dtype=torch.int8), torch.zeros(0))).nbytes == 16


def test_a_call_by_itself() -> None:
    call = Call(Barrier(), (), (), None)
    assert (call.finish, call.parcels, call.place, call.expected) == (None, (), None, 0)


def test_layout_of_shares() -> None:
    assert layout_of_shares(()) == 0, "one tensor, all alike"
    assert layout_of_shares((1, 2)) == layout_of([1, 2]), "as that of a list"
    assert layout_of_shares((), 1, (2, 3)) == layout_of([1, 2]), "with the rows before the dim"
    assert layout_of_shares((1, 2), 1, (4, 3, 5)) == layout_of([1, 4, 1, 2])


def test_what_is_moved_is_described_in_reals() -> None:
    assert moved(F, 3) == (F, 3)
    assert moved(torch.bool, 0) == (torch.bool, 0)
    assert moved(torch.complex32, 3) == (torch.float16, 6)
    assert moved(torch.complex64, 3) == (F, 6)
    assert moved(torch.complex128, 1) == (torch.float64, 2)
