"""Checks that all collectives share, seen through every argument of every method; and what only a few of them use.

What each operation makes of its arguments is in ``tests/ops``.
"""

from __future__ import annotations

import enum
import itertools
import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedParameter

from asynccomm.ops import Recv, Send
from asynccomm.ops.dtypes import REAL
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.validation import (
    MAX_LABEL,
    MAX_TAG,
    CommInfo,
    check_dtype,
    check_label,
    check_memory,
    check_no_tangent,
    check_pair,
    counts_of,
    divided,
    one_dtype,
    overlaps_itself,
    times,
)
from tests.cases import cases
from tests.comm.methods.argument_matrix import (
    COALESCED,
    DIMS,
    GROUP,
    LISTS,
    RANKS,
    REDUCTIONS,
    SIZE,
    SIZES,
    TAGS,
    TENSORS,
    Argument,
    Recorder,
    Reduction,
    each,
    fails,
    several,
    sparse,
    t,
    wrong,
)
from tests.sampling import examples

comm: Any = Recorder()
reductions = pytest.mark.parametrize("use", list(REDUCTIONS.values()), ids=list(REDUCTIONS))


@wrong
def test_what_is_wrong_is_said_by_name(error: type[Exception], name: str, call: Callable[[Any], Any]) -> None:
    with pytest.raises(error) as caught:
        call(comm)
    assert type(caught.value) is error, "no error of a kind of its own, such as OverflowError"
    assert str(caught.value).startswith(f"{name} ")


# -- tensors


@each(TENSORS)
def test_a_tensor_that_is_all_right(argument: Argument) -> None:
    argument.use(comm, t(*argument.shape))


@each(TENSORS)
@pytest.mark.parametrize("value", [3, "tensor", np.zeros(4), [1.0], ...], ids=["int", "str", "array", "list", "dots"])
def test_not_a_tensor(argument: Argument, value: Any) -> None:
    text = fails(TypeError, argument.use, comm, value)
    assert text == f"{argument.name} must be a torch.Tensor, got {value!r} ({type(value).__name__})"


@each(TENSORS)
def test_the_wrong_device(argument: Argument) -> None:
    text = fails(ValueError, argument.use, comm, torch.zeros(argument.shape, device="meta"))
    assert text == f"{argument.name} is on meta, but comm 'grads' is on cpu"


@each(TENSORS)
def test_not_dense(argument: Argument) -> None:
    text = fails(ValueError, argument.use, comm, sparse(*argument.shape))
    assert text == f"{argument.name} must be a dense tensor, got torch.sparse_coo"


@each(TENSORS)
def test_dtypes_that_cannot_be_copied(argument: Argument) -> None:
    text = fails(ValueError, argument.use, comm, torch.zeros(argument.shape, dtype=torch.uint8).view(torch.uint4))
    assert text == f"{argument.name} has dtype torch.uint4, which torch cannot copy; pass tensor.view(torch.uint8)"


@each(TENSORS)
def test_without_memory(argument: Argument) -> None:
    for start in (0, 3):
        tensor = torch.zeros(3 + math.prod(argument.shape))[start : start + math.prod(argument.shape)]
        tensor = tensor.view(argument.shape)
        tensor.untyped_storage().resize_(0)
        text = fails(ValueError, argument.use, comm, tensor)
        needed = 4 * (start + tensor.numel())
        assert text.startswith(
            f"{argument.name} needs {needed} bytes of memory (shape {argument.shape}, torch.float32)"
        )
        assert text.endswith("but its storage was resized to 0")


@each(TENSORS)
def test_without_values(argument: Argument) -> None:
    shape = argument.shape
    with FakeTensorMode():
        fake = torch.zeros(shape)
    for tensor in (fake, torch._efficientzerotensor(shape)):
        text = fails(ValueError, argument.use, comm, tensor)
        assert text == f"{argument.name} has no memory ({type(tensor).__name__} of shape {shape})"


@each(TENSORS)
def test_without_a_storage(argument: Argument) -> None:
    def use(tensor: Tensor) -> Tensor:
        assert fails(ValueError, argument.use, comm, tensor).startswith(f"{argument.name} has no memory (Tensor): ")
        return tensor

    torch.vmap(use)(torch.zeros(2, *argument.shape))
    text = fails(ValueError, argument.use, comm, UninitializedParameter())
    assert text.startswith(f"{argument.name} has no memory (UninitializedParameter): ")


def test_within_a_transformation_of_torch_func() -> None:
    def use(tensor: Tensor) -> Tensor:
        assert fails(ValueError, comm.all_reduce, tensor).startswith("tensor has no memory (Tensor): ")
        return tensor.sum()

    torch.func.grad(use)(torch.zeros(3))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # of torch's own forward mode
def test_tangents() -> None:
    plain = torch.ones(2)
    check_no_tangent("given", None)
    check_no_tangent("given", plain)
    text = "given must not be differentiated in forward mode or by torch.func"

    def refused(tensor: Tensor) -> Tensor:
        with pytest.raises(NotImplementedError, match=text):
            check_no_tangent("given", tensor)
        return tensor

    def refused_in_another(tensor: Tensor) -> Tensor:
        return cast(Tensor, torch.func.jvp(lambda other: refused(tensor) * other, (plain,), (plain,))[1])

    with forward_ad.dual_level():
        check_no_tangent("given", plain)
        refused(forward_ad.make_dual(plain, plain))
    for transformed in (refused, refused_in_another):
        torch.func.jvp(transformed, (plain,), (plain,))
    torch.func.jacfwd(refused)(plain)
    torch.func.grad(lambda tensor: refused(tensor).sum())(plain)


def test_memory_of_views() -> None:
    whole = torch.zeros(12)
    needed = {48: [whole[4:], whole.view(3, 4).t(), whole[::11]], 40: [whole[::3]], 0: [whole[:0]], 4: [whole[0]]}
    for views in needed.values():
        for view in views:
            check_memory("x", view)
    whole.untyped_storage().resize_(40)
    for nbytes, views in needed.items():
        for view in views:
            if nbytes > 40:
                with pytest.raises(ValueError, match=rf"^x needs {nbytes} bytes of memory .* was resized to 40$"):
                    check_memory("x", view)
            else:
                check_memory("x", view)


@each(TENSORS)
def test_overlapping_tensors_are_read_but_not_written(argument: Argument) -> None:
    overlapping = torch.zeros(1).expand(argument.shape)
    if argument.written:
        text = fails(ValueError, argument.use, comm, overlapping)
        strides = (0,) * len(argument.shape)
        assert text.startswith(f"{argument.name} overlaps itself (shape {argument.shape}, strides {strides})")
    else:
        argument.use(comm, overlapping)


def test_quantized_and_compressed_are_not_dense() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(t(4), 1.0, 0, torch.qint8)
        compressed = torch.eye(3).to_sparse_csr()
    assert "quantized" in fails(ValueError, comm.all_reduce, quantized)
    assert "sparse_csr" in fails(ValueError, comm.all_reduce, compressed)


@cases("layout", [torch.strided, torch.jagged])
def test_nested_is_not_dense(layout: torch.layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    for name, use in (
        ("tensor", comm.all_reduce),
        ("tensor", lambda x: comm.broadcast(x, 1)),
        ("input", lambda x: comm.gather_v(None, x, 0)),
    ):
        assert fails(ValueError, use, nested) == f"{name} must be a dense tensor, got nested"


def test_other_overlaps() -> None:
    for tensor in (
        torch.zeros(2, 1).expand(2, 3),
        torch.zeros(5).as_strided((3, 3), (1, 1)),
        torch.zeros(9).unfold(0, 3, 2),
    ):
        assert "overlaps itself" in fails(ValueError, comm.all_reduce, tensor)


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
        assert comm.all_reduce(tensor).result is tensor


def test_tensors_may_be_on_any_device_that_the_comm_is_on() -> None:
    there: Any = Recorder(CommInfo("g", 0, 1, torch.device("meta")))
    assert there.all_reduce(torch.zeros(2, device="meta")).outputs
    assert fails(ValueError, there.all_reduce, t(2)) == "tensor is on cpu, but comm 'g' is on meta"


# -- lists


@each(LISTS + COALESCED)
def test_a_tensor_is_no_list(argument: Argument) -> None:
    text = fails(TypeError, argument.use, comm, t(SIZE, 4))
    assert text == f"{argument.name} must be a list or tuple of tensors, got Tensor"


@each(LISTS + COALESCED)
@pytest.mark.parametrize("value", [3, {0: t(4)}, (t(4) for _ in range(SIZE)), {1, 2, 3}], ids=type)
def test_what_is_no_list(argument: Argument, value: Any) -> None:
    text = fails(TypeError, argument.use, comm, value)
    assert text == f"{argument.name} must be a list or tuple of tensors, got {type(value).__name__}"


@each(LISTS)
@pytest.mark.parametrize("count", [0, 1, SIZE - 1, SIZE + 1])
def test_one_tensor_for_each_rank(argument: Argument, count: int) -> None:
    text = fails(ValueError, argument.use, comm, several(count))
    assert text == f"{argument.name} must have one tensor for each of the 3 ranks, got {count}"


@each(COALESCED)
def test_at_least_one_tensor(argument: Argument) -> None:
    assert fails(ValueError, argument.use, comm, ()) == f"{argument.name} must have at least one tensor, got none"


@each(LISTS + COALESCED)
@pytest.mark.parametrize("make", [list, tuple, deque])
def test_lists_and_tuples(argument: Argument, make: Any) -> None:
    argument.use(comm, make(several(SIZE, *argument.shape)))


@each(LISTS + COALESCED)
def test_a_string_is_no_list_of_tensors(argument: Argument) -> None:
    assert fails(TypeError, argument.use, comm, "abc").startswith(f"{argument.name}[")


# -- ranks and tags


def call_of(value: Any) -> Any:
    """The call, or the first of several."""
    return value if hasattr(value, "op") else value[0][0]


@each(RANKS)
@pytest.mark.parametrize("value", [0, 1, SIZE - 1, np.int64(2), np.uint8(1), torch.tensor(2)], ids=repr)
def test_ranks(argument: Argument, value: Any) -> None:
    if argument.what.startswith("batch"):
        argument.use(comm, value)
        return
    op = call_of(argument.use(comm, value)).op
    fields = ["peer", "root", "giver", "taker"]
    rank = next(getattr(op, field) for field in fields if getattr(op, field, None) is not None)
    assert rank == int(value)
    assert type(rank) is int


@each(RANKS)
@pytest.mark.parametrize("value", [-1, SIZE, 2**70, np.int64(-2)])
def test_ranks_out_of_range(argument: Argument, value: Any) -> None:
    assert fails(ValueError, argument.use, comm, value) == f"{argument.name} must be in [0, 3), got {int(value)}"


NO_INTEGERS = [
    True,
    False,
    np.True_,
    torch.tensor(True),
    1.0,
    "1",
    None,
    int,
    torch.tensor(1.0),
    torch.tensor([0, 1]),
    np.array([0, 1]),
]
no_integers = pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)


@each(RANKS)
@no_integers
def test_what_is_no_rank(argument: Argument, value: Any) -> None:
    if value is None and argument.name == "src":
        argument.use(comm, None)  # any source
        return
    assert fails(TypeError, argument.use, comm, value) == f"{argument.name} must be a rank (an integer), got {value!r}"


@each(TAGS)
@pytest.mark.parametrize("value", [0, 7, MAX_TAG, np.int32(9)])
def test_tags(argument: Argument, value: Any) -> None:
    call = argument.use(comm, value)
    if call is not None:
        assert isinstance(call.op, (Send, Recv))
        assert call.op.tag == value
        assert type(call.op.tag) is int


def test_the_largest_tag() -> None:
    assert MAX_TAG == 2**27 - 2


@each(TAGS)
@pytest.mark.parametrize("value", [-1, MAX_TAG + 1, 2**64])
def test_tags_out_of_range(argument: Argument, value: int) -> None:
    assert fails(ValueError, argument.use, comm, value) == f"tag must be in [0, {MAX_TAG}], got {value}"


@each(TAGS)
@no_integers
def test_what_is_no_tag(argument: Argument, value: Any) -> None:
    assert fails(TypeError, argument.use, comm, value) == f"tag must be an integer, got {value!r}"


# -- dims and sizes


@each(DIMS)
@pytest.mark.parametrize("value", [0, 1, -1, -2, np.int64(1), np.int8(-2), torch.tensor(1)], ids=repr)
def test_dims(argument: Argument, value: Any) -> None:
    """Counted from either end, it is the same."""
    other = int(value) - 2 if value >= 0 else int(value) + 2
    mine, same = call_of(argument.use(comm, value)), call_of(argument.use(comm, other))
    assert mine.op == same.op
    assert [x.shape for x in mine.outputs] == [x.shape for x in same.outputs]


@each(DIMS)
@pytest.mark.parametrize("value", [2, -3, 2**70])
def test_dims_out_of_range(argument: Argument, value: int) -> None:
    text = fails(ValueError, argument.use, comm, value)
    assert text == f"dim must be in [-2, 2) for {argument.name} of shape (3, 3), got {value}"


@each(DIMS)
@no_integers
def test_what_is_no_dim(argument: Argument, value: Any) -> None:
    assert fails(TypeError, argument.use, comm, value) == f"dim must be an integer, got {value!r}"


@no_integers
def test_a_dim_is_an_integer_off_the_root_too(value: Any) -> None:
    text = fails(TypeError, lambda: comm.scatter_single(t(4), None, 0, value))
    assert text == f"dim must be an integer, got {value!r}"


@each(SIZES)
@pytest.mark.parametrize("make", [list, tuple, torch.Size, deque, lambda x: [np.int64(n) for n in x]])
def test_sizes(argument: Argument, make: Any) -> None:
    # what every one of them takes: rank 1 has, gets, and sends itself 4
    call = call_of(argument.use(comm, make([1, 4, 3])))
    assert call.op == call_of(argument.use(comm, [1, 4, 3])).op
    assert all(type(n) is int for n in getattr(call.op, "counts", ()))


@each(SIZES)
@pytest.mark.parametrize("value", [8, "143", b"143", {1, 4, 3}, {1: 4}, np.array([1, 4, 3]), torch.tensor([1, 4, 3])])
def test_what_are_no_sizes(argument: Argument, value: Any) -> None:
    text = fails(TypeError, argument.use, comm, value)
    assert text == f"{argument.name} must be a list or tuple of integers, got {value!r}"


@each(SIZES)
@pytest.mark.parametrize("value", NO_INTEGERS[:-1], ids=repr)
def test_what_is_no_size(argument: Argument, value: Any) -> None:
    sizes = [1, 4, value]
    assert fails(TypeError, argument.use, comm, sizes) == f"{argument.name} must be integers, got {sizes!r}"


@each(SIZES)
@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_one_size_for_each_rank(argument: Argument, count: int) -> None:
    text = fails(ValueError, argument.use, comm, [2] * count)
    assert text == f"{argument.name} must have one number for each of the 3 ranks, got {count}"


@each(SIZES)
def test_sizes_are_not_negative(argument: Argument) -> None:
    text = fails(ValueError, argument.use, comm, [5, 4, -1])
    assert text == f"{argument.name} must not be negative, got [5, 4, -1]"


@each(SIZES)
@pytest.mark.parametrize("large", [2**70, sys.maxsize])
def test_sizes_beyond_all_measure(argument: Argument, large: int) -> None:
    sizes = [1, 4, large]
    text = fails(ValueError, argument.use, comm, sizes)
    assert text == f"{argument.name} must add up to a size that a tensor can have, got {sizes}"


# -- reductions


@reductions
def test_reductions_are_checked(use: Reduction) -> None:
    assert "op must be one of" in fails(TypeError, use, comm, "SUM", torch.float32)
    assert "op BAND cannot reduce torch.float32" in fails(ValueError, use, comm, ReduceOp.BAND, torch.float32)
    assert "op MAX cannot reduce torch.complex64" in fails(ValueError, use, comm, ReduceOp.MAX, torch.complex64)
    assert "factor" in fails(ValueError, use, comm, ReduceOp.PREMUL_SUM(0.5), torch.int32)


@reductions
def test_torch_reductions_are_taken(use: Reduction) -> None:
    op = call_of(use(comm, torch.distributed.ReduceOp.MAX, torch.int8)).op
    assert op.reduction is not torch.distributed.ReduceOp.MAX
    assert op.reduction == ReduceOp.MAX


@reductions
def test_a_factor_is_read_at_the_call(use: Reduction) -> None:
    factor = torch.tensor(2)
    op = call_of(use(comm, ReduceOp.PREMUL_SUM(factor), torch.int8)).op
    factor.fill_(100)
    assert op.reduction == ReduceOp.PREMUL_SUM(torch.tensor(2))


# -- parts


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_goes_with_its_own_reals() -> None:
    for pair, real in REAL.items():
        for dtype in (pair, real):
            one_dtype(["b", "a"], [t(2, dtype=pair), t(2, dtype=dtype)])
            one_dtype(["b", "a"], [t(2, dtype=real), t(2, dtype=dtype)])
        for other in {*REAL, *REAL.values(), torch.int32, torch.bfloat16} - {pair, real}:
            text = fails(ValueError, one_dtype, ["b", "a"], [t(2, dtype=other), t(2, dtype=pair)])
            assert text == f"a has dtype {pair}, but b has {other}"


def test_one_dtype() -> None:
    check_dtype("a", t(2), "b", t(3))
    text = fails(ValueError, check_dtype, "a", t(2, dtype=torch.complex64), "b", t(2))
    assert text == "a has dtype torch.complex64, but b has torch.float32"


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_pairs_of_reals_share_memory() -> None:
    for pair, real in REAL.items():
        number = t(2, 3, dtype=pair).requires_grad_()
        views = one_dtype(["a", "b"], [t(4, dtype=real), number])
        assert [x.dtype for x in views] == [real, real]
        assert views[1].data_ptr() == number.data_ptr()
        assert views[1].numel() == 12
        assert not views[1].requires_grad
    scalar = one_dtype(["a", "b"], [torch.tensor(1j), t(2)])[0]
    assert scalar.tolist() == [0, 1]


def test_lazily_conjugated_does_not_go_with_reals() -> None:
    number = torch.ones(2, dtype=torch.complex64).conj()
    text = fails(ValueError, one_dtype, ["a", "b"], [t(4), number])
    assert text == "b is lazily conjugated, and cannot go with a real one: pass resolve_conj()"


def test_counts() -> None:
    assert counts_of([4, 4, 4]) == (4, ())
    assert counts_of([0, 0]) == (0, ())
    assert counts_of([4, 0, 5]) == (5, (4, 0, 5))
    assert counts_of([7]) == (7, ())


def test_shapes() -> None:
    assert times([], 3) == [3]
    assert times([2, 5], 3) == [6, 5]
    assert times(torch.Size([0, 5]), 3) == [0, 5]
    assert divided("x", t(6, 2), 3) == [2, 2]
    assert divided("x", t(0, 2), 3) == [0, 2]
    for tensor in (t(4), t()):
        text = fails(ValueError, divided, "x", tensor, 3)
        assert text.startswith("x must divide evenly among 3 ranks along dim 0")
        assert text.endswith(f"got shape {tuple(tensor.shape)}")


# -- tags of collectives


@cases("tag", ["x", "layer3.bias", " ", "\0", "ü" * (MAX_LABEL // 2), "x" * MAX_LABEL, "\U0001f600"])
def test_tags_of_collectives(tag: str) -> None:
    assert check_label(tag) is tag


class Layer(enum.StrEnum):
    BIAS = "layer3.bias"


@pytest.mark.parametrize("tag", [Layer.BIAS, np.str_("layer3.bias")], ids=["enum", "numpy"])
def test_what_is_a_str_becomes_a_plain_one(tag: str) -> None:
    found = check_label(tag)
    assert type(found) is str
    assert found == "layer3.bias"


@pytest.mark.parametrize("tag", [3, True, b"x", ["x"], object], ids=repr)
def test_a_tag_of_a_collective_is_a_str(tag: object) -> None:
    assert fails(TypeError, check_label, tag) == f"tag must be a str, got {tag!r} ({type(tag).__name__})"


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ("", "tag must have 1 to 1024 bytes in UTF-8, got 0 ('')"),
        ("x" * 1025, f"tag must have 1 to 1024 bytes in UTF-8, got 1025 ('{'x' * 20}'...)"),
        ("ü" * 513, f"tag must have 1 to 1024 bytes in UTF-8, got 1026 ('{'ü' * 20}'...)"),
        ("a\ud800", r"tag must be text that can be encoded in UTF-8, got 'a\ud800'"),
    ],
    ids=["empty", "long", "long in bytes", "surrogate"],
)
def test_a_tag_of_a_collective_can_be_sent(tag: str, text: str) -> None:
    assert fails(ValueError, check_label, tag) == text


# -- overlaps


def brute_force(shape: Sequence[int], strides: Sequence[int]) -> bool:
    offsets = [
        sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, shape))
    ]
    return len(set(offsets)) < len(offsets)


@examples(500)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=4))
def test_no_overlap_is_missed(dimensions: list[tuple[int, int]]) -> None:
    shape, strides = [n for n, _ in dimensions], [s for _, s in dimensions]
    tensor = torch.empty(200).as_strided(shape, strides)
    if brute_force(shape, strides):
        assert overlaps_itself(tensor)
        assert not tensor.is_contiguous()


@examples(500)
@given(st.data())
def test_views_do_not_overlap(data: st.DataObject) -> None:
    tensor = torch.empty(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    for _ in range(data.draw(st.integers(0, 4))):
        dim = data.draw(st.integers(0, max(0, tensor.dim() - 1)))
        match data.draw(st.sampled_from(["slice", "permute", "select", "diagonal", "unsqueeze"])):
            case "slice" if tensor.dim():
                start, step = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
                tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
            case "permute":
                tensor = tensor.permute(data.draw(st.permutations(range(tensor.dim()))))
            case "select" if tensor.dim() and tensor.shape[dim]:
                tensor = tensor.select(dim, 0)
            case "diagonal" if tensor.dim() >= 2:
                tensor = tensor.diagonal(0, dim, (dim + 1) % tensor.dim())
            case "unsqueeze":
                tensor = tensor.unsqueeze(dim)
    assume(tensor.numel())
    assert not brute_force(tensor.shape, tensor.stride())
    assert not overlaps_itself(tensor)


def test_an_output_and_its_input_as_one_dtype() -> None:
    output, source = t(4), t(2)
    target, same = check_pair(GROUP, output, source)
    assert target is output
    assert same is source
    pairs = t(2, dtype=torch.complex64)
    target, reals = check_pair(GROUP, output, pairs)
    assert target is output
    assert (reals.dtype, reals.data_ptr()) == (torch.float32, pairs.data_ptr())
    target, reals = check_pair(GROUP, pairs, source)
    assert (target.dtype, target.data_ptr()) == (torch.float32, pairs.data_ptr())
    assert fails(ValueError, check_pair, GROUP, output, t(2, dtype=torch.int8)) == (
        "input has dtype torch.int8, but output has torch.float32"
    )
    assert "output overlaps itself" in fails(ValueError, check_pair, GROUP, torch.zeros(1).expand(3), source)
