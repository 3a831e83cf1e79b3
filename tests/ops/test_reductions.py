"""all_reduce, reduce and reduce_scatter: what they make of their arguments. What all share is in test_checks.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from asynccomm.ops import AllReduce, Reduce, ReduceScatter, ReduceScatterSingle
from asynccomm.ops.base import layout_of
from asynccomm.ops.reduce_op import ReduceOp
from tests.comm.methods.argument_matrix import GROUP, RANK, SIZE, around, fails, several, t

F, D, C = torch.float32, torch.float64, torch.complex64
SUM, PREMUL = ReduceOp.SUM, ReduceOp.PREMUL_SUM


def test_all_reduce_in_place() -> None:
    tensor = t(2, 3)
    call = AllReduce.of(GROUP, tensor, SUM)
    assert call.op == AllReduce(F, 6, SUM)
    assert call.inputs is call.outputs
    assert call.result is call.inputs[0] is tensor


def test_all_reduce_elsewhere() -> None:
    tensor, out = torch.zeros(1).expand(2, 3), t(6)
    call = AllReduce.of(GROUP, tensor, SUM, out)
    assert call.op == AllReduce(F, 6, SUM), "nothing that the other ranks see"
    assert call.inputs[0] is tensor
    assert call.outputs[0] is call.result is out
    same = t(3)
    call = AllReduce.of(GROUP, same, SUM, same)
    assert call.inputs[0] is call.outputs[0] is same


def test_reduce() -> None:
    tensor, out = t(2, 3), t(6)
    here = Reduce.of(GROUP, tensor, RANK, SUM)
    assert here.op == Reduce(F, 6, RANK, SUM)
    assert here.inputs is here.outputs
    assert here.result is here.inputs[0] is tensor
    there = Reduce.of(GROUP, tensor, 0, SUM)
    assert there.inputs[0] is tensor
    assert (there.outputs, there.result) == ((), None)
    here = Reduce.of(GROUP, tensor, RANK, SUM, out)
    assert here.inputs[0] is tensor
    assert here.outputs[0] is here.result is out
    there = Reduce.of(GROUP, tensor, 0, SUM, out)
    assert (there.outputs, there.result) == ((), None)
    assert there.op == Reduce(F, 6, 0, SUM)


@pytest.mark.parametrize("root", [0, RANK])
def test_out_is_checked_like_the_tensor(root: int) -> None:
    for use in (
        lambda tensor, out: AllReduce.of(GROUP, tensor, SUM, out),
        lambda tensor, out: Reduce.of(GROUP, tensor, root, SUM, out),
    ):
        assert fails(ValueError, use, t(4), t(4, dtype=D)) == (
            "out has dtype torch.float64, but tensor has torch.float32"
        )
        assert fails(ValueError, use, t(4, dtype=C), t(8)) == (
            "out has dtype torch.float32, but tensor has torch.complex64"
        )
        assert fails(ValueError, use, t(4), t(2, 3)) == (
            "out must have 4 elements (as many as tensor), got 6 (shape (2, 3))"
        )


# -- reduce_scatter


def test_reduce_scatter() -> None:
    output, inputs = t(2, 2), several()
    call = ReduceScatter.of(GROUP, output, inputs, SUM)
    assert call.op == ReduceScatter(F, 4, SUM)
    assert all(a is b for a, b in zip(call.inputs, inputs, strict=True))
    assert call.outputs[0] is call.result is output


def test_uneven_reduce_scatter() -> None:
    counts = (5, 4, 0)
    call = ReduceScatter.of(GROUP, t(2, 2), [t(5), t(4), t(0, 3)], SUM)
    assert call.op == ReduceScatter(F, 5, SUM, layout=layout_of(counts), counts=counts)
    assert call.op.nbytes == 20
    text = fails(ValueError, ReduceScatter.of, GROUP, t(5), [t(5), t(4), t(5)], SUM)
    assert text == "output must have 4 elements (as many as input_list[1]), got 5 (shape (5,))"


def test_reduce_scatter_of_one_dtype() -> None:
    text = fails(ValueError, ReduceScatter.of, GROUP, t(4), around(t(4, dtype=D), 2), SUM)
    assert text == "input_list[2] has dtype torch.float64, but output has torch.float32"


@pytest.mark.parametrize("place", range(SIZE))
def test_allocated_reduce_scatter_blames_an_input(place: int) -> None:
    text = fails(ValueError, ReduceScatter.of, GROUP, None, around(t(4, dtype=D), place), SUM)
    assert text.startswith("input_list[")
    assert "float64" in text
    assert "output" not in text, "no output was given"


def test_reduce_scatter_allocates_the_shape_of_its_own_chunk() -> None:
    call = ReduceScatter.of(GROUP, None, [t(6), t(2, 3), t(3, 3)], SUM)
    assert call.result is call.outputs[0]
    assert call.result.shape == (2, 3)
    assert call.op.counts == (6, 6, 9)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("own", "inputs"), [(t(8), several(dtype=C)), (t(4, dtype=C), several(3, 8)), (t(4, dtype=C), around(t(8), 0))]
)
def test_reduce_scatter_of_complex_and_real(own: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    inputs = [x if x.numel() == 8 or x.is_complex() else t(8) for x in inputs]
    call = ReduceScatter.of(GROUP, own, inputs, SUM)
    assert call.op == ReduceScatter(F, 8, SUM)
    assert call.result is own
    assert all(x.dtype == F and x.numel() == 8 for x in (*call.inputs, *call.outputs))
    assert call.outputs[0].data_ptr() == own.data_ptr()


def test_mixed_with_complex_only_what_is_legal_for_complex() -> None:
    for op in (ReduceOp.MAX, ReduceOp.PRODUCT):
        text = fails(ValueError, ReduceScatter.of, GROUP, t(8), several(dtype=C), op)
        assert text == f"op {op} cannot reduce torch.complex64"
        text = fails(ValueError, ReduceScatterSingle.of, GROUP, t(8), t(12, dtype=C), op)
        assert text == f"op {op} cannot reduce torch.complex64"
        text = fails(ValueError, ReduceScatterSingle.of, GROUP, t(4, dtype=C), t(24), op)
        assert text == f"op {op} cannot reduce torch.complex64"


# -- the single form


def test_reduce_scatter_single() -> None:
    output, source = t(4, 2), t(SIZE, 8)
    call = ReduceScatterSingle.of(GROUP, output, source, SUM)
    assert call.op == ReduceScatterSingle(F, 8, SUM)
    assert call.inputs[0] is source
    assert call.outputs[0] is call.result is output
    for shape in ((12, 2), (3, 4, 2), (24,), (2, 12), (4, 3, 2)):  # only elements count
        assert ReduceScatterSingle.of(GROUP, output, t(*shape), SUM).op == call.op
    assert ReduceScatterSingle.of(GROUP, t(2), t(2, 3), SUM).op == ReduceScatterSingle(F, 2, SUM)


def test_reduce_scatter_single_of_another_size() -> None:
    text = fails(ValueError, ReduceScatterSingle.of, GROUP, t(4), t(4), SUM)
    assert text == "input must have 12 elements (3 (ranks) x 4 (output)), got 4 (shape (4,))"
    text = fails(ValueError, ReduceScatterSingle.of, GROUP, t(4, dtype=D), t(12), SUM)
    assert text == "input has dtype torch.float32, but output has torch.float64"


def test_allocated_reduce_scatter_single_divides() -> None:
    for tensor in (t(4), t(2, 3), t()):
        text = fails(ValueError, ReduceScatterSingle.of, GROUP, None, tensor, SUM)
        assert text.startswith("input must divide evenly among 3 ranks along dim 0 for a new output")
        assert str(tuple(tensor.shape)) in text


def test_reduce_scatter_single_of_complex_and_real() -> None:
    for output, source in ((t(8), t(12, dtype=C)), (t(4, dtype=C), t(24)), (t(4, dtype=C), t(12, dtype=C))):
        call = ReduceScatterSingle.of(GROUP, output, source, SUM)
        assert call.result is output
        assert call.op == (
            ReduceScatterSingle(F, 8, SUM) if output.dtype != source.dtype else ReduceScatterSingle(C, 4, SUM)
        )
    text = fails(ValueError, ReduceScatterSingle.of, GROUP, t(7), t(12, dtype=C), SUM)
    assert text.startswith("input must have 21 elements (3 (ranks) x 7 (output)), got 24")


# -- several as one


def test_several() -> None:
    tensors = [t(3), t(2, 2)]
    call = AllReduce.of_several(GROUP, tensors, SUM)
    assert call.op == AllReduce(F, 7, SUM, layout=layout_of([3, 4]))
    assert call.inputs is call.outputs
    assert call.result is tensors
    outputs, shares = [t(1), t(2)], [[t(1), t(2)] for _ in range(SIZE)]
    call = ReduceScatter.of_several(GROUP, outputs, shares, SUM)
    assert call.op == ReduceScatter(F, 3, SUM, layout=layout_of([1, 2]))
    assert [x.numel() for x in call.inputs] == [1, 2] * SIZE
    assert call.result is outputs


# -- which fit together


@pytest.mark.parametrize("kind", [AllReduce, ReduceScatter, ReduceScatterSingle])
def test_factors_are_each_ranks_own(kind: Any) -> None:
    mine, theirs = kind(F, 7, PREMUL(0.5)), kind(F, 7, PREMUL(torch.tensor(2.0)))
    assert mine != theirs
    assert mine.fits(theirs)
    assert theirs.fits(mine)
    assert not mine.fits(kind(F, 7, SUM))
    assert not mine.fits(dataclasses.replace(theirs, layout=3))


def test_factors_of_reduce_are_each_ranks_own() -> None:
    assert Reduce(F, 7, 1, PREMUL(0.5)).fits(Reduce(F, 7, 1, PREMUL(2)))
    assert not Reduce(F, 7, 1, PREMUL(0.5)).fits(Reduce(F, 7, 0, PREMUL(0.5)))


def test_shares_that_are_permuted_do_not_fit() -> None:
    calls = [ReduceScatter.of(GROUP, None, [t(n) for n in counts], SUM) for counts in ((5, 4, 0), (0, 4, 5))]
    assert not calls[0].op.fits(calls[1].op)
