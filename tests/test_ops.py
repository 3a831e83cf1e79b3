"""What every collective takes, and what it says about the rest."""

from __future__ import annotations

import dataclasses
import operator
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asynccomm import ops
from asynccomm.checks import MAX_TAG, Group
from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Op,
    Recv,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    Send,
)
from asynccomm.reduce_op import ReduceOp

CPU = torch.device("cpu")
SIZE = 3
RANK = 1
GROUP = Group("grads", RANK, SIZE, CPU)
SUM = ReduceOp.SUM


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def several(count: int = SIZE, *shape: int) -> list[Tensor]:
    return [t(*(shape or (4,))) for _ in range(count)]


# Each way to hand a tensor to a collective: the argument's name, whether it is written, and the call with it.
Use = Callable[[Any], Call]
TENSORS: list[tuple[str, str, bool, Use]] = [
    ("all_reduce", "tensor", True, lambda x: AllReduce.of(GROUP, x, SUM)),
    ("broadcast at the root", "tensor", False, lambda x: Broadcast.of(GROUP, x, RANK)),
    ("broadcast elsewhere", "tensor", True, lambda x: Broadcast.of(GROUP, x, 0)),
    ("reduce at the root", "tensor", True, lambda x: Reduce.of(GROUP, x, RANK, SUM)),
    ("reduce elsewhere", "tensor", False, lambda x: Reduce.of(GROUP, x, 0, SUM)),
    ("all_gather", "tensor", False, lambda x: AllGather.of(GROUP, several(), x)),
    ("all_gather, allocated", "tensor", False, lambda x: AllGather.of(GROUP, None, x)),
    ("all_gather", "tensor_list[2]", True, lambda x: AllGather.of(GROUP, [t(4), t(4), x], t(4))),
    ("all_gather_single", "input", False, lambda x: AllGatherSingle.of(GROUP, t(SIZE * 4), x)),
    ("all_gather_single, allocated", "input", False, lambda x: AllGatherSingle.of(GROUP, None, x)),
    ("all_gather_single", "output", True, lambda x: AllGatherSingle.of(GROUP, x, t(4))),
    ("reduce_scatter", "output", True, lambda x: ReduceScatter.of(GROUP, x, several(), SUM)),
    ("reduce_scatter", "input_list[0]", False, lambda x: ReduceScatter.of(GROUP, t(4), [x, t(4), t(4)], SUM)),
    (
        "reduce_scatter, allocated 0",
        "input_list[0]",
        False,
        lambda x: ReduceScatter.of(GROUP, None, [x, t(4), t(4)], SUM),
    ),
    (
        "reduce_scatter, allocated 1",
        "input_list[1]",
        False,
        lambda x: ReduceScatter.of(GROUP, None, [t(4), x, t(4)], SUM),
    ),
    (
        "reduce_scatter, allocated 2",
        "input_list[2]",
        False,
        lambda x: ReduceScatter.of(GROUP, None, [t(4), t(4), x], SUM),
    ),
    ("reduce_scatter_single", "output", True, lambda x: ReduceScatterSingle.of(GROUP, x, t(SIZE * 4), SUM)),
    ("reduce_scatter_single", "input", False, lambda x: ReduceScatterSingle.of(GROUP, t(4), x, SUM)),
    ("reduce_scatter_single, allocated", "input", False, lambda x: ReduceScatterSingle.of(GROUP, None, x, SUM)),
    ("scatter at the root", "output", True, lambda x: Scatter.of(GROUP, x, several(), RANK)),
    ("scatter at the root", "input_list[1]", False, lambda x: Scatter.of(GROUP, t(4), [t(4), x, t(4)], RANK)),
    ("scatter elsewhere", "output", True, lambda x: Scatter.of(GROUP, x, None, 0)),
    ("gather at the root", "input", False, lambda x: Gather.of(GROUP, several(), x, RANK)),
    ("gather at the root", "output_list[1]", True, lambda x: Gather.of(GROUP, [t(4), x, t(4)], t(4), RANK)),
    ("gather elsewhere", "input", False, lambda x: Gather.of(GROUP, None, x, 0)),
    ("all_to_all_single", "input", False, lambda x: AllToAllSingle.of(GROUP, t(6), x)),
    ("all_to_all_single, allocated", "input", False, lambda x: AllToAllSingle.of(GROUP, None, x)),
    ("all_to_all_single", "output", True, lambda x: AllToAllSingle.of(GROUP, x, t(6))),
    ("send", "tensor", False, lambda x: Send.of(GROUP, x, 0, 0)),
    ("recv", "tensor", True, lambda x: Recv.of(GROUP, x, 0, 0)),
]
IDS = [f"{what}: {name}" for what, name, _, _ in TENSORS]
tensors = pytest.mark.parametrize(("name", "written", "use"), [use[1:] for use in TENSORS], ids=IDS)

# Each way to hand it a list.
LISTS: list[tuple[str, str, Use]] = [
    ("all_gather", "tensor_list", lambda x: AllGather.of(GROUP, x, t(4))),
    ("reduce_scatter", "input_list", lambda x: ReduceScatter.of(GROUP, t(4), x, SUM)),
    ("reduce_scatter, allocated", "input_list", lambda x: ReduceScatter.of(GROUP, None, x, SUM)),
    ("scatter", "input_list", lambda x: Scatter.of(GROUP, t(4), x, RANK)),
    ("gather", "output_list", lambda x: Gather.of(GROUP, x, t(4), RANK)),
]
lists = pytest.mark.parametrize(("name", "use"), [use[1:] for use in LISTS], ids=[use[0] for use in LISTS])


def is_rank(value: Any) -> bool:
    try:
        return operator.index(value) == RANK
    except TypeError:
        return False


# Each way to name a rank.
RANKS: list[tuple[str, str, Use]] = [
    ("broadcast", "root", lambda r: Broadcast.of(GROUP, t(4), r)),
    ("reduce", "root", lambda r: Reduce.of(GROUP, t(4), r, SUM)),
    ("scatter", "root", lambda r: Scatter.of(GROUP, t(4), several() if is_rank(r) else None, r)),
    ("gather", "root", lambda r: Gather.of(GROUP, None, t(4), r)),
    ("send", "dst", lambda r: Send.of(GROUP, t(4), r, 0)),
    ("recv", "src", lambda r: Recv.of(GROUP, t(4), r, 0)),
]
ranks = pytest.mark.parametrize(("name", "use"), [use[1:] for use in RANKS], ids=[use[0] for use in RANKS])

REDUCTIONS: list[tuple[str, Callable[[Any, torch.dtype], Call]]] = [
    ("all_reduce", lambda op, d: AllReduce.of(GROUP, t(3, dtype=d), op)),
    ("reduce", lambda op, d: Reduce.of(GROUP, t(3, dtype=d), 0, op)),
    ("reduce_scatter", lambda op, d: ReduceScatter.of(GROUP, None, [t(3, dtype=d)] * SIZE, op)),
    ("reduce_scatter_single", lambda op, d: ReduceScatterSingle.of(GROUP, None, t(3, dtype=d), op)),
]
reductions = pytest.mark.parametrize("use", [use for _, use in REDUCTIONS], ids=[name for name, _ in REDUCTIONS])


def fails(error: type[Exception], use: Callable[..., object], *args: Any) -> str:
    with pytest.raises(error) as caught:
        use(*args)
    return str(caught.value)


# -- tensors


@tensors
@pytest.mark.parametrize("value", [3, "tensor", np.zeros(4), [1.0], ...], ids=["int", "str", "array", "list", "dots"])
def test_not_a_tensor(name: str, written: bool, use: Use, value: Any) -> None:
    text = fails(TypeError, use, value)
    assert text.startswith(f"{name} must be a torch.Tensor, got ")
    assert repr(value) in text
    assert type(value).__name__ in text


@tensors
def test_the_wrong_device(name: str, written: bool, use: Use) -> None:
    text = fails(ValueError, use, torch.zeros(12, device="meta"))
    assert text == f"{name} is on meta, but comm 'grads' is on cpu"


@tensors
def test_not_dense(name: str, written: bool, use: Use) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch speaks of checks that it does not make
        sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (12,))
    assert fails(ValueError, use, sparse) == f"{name} must be a dense tensor, got torch.sparse_coo"


def test_quantized_and_compressed_are_not_dense() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(t(4), 1.0, 0, torch.qint8)
        compressed = torch.eye(3).to_sparse_csr()
    assert "quantized" in fails(ValueError, AllReduce.of, GROUP, quantized, SUM)
    assert "sparse_csr" in fails(ValueError, AllReduce.of, GROUP, compressed, SUM)


def test_nested_is_not_dense() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert "tensor must be a dense tensor" in fails(ValueError, Broadcast.of, GROUP, nested, RANK)


def takes(use: Use, tensor: Tensor) -> bool:
    try:
        use(tensor)
    except ValueError:
        return False
    return True


@tensors
def test_overlapping_tensors_are_read_but_not_written(name: str, written: bool, use: Use) -> None:
    numel = next(n for n in (4, 6, 12) if takes(use, t(n)))
    overlapping = torch.zeros(1).expand(numel)
    if written:
        text = fails(ValueError, use, overlapping)
        assert text.startswith(f"{name} overlaps itself (shape ({numel},), strides (0,))")
    else:
        use(overlapping)


def test_other_overlaps() -> None:
    for tensor in (
        torch.zeros(2, 1).expand(2, 3),
        torch.zeros(5).as_strided((3, 3), (1, 1)),
        torch.zeros(9).unfold(0, 3, 2),
    ):
        assert "overlaps itself" in fails(ValueError, AllReduce.of, GROUP, tensor, SUM)


def test_odd_layouts_are_fine() -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    odd = [
        base.permute(2, 0, 1),
        base[:, 1],
        base[:, ::2, 1::2],
        base.diagonal(0, 0, 1),
        base.new_zeros(3, 0).t(),
        base.new_zeros(1).expand(1, 1, 1),
        base.new_zeros(0).expand(3, 0),
        base.new_zeros(3, 1)[:, 0],
        torch.tensor(1.0),
        torch.nn.Parameter(base),
    ]
    for tensor in odd:
        assert AllReduce.of(GROUP, tensor, SUM).result is tensor


# -- one dtype, and the right number of elements

D = torch.float64
DTYPES: list[tuple[str, str, Callable[[], Call]]] = [
    ("tensor_list[1]", "tensor", lambda: AllGather.of(GROUP, [t(4), t(4, dtype=D), t(4)], t(4))),
    ("output", "input", lambda: AllGatherSingle.of(GROUP, t(12, dtype=D), t(4))),
    ("input_list[2]", "output", lambda: ReduceScatter.of(GROUP, t(4), [t(4), t(4), t(4, dtype=D)], SUM)),
    ("output", "input", lambda: ReduceScatterSingle.of(GROUP, t(4, dtype=D), t(12), SUM)),
    ("input_list[0]", "output", lambda: Scatter.of(GROUP, t(4), [t(4, dtype=D), t(4), t(4)], RANK)),
    ("output_list[0]", "input", lambda: Gather.of(GROUP, [t(4, dtype=D), t(4), t(4)], t(4), RANK)),
    ("output", "input", lambda: AllToAllSingle.of(GROUP, t(6, dtype=D), t(6))),
]


@pytest.mark.parametrize(("name", "like", "use"), DTYPES)
def test_one_dtype(name: str, like: str, use: Callable[[], Call]) -> None:
    assert fails(ValueError, use) == f"{name} has dtype torch.float64, but {like} has torch.float32"


NUMELS: list[tuple[str, int, str, Callable[[], Call]]] = [
    ("tensor_list[1]", 4, "(5,)", lambda: AllGather.of(GROUP, [t(4), t(5), t(4)], t(4))),
    ("output", 12, "(3, 5)", lambda: AllGatherSingle.of(GROUP, t(3, 5), t(4))),
    ("input_list[2]", 4, "(0,)", lambda: ReduceScatter.of(GROUP, t(4), [t(4), t(4), t(0)], SUM)),
    ("input", 12, "(4,)", lambda: ReduceScatterSingle.of(GROUP, t(4), t(4), SUM)),
    ("input_list[0]", 4, "(2,)", lambda: Scatter.of(GROUP, t(4), [t(2), t(4), t(4)], RANK)),
    ("output_list[0]", 4, "(2, 1)", lambda: Gather.of(GROUP, [t(2, 1), t(4), t(4)], t(4), RANK)),
    ("output", 6, "(7,)", lambda: AllToAllSingle.of(GROUP, t(7), t(6))),
]


@pytest.mark.parametrize(("name", "expected", "shape", "use"), NUMELS)
def test_number_of_elements(name: str, expected: int, shape: str, use: Callable[[], Call]) -> None:
    text = fails(ValueError, use)
    assert text.startswith(f"{name} must have {expected} elements ")
    assert text.endswith(f"(shape {shape})")


def test_what_does_not_divide() -> None:
    text = fails(ValueError, AllToAllSingle.of, GROUP, None, t(2, 2))
    assert text == "input must divide evenly among 3 ranks, got 4 elements (shape (2, 2))"
    for tensor in (t(4), t(2, 3), t()):
        text = fails(ValueError, ReduceScatterSingle.of, GROUP, None, tensor, SUM)
        assert text.startswith("input must divide evenly among 3 ranks along dim 0 when output is None")
        assert str(tuple(tensor.shape)) in text
    # with an output only the elements count
    assert ReduceScatterSingle.of(GROUP, t(2), t(2, 3), SUM).op == ReduceScatterSingle(torch.float32, 2, SUM)


@pytest.mark.parametrize(("odd", "word"), [(t(5), "5"), (t(4, dtype=D), "float64")])
@pytest.mark.parametrize("place", range(SIZE))
def test_allocated_reduce_scatter_blames_an_input(odd: Tensor, word: str, place: int) -> None:
    inputs = several()
    inputs[place] = odd
    text = fails(ValueError, ReduceScatter.of, GROUP, None, inputs, SUM)
    assert text.startswith("input_list[")
    assert word in text
    assert "output" not in text, "no output was given"


# -- lists


@lists
def test_a_tensor_is_no_list(name: str, use: Use) -> None:
    assert fails(TypeError, use, t(SIZE, 4)) == f"{name} must be a list or tuple of tensors, got Tensor"


@lists
@pytest.mark.parametrize("value", [3, {0: t(4)}, (t(4) for _ in range(SIZE)), {1, 2, 3}], ids=type)
def test_what_is_no_list(name: str, use: Use, value: Any) -> None:
    assert fails(TypeError, use, value) == f"{name} must be a list or tuple of tensors, got {type(value).__name__}"


@lists
@pytest.mark.parametrize("count", [0, 1, SIZE - 1, SIZE + 1])
def test_one_tensor_for_each_rank(name: str, use: Use, count: int) -> None:
    text = fails(ValueError, use, several(count))
    assert text == f"{name} must have one tensor for each of the 3 ranks, got {count}"


@lists
@pytest.mark.parametrize("make", [list, tuple])
def test_lists_and_tuples(name: str, use: Use, make: Any) -> None:
    call = use(make(several()))
    assert len(call.inputs) + len(call.outputs) == SIZE + 1


def test_lists_off_the_root() -> None:
    for empty in (None, [], ()):
        assert Scatter.of(GROUP, t(4), empty, 0).inputs == ()
        call = Gather.of(GROUP, empty, t(4), 0)
        assert call.outputs == ()
        assert call.result is None
    for name, use in (
        ("input_list", lambda x: Scatter.of(GROUP, t(4), x, 2)),
        ("output_list", lambda x: Gather.of(GROUP, x, t(4), 2)),
    ):
        text = fails(ValueError, use, several())
        assert text == (f"{name} must be None or empty off the root: this is rank 1, the root is 2, got 3 tensors")
        assert fails(TypeError, use, t(SIZE, 4)) == f"{name} must be a list or tuple of tensors, got Tensor"


def test_the_root_scatters_something() -> None:
    text = fails(ValueError, Scatter.of, GROUP, t(4), None, RANK)
    assert text == "input_list must be given on the root (rank 1), got None"


def test_scatter_needs_an_output() -> None:
    assert fails(TypeError, Scatter.of, GROUP, None, None, 0).startswith("output must be a torch.Tensor, got None")


# -- ranks and tags


@ranks
@pytest.mark.parametrize("value", [0, RANK, SIZE - 1, np.int64(2), np.uint8(1), torch.tensor(2)], ids=repr)
def test_ranks(name: str, use: Use, value: Any) -> None:
    op: Any = use(value).op
    rank = op.peer if name in ("src", "dst") else op.root
    assert rank == int(value)
    assert type(rank) is int


@ranks
@pytest.mark.parametrize("value", [-1, SIZE, 2**70, np.int64(-2)])
def test_ranks_out_of_range(name: str, use: Use, value: Any) -> None:
    assert fails(ValueError, use, value) == f"{name} must be in [0, 3), got {int(value)}"


@ranks
@pytest.mark.parametrize(
    "value", [True, False, np.True_, 1.0, "1", None, int, torch.tensor(1.0), np.array([0, 1])], ids=repr
)
def test_what_is_no_rank(name: str, use: Use, value: Any) -> None:
    if value is None and name == "src":
        return  # any source
    assert fails(TypeError, use, value) == f"{name} must be a rank (an integer), got {value!r}"


def test_a_receive_may_name_no_source() -> None:
    op: Any = Recv.of(GROUP, t(4), None, 0).op
    assert op.peer is None
    assert op.takes(Send(op.dtype, 4, 0, 0))


P2P: list[tuple[type[Any], Use]] = [
    (Send, lambda tag: Send.of(GROUP, t(4), 0, tag)),
    (Recv, lambda tag: Recv.of(GROUP, t(4), 0, tag)),
]
messages = pytest.mark.parametrize("use", [use for _, use in P2P], ids=["send", "recv"])


@messages
@pytest.mark.parametrize("value", [0, 7, MAX_TAG, np.int32(9)])
def test_tags(use: Use, value: Any) -> None:
    op: Any = use(value).op
    assert op.tag == value
    assert type(op.tag) is int


@messages
@pytest.mark.parametrize("value", [-1, MAX_TAG + 1, 2**64])
def test_tags_out_of_range(use: Use, value: int) -> None:
    assert fails(ValueError, use, value) == f"tag must be in [0, {MAX_TAG}], got {value}"


@messages
@pytest.mark.parametrize("value", [True, 1.0, "1", None, int, torch.tensor(1.5)], ids=repr)
def test_what_is_no_tag(use: Use, value: Any) -> None:
    assert fails(TypeError, use, value) == f"tag must be an integer, got {value!r}"


# -- reductions


@reductions
def test_reductions_are_checked(use: Callable[[Any, torch.dtype], Call]) -> None:
    assert "op must be one of" in fails(TypeError, use, "SUM", torch.float32)
    assert "op BAND cannot reduce torch.float32" in fails(ValueError, use, ReduceOp.BAND, torch.float32)
    assert "factor" in fails(ValueError, use, ReduceOp.PREMUL_SUM(0.5), torch.int32)


@reductions
def test_torch_reductions_are_taken(use: Callable[[Any, torch.dtype], Call]) -> None:
    op: Any = use(torch.distributed.ReduceOp.MAX, torch.float32).op
    assert op.reduction is not torch.distributed.ReduceOp.MAX
    assert op.reduction == ReduceOp.MAX


# -- what comes out


def test_in_place() -> None:
    tensor = t(2, 3)
    for call, reads, writes in (
        (AllReduce.of(GROUP, tensor, SUM), True, True),
        (Broadcast.of(GROUP, tensor, RANK), True, False),
        (Broadcast.of(GROUP, tensor, 0), False, True),
        (Reduce.of(GROUP, tensor, RANK, SUM), True, True),
        (Send.of(GROUP, tensor, 0, 0), True, False),
        (Recv.of(GROUP, tensor, 0, 0), False, True),
    ):
        assert [x is tensor for x in call.inputs] == [True] * reads, call.op
        assert [x is tensor for x in call.outputs] == [True] * writes, call.op
        assert call.result is tensor
        op: Any = call.op
        assert (op.dtype, op.numel) == (torch.float32, 6)


def test_reduce_elsewhere_gives_nothing() -> None:
    tensor = t(2)
    call = Reduce.of(GROUP, tensor, 0, SUM)
    assert call.inputs[0] is tensor
    assert call.outputs == ()
    assert call.result is None


def test_given_outputs_are_what_comes_back() -> None:
    outputs, single = several(), t(12)
    assert AllGather.of(GROUP, outputs, t(4)).result is outputs
    assert AllGather.of(GROUP, outputs, t(4)).outputs == tuple(outputs)
    assert Gather.of(GROUP, outputs, t(4), RANK).result is outputs
    assert AllGatherSingle.of(GROUP, single, t(4)).result is single
    assert ReduceScatterSingle.of(GROUP, single, t(36), SUM).result is single
    assert ReduceScatter.of(GROUP, single, several(SIZE, 12), SUM).result is single
    assert Scatter.of(GROUP, single, None, 0).result is single
    assert AllToAllSingle.of(GROUP, single, t(12)).result is single


def strange(*shape: int) -> Tensor:
    """A tensor of ``shape`` that is not contiguous and part of a graph."""
    return (torch.ones(*shape, 2, dtype=D, requires_grad=True) * 2)[..., 1]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (6, 2), (3, 0, 2)])
def test_allocated_outputs(shape: tuple[int, ...]) -> None:
    source = strange(*shape)
    made: list[tuple[Tensor, tuple[int, ...]]] = []
    made += [(x, shape) for x in AllGather.of(GROUP, None, source).result]
    made += [(x, shape) for x in Gather.of(GROUP, None, source, RANK).result]
    concatenated = (SIZE * shape[0], *shape[1:]) if shape else (SIZE,)
    made.append((AllGatherSingle.of(GROUP, None, source).result, concatenated))
    made.append((ReduceScatter.of(GROUP, None, [source] * SIZE, SUM).result, shape))
    if shape:
        made.append((ReduceScatterSingle.of(GROUP, None, source, SUM).result, (shape[0] // SIZE, *shape[1:])))
        made.append((AllToAllSingle.of(GROUP, None, source).result, shape))
    for tensor, expected in made:
        assert tuple(tensor.shape) == expected
        assert tensor.dtype == D
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    assert len({x.data_ptr() for x, _ in made if x.numel()}) == (len(made) if source.numel() else 0)


def test_reduce_scatter_allocates_the_shape_of_its_own_chunk() -> None:
    call = ReduceScatter.of(GROUP, None, [t(6), t(2, 3), t(3, 2)], SUM)
    assert call.result.shape == (2, 3)


def test_single_forms_count_elements_only() -> None:
    for shape in ((12, 2), (3, 4, 2), (24,), (2, 12), (4, 3, 2)):
        assert AllGatherSingle.of(GROUP, t(*shape), t(4, 2)).op == AllGatherSingle(torch.float32, 8)
        assert ReduceScatterSingle.of(GROUP, t(4, 2), t(*shape), SUM).op == ReduceScatterSingle(torch.float32, 8, SUM)
        assert AllToAllSingle.of(GROUP, t(24), t(*shape)).op == AllToAllSingle(torch.float32, 24)


def test_barrier() -> None:
    assert Barrier.of(GROUP) == Call(Barrier(), (), (), None)


def test_tensors_may_be_on_any_device_that_the_comm_is_on() -> None:
    group = Group("g", 0, 1, torch.device("meta"))
    assert AllReduce.of(group, torch.zeros(2, device="meta"), SUM).outputs
    assert fails(ValueError, AllReduce.of, group, t(2), SUM) == "tensor is on cpu, but comm 'g' is on meta"


# -- ops as values

F = torch.float32
PREMUL = ReduceOp.PREMUL_SUM
OPS: list[tuple[Op, str]] = [
    (AllReduce(F, 7, SUM), "all_reduce(float32[7], SUM)"),
    (AllReduce(torch.bfloat16, 0, PREMUL(0.5)), "all_reduce(bfloat16[0], PREMUL_SUM(0.5))"),
    (Broadcast(torch.int8, 7, 2), "broadcast(int8[7], root=2)"),
    (Reduce(F, 7, 2, ReduceOp.MAX), "reduce(float32[7], root=2, MAX)"),
    (AllGather(F, 7), "all_gather(float32[7])"),
    (AllGatherSingle(F, 7), "all_gather_single(float32[7])"),
    (ReduceScatter(F, 7, SUM), "reduce_scatter(float32[7], SUM)"),
    (ReduceScatterSingle(F, 7, SUM), "reduce_scatter_single(float32[7], SUM)"),
    (Scatter(F, 7, 0), "scatter(float32[7], root=0)"),
    (Gather(F, 7, 0), "gather(float32[7], root=0)"),
    (AllToAllSingle(F, 6), "all_to_all_single(float32[6])"),
    (Barrier(), "barrier()"),
    (Send(F, 7, 1, 5), "send(float32[7], dst=1, tag=5)"),
    (Recv(F, 7, 1, 5), "recv(float32[7], src=1, tag=5)"),
    (Recv(F, 7, None, 5), "recv(float32[7], src=any, tag=5)"),
]
values = pytest.mark.parametrize(("op", "text"), OPS, ids=[text for _, text in OPS])


def test_every_op_is_among_them() -> None:
    assert {type(op).__name__ for op, _ in OPS} == set(ops.__all__) - {"Call", "Op", "TensorOp"}


@values
def test_text(op: Op, text: str) -> None:
    assert str(op) == text
    assert text.startswith(op.kind + "(")


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
    assert op.p2p == isinstance(op, (Send, Recv))


@values
def test_fits_itself_and_nothing_else(op: Op, text: str) -> None:
    assert op.fits(pickle.loads(pickle.dumps(op)))
    for other, _ in OPS:
        assert op.fits(other) == (other == op)
    for field in dataclasses.fields(op):
        changed: Any = {
            "dtype": torch.float16,
            "numel": 99,
            "root": 1,
            "reduction": ReduceOp.MIN,
            "peer": 0,
            "tag": 0,
        }[field.name]
        assert not op.fits(dataclasses.replace(op, **{field.name: changed})), field.name


@pytest.mark.parametrize("kind", [AllReduce, ReduceScatter, ReduceScatterSingle])
def test_factors_are_each_ranks_own(kind: Any) -> None:
    mine, theirs = kind(F, 7, PREMUL(0.5)), kind(F, 7, PREMUL(torch.tensor(2.0)))
    assert mine != theirs
    assert mine.fits(theirs)
    assert theirs.fits(mine)
    assert not mine.fits(kind(F, 7, SUM))


def test_factors_of_reduce_are_each_ranks_own() -> None:
    assert Reduce(F, 7, 1, PREMUL(0.5)).fits(Reduce(F, 7, 1, PREMUL(2)))
    assert not Reduce(F, 7, 1, PREMUL(0.5)).fits(Reduce(F, 7, 0, PREMUL(0.5)))


def test_what_a_receive_takes() -> None:
    recv = Recv(F, 7, 1, 5)
    assert recv.takes(Send(F, 7, 0, 5))
    assert not recv.takes(Send(F, 6, 0, 5))
    assert not recv.takes(Send(F, 8, 0, 5))
    assert not recv.takes(Send(torch.int32, 7, 0, 5))
