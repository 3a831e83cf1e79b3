"""What moves tensors between all ranks, and what it makes of its arguments. What all share is in test_checks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Scatter,
)
from asynccomm.ops.base import layout_of
from asynccomm.ops.dtypes import CODES, REAL
from tests.cases import cases
from tests.comm.methods.argument_matrix import GROUP, RANK, SIZE, around, fails, several, t

F, D, C = torch.float32, torch.float64, torch.complex64


def same(found: Any, expected: Any) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


# -- one dtype, and the right number of elements

DTYPES: list[tuple[str, str, Callable[[], Call]]] = [
    ("tensor_list[1]", "tensor", lambda: AllGather.of(GROUP, around(t(4, dtype=D), 1), t(4))),
    ("input", "output", lambda: AllGatherSingle.of(GROUP, t(12), t(4, dtype=D))),
    ("input_list[0]", "output", lambda: Scatter.of(GROUP, t(4), around(t(4, dtype=D), 0), RANK)),
    ("output_list[0]", "input", lambda: Gather.of(GROUP, around(t(4, dtype=D), 0), t(4), RANK)),
    ("input", "output", lambda: AllToAllSingle.of(GROUP, t(6), t(6, dtype=D))),
    ("output_list[2]", "output_list[0]", lambda: AllToAll.of(GROUP, around(t(4, dtype=D), 2), several())),
    ("input_list[1]", "output_list[0]", lambda: AllToAll.of(GROUP, several(), around(t(4, dtype=D), 1))),
]


@pytest.mark.parametrize(("name", "like", "use"), DTYPES)
def test_one_dtype(name: str, like: str, use: Callable[[], Call]) -> None:
    assert fails(ValueError, use) == f"{name} has dtype torch.float64, but {like} has torch.float32"


NUMELS: list[tuple[str, int, str, Callable[[], Call]]] = [
    ("tensor", 5, "(2, 2)", lambda: AllGather.of(GROUP, [t(4), t(5), t(4)], t(2, 2))),
    ("output", 12, "(3, 5)", lambda: AllGatherSingle.of(GROUP, t(3, 5), t(4))),
    ("input_list[0]", 4, "(2,)", lambda: Scatter.of(GROUP, t(4), [t(2), t(4), t(4)], RANK)),
    ("output_list[0]", 4, "(2, 1)", lambda: Gather.of(GROUP, [t(2, 1), t(4), t(4)], t(4), RANK)),
    ("output", 6, "(7,)", lambda: AllToAllSingle.of(GROUP, t(7), t(6))),
    ("output_list[1]", 4, "(0,)", lambda: AllToAll.of(GROUP, around(t(0), 1), several())),
]


@pytest.mark.parametrize(("name", "expected", "shape", "use"), NUMELS)
def test_number_of_elements(name: str, expected: int, shape: str, use: Callable[[], Call]) -> None:
    text = fails(ValueError, use)
    assert text.startswith(f"{name} must have {expected} elements ")
    assert text.endswith(f"(shape {shape})")


def test_what_does_not_divide() -> None:
    text = fails(ValueError, AllToAllSingle.of, GROUP, None, t(2, 2))
    assert text == "input must divide evenly among 3 ranks, got 4 elements (shape (2, 2))"


# -- complex and real


@pytest.mark.parametrize("pair", [torch.complex32, torch.complex64, torch.complex128])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_counts_as_two_reals(pair: torch.dtype) -> None:
    real = pair.to_real()

    def lists(dtype: torch.dtype, numel: int) -> list[Tensor]:
        return several(SIZE, numel, dtype=dtype)

    mixed = [t(4, dtype=pair), t(8, dtype=real), t(2, 2, dtype=pair)]
    calls = [
        AllGather.of(GROUP, mixed, t(8, dtype=real)),
        AllGather.of(GROUP, mixed, t(4, dtype=pair)),
        AllGather.of(GROUP, lists(real, 8), t(4, dtype=pair)),
        AllGatherSingle.of(GROUP, t(24, dtype=real), t(4, dtype=pair)),
        AllGatherSingle.of(GROUP, t(12, dtype=pair), t(8, dtype=real)),
        Scatter.of(GROUP, t(8, dtype=real), mixed, RANK),
        Scatter.of(GROUP, t(4, dtype=pair), lists(real, 8), RANK),
        Gather.of(GROUP, lists(real, 8), t(4, dtype=pair), RANK),
        Gather.of(GROUP, mixed, t(8, dtype=real), RANK),
        AllToAllSingle.of(GROUP, t(12, dtype=real), t(6, dtype=pair)),
        AllToAll.of(GROUP, mixed, lists(real, 8)),
        AllToAll.of(GROUP, lists(real, 8), mixed),
    ]
    for call in calls:
        op: Any = call.op
        assert op.dtype == real
        if isinstance(op, AllToAll):
            assert op == AllToAll(real, (8, 8, 8), (8, 8, 8))
        else:
            assert op.numel == (12 if isinstance(op, AllToAllSingle) else 8)
        assert {x.dtype for x in (*call.inputs, *call.outputs)} == {real}
        given = call.result if isinstance(call.result, list) else [call.result]
        for output, shown in zip(call.outputs, given, strict=True):
            assert output.data_ptr() == shown.data_ptr(), "the caller's own memory"


def test_complex_all_alike_stays_complex_but_is_described_in_reals() -> None:
    outputs, inputs = several(dtype=C), several(dtype=C)
    gathered, exchanged = AllGather.of(GROUP, outputs, inputs[0]), AllToAll.of(GROUP, outputs, inputs)
    assert gathered.op == AllGather(F, 8)
    assert exchanged.op == AllToAll(F, (8, 8, 8), (8, 8, 8))
    assert same(gathered.outputs, outputs)
    assert same(gathered.inputs, inputs[:1])
    assert same(exchanged.outputs, outputs)
    assert same(exchanged.inputs, inputs)


EITHER: list[tuple[str, Callable[[torch.dtype, int], Call]]] = [  # of some dtype, with so many times as many elements
    ("broadcast", lambda d, k: Broadcast.of(GROUP, t(4 * k, dtype=d), 0)),
    ("broadcast of several", lambda d, k: Broadcast.of_several(GROUP, several(2, 4 * k, dtype=d), 0)),
    ("all_gather", lambda d, k: AllGather.of(GROUP, several(SIZE, 4 * k, dtype=d), t(4 * k, dtype=d))),
    ("all_gather, allocated", lambda d, k: AllGather.of(GROUP, None, t(4 * k, dtype=d))),
    (
        "all_gather, uneven",
        lambda d, k: AllGather.of(GROUP, [t(n * k, dtype=d) for n in (5, 4, 0)], t(4 * k, dtype=d)),
    ),
    (
        "all_gather of several",
        lambda d, k: AllGather.of_several(GROUP, [several(2, 4 * k, dtype=d)] * SIZE, several(2, 4 * k, dtype=d)),
    ),
    ("all_gather_single", lambda d, k: AllGatherSingle.of(GROUP, t(12 * k, dtype=d), t(4 * k, dtype=d))),
    ("all_gather_single, allocated", lambda d, k: AllGatherSingle.of(GROUP, None, t(4 * k, dtype=d))),
    ("scatter at the root", lambda d, k: Scatter.of(GROUP, t(4 * k, dtype=d), several(SIZE, 4 * k, dtype=d), RANK)),
    ("scatter elsewhere", lambda d, k: Scatter.of(GROUP, t(4 * k, dtype=d), None, 0)),
    ("gather at the root", lambda d, k: Gather.of(GROUP, None, t(4 * k, dtype=d), RANK)),
    ("gather elsewhere", lambda d, k: Gather.of(GROUP, None, t(4 * k, dtype=d), 0)),
    ("all_to_all", lambda d, k: AllToAll.of(GROUP, several(SIZE, 4 * k, dtype=d), several(SIZE, 4 * k, dtype=d))),
    ("all_to_all_single", lambda d, k: AllToAllSingle.of(GROUP, t(12 * k, dtype=d), t(12 * k, dtype=d))),
]


@cases("use", [use for _, use in EITHER], ids=[name for name, _ in EITHER])
@cases("pair", REAL)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_ranks_may_differ_in_complex_and_real(use: Callable[[torch.dtype, int], Call], pair: torch.dtype) -> None:
    mine, other = use(pair, 1).op, use(REAL[pair], 2).op
    assert mine == other
    assert mine.fits(other)
    assert mine.nbytes == other.nbytes


def test_what_the_root_mixes_fits_what_others_have() -> None:
    others = Scatter(F, 8, RANK), Gather(F, 8, RANK)
    assert Scatter.of(GROUP, t(4, dtype=C), several(SIZE, 8), RANK).op == others[0]
    assert Gather.of(GROUP, several(SIZE, 4, dtype=C), t(8), RANK).op == others[1]


def test_conjugated_is_fine_unless_it_goes_with_reals() -> None:
    number = torch.ones(4, dtype=C).conj()
    assert AllGather.of(GROUP, several(dtype=C), number).inputs[0] is number
    text = fails(ValueError, AllGather.of, GROUP, several(SIZE, 8), number)
    assert text.startswith("tensor is lazily conjugated")


def test_complex_of_the_wrong_size_counts_in_reals() -> None:
    text = fails(ValueError, AllGatherSingle.of, GROUP, t(12), t(4, dtype=C))
    assert text.startswith("output must have 24 elements (3 (ranks) x 8 (input)), got 12")


# -- one by one


def test_broadcast() -> None:
    tensor = t(2, 3)
    here, there = Broadcast.of(GROUP, tensor, RANK), Broadcast.of(GROUP, tensor, 2)
    assert here.op == Broadcast(F, 6, RANK)
    assert there.op == Broadcast(F, 6, 2)
    assert same(here.inputs, [tensor])
    assert same(there.outputs, [tensor])
    assert here.outputs == there.inputs == ()
    assert here.result is there.result is tensor


def test_several_dtypes_are_broadcast_as_bytes() -> None:
    tensors = [t(3), t(2, 2, dtype=torch.int8)]
    here, there = Broadcast.of_several(GROUP, tensors, RANK), Broadcast.of_several(GROUP, tensors, 2)
    assert here.op == Broadcast(torch.uint8, 16, RANK, layout=layout_of([12, 4, CODES[F], CODES[torch.int8]]))
    assert same(here.inputs, tensors)
    assert same(there.outputs, tensors)
    assert here.result is there.result is tensors


def test_all_gather() -> None:
    outputs, tensor = several(), t(2, 2)
    call = AllGather.of(GROUP, outputs, tensor)
    assert call.op == AllGather(F, 4)
    assert same(call.inputs, [tensor])
    assert same(call.outputs, outputs)
    assert call.result is outputs
    assert AllGather.of(GROUP, outputs, outputs[RANK]).inputs[0] is outputs[RANK], "in place"


def test_uneven_all_gather() -> None:
    counts = (5, 4, 0)
    call = AllGather.of(GROUP, [t(5), t(2, 2), t(0, 3)], t(4))
    assert call.op == AllGather(F, 5, layout=layout_of(counts), counts=counts)
    assert call.op.nbytes == 20
    others = AllGather.of(GROUP, [t(0), t(4), t(5)], t(4))
    assert not call.op.fits(others.op)


def test_several_dtypes_are_gathered_as_bytes() -> None:
    tensors = [t(3), t(2, 2, dtype=torch.int8)]
    outputs = [[t(3), t(4, dtype=torch.int8)] for _ in range(SIZE)]
    call = AllGather.of_several(GROUP, outputs, tensors)
    assert call.op == AllGather(torch.uint8, 16, layout=layout_of([12, 4, CODES[F], CODES[torch.int8]]))
    assert same(call.outputs, [x for share in outputs for x in share])
    assert call.result is outputs


def test_single_forms_count_elements_only() -> None:
    for shape in ((12, 2), (3, 4, 2), (24,), (2, 12), (4, 3, 2)):
        assert AllGatherSingle.of(GROUP, t(*shape), t(4, 2)).op == AllGatherSingle(F, 8)
        assert AllToAllSingle.of(GROUP, t(24), t(*shape)).op == AllToAllSingle(F, 24)


def test_scatter() -> None:
    output, inputs = t(2, 2), several()
    here = Scatter.of(GROUP, output, inputs, RANK)
    assert here.op == Scatter(F, 4, RANK)
    assert same(here.inputs, inputs)
    assert here.outputs[0] is here.result is output
    for empty in (None, [], ()):
        there = Scatter.of(GROUP, output, empty, 0)
        assert there.inputs == ()
        assert there.outputs[0] is there.result is output


def test_gather() -> None:
    outputs, tensor = several(), t(2, 2)
    here = Gather.of(GROUP, outputs, tensor, RANK)
    assert here.op == Gather(F, 4, RANK)
    assert same(here.outputs, outputs)
    assert here.result is outputs
    for empty in (None, [], ()):
        there = Gather.of(GROUP, empty, tensor, 0)
        assert same(there.inputs, [tensor])
        assert there.outputs == ()
        assert there.result is None


def test_lists_off_the_root() -> None:
    for name, use in (
        ("input_list", lambda x: Scatter.of(GROUP, t(4), x, 2)),
        ("output_list", lambda x: Gather.of(GROUP, x, t(4), 2)),
    ):
        text = fails(ValueError, use, several())
        assert text == f"{name} must be None or empty off the root: this is rank 1, the root is 2, got 3 tensors"
        assert fails(TypeError, use, t(SIZE, 4)) == f"{name} must be a list or tuple of tensors, got Tensor"


def test_the_root_scatters_something() -> None:
    text = fails(ValueError, Scatter.of, GROUP, t(4), None, RANK)
    assert text == "input_list must be given on the root (rank 1), got None"


def test_scatter_needs_an_output() -> None:
    assert fails(TypeError, Scatter.of, GROUP, None, None, 0).startswith("output must be a torch.Tensor, got None")


def test_all_to_all() -> None:
    outputs, inputs = [t(3), t(4), t(0)], [t(5), t(2, 2), t(1)]
    call = AllToAll.of(GROUP, outputs, inputs)
    assert call.op == AllToAll(F, (5, 4, 1), (3, 4, 0))
    assert same(call.inputs, inputs)
    assert same(call.outputs, outputs)
    assert call.result is outputs
    assert call.op.fits(AllToAll(F, (9, 9, 9), (8, 8, 8))), "numbers are each rank's own"
    assert not call.op.fits(AllToAll(D, (5, 4, 1), (3, 4, 0)))
    assert not call.op.fits(AllToAllSingle(F, 10))


def test_all_to_all_single() -> None:
    output, tensor = t(6, 2), t(12)
    call = AllToAllSingle.of(GROUP, output, tensor)
    assert call.op == AllToAllSingle(F, 12)
    assert call.outputs[0] is call.result is output
    assert AllToAllSingle.of(GROUP, tensor, tensor).result is tensor, "in place"


def test_barrier() -> None:
    assert Barrier.of(GROUP) == Call(Barrier(), (), (), None)


# -- what None makes


def strange(*shape: int) -> Tensor:
    """A tensor of ``shape`` that is not contiguous and part of a graph."""
    return (torch.ones(*shape, 2, dtype=D, requires_grad=True) * 2)[..., 1]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (6, 2), (3, 0, 2)])
def test_allocated_outputs(shape: tuple[int, ...]) -> None:
    source = strange(*shape)
    made: list[tuple[Tensor, tuple[int, ...]]] = []
    for call in (AllGather.of(GROUP, None, source), Gather.of(GROUP, None, source, RANK)):
        assert same(call.outputs, call.result)
        made += [(x, shape) for x in call.result]
    concatenated = (SIZE * shape[0], *shape[1:]) if shape else (SIZE,)
    made.append((AllGatherSingle.of(GROUP, None, source).result, concatenated))
    if shape:
        made.append((AllToAllSingle.of(GROUP, None, source).result, shape))
    for tensor, expected in made:
        assert tuple(tensor.shape) == expected
        assert tensor.dtype == D
        assert tensor.device == source.device
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    assert len({x.data_ptr() for x, _ in made if x.numel()}) == (len(made) if source.numel() else 0)


def test_allocated_where_the_tensor_is_and_not_where_the_default_is() -> None:
    with torch.device("meta"):
        calls = [
            AllGather.of(GROUP, None, torch.zeros(3, device="cpu")),
            AllGatherSingle.of(GROUP, None, torch.zeros(3, device="cpu")),
            AllToAllSingle.of(GROUP, None, torch.zeros(3, device="cpu")),
        ]
    assert {x.device.type for call in calls for x in call.outputs} == {"cpu"}
