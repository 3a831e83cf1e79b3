"""Reductions as values, and which dtype may be reduced how."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import distributed as dist

from asynccomm.ops.dtypes import CODES
from asynccomm.ops.reduce_op import RedOpType, ReduceOp
from asynccomm.testing.conformance.data import DTYPES
from tests.cases import cases

PLAIN = [kind for kind in RedOpType if kind is not RedOpType.PREMUL_SUM]
LINEAR = {"SUM", "AVG", "PREMUL_SUM"}
ORDERED = {"PRODUCT", "MIN", "MAX"}
BITWISE = {"BAND", "BOR", "BXOR"}


def legal_kinds(dtype: torch.dtype) -> set[str]:
    """The table of the module's docstring."""
    if dtype.is_complex:
        return LINEAR
    if dtype.is_floating_point:
        return LINEAR | ORDERED
    if dtype == torch.bool:
        return {"SUM"} | ORDERED | BITWISE
    if dtype == torch.uint64:
        return {"SUM", "PRODUCT", "PREMUL_SUM"} | BITWISE
    return LINEAR | ORDERED | BITWISE


def is_legal(op: ReduceOp, dtype: torch.dtype) -> bool:
    try:
        op.check(dtype)
    except ValueError:
        return False
    return True


@cases("kind", PLAIN)
def test_members(kind: RedOpType) -> None:
    op = getattr(ReduceOp, kind.name)
    assert type(op) is ReduceOp
    assert op.type is kind
    assert op.factor is None
    assert repr(op) == kind.name
    assert op == ReduceOp(kind)
    assert hash(op) == hash(ReduceOp(kind))


def test_members_are_all_different() -> None:
    assert len({ReduceOp(kind) for kind in PLAIN} | {ReduceOp.PREMUL_SUM(2)}) == len(RedOpType)


@cases("kind", PLAIN)
def test_there_is_no_way_to_set_anything(kind: RedOpType) -> None:
    op: Any = ReduceOp(kind)
    for name in ("type", "factor", "other"):
        with pytest.raises(AttributeError):
            setattr(op, name, RedOpType.MAX)
    assert op.type is kind


@cases("factor", [2, -1, 0.5, 1j, torch.tensor(0.5), torch.tensor([3]), torch.tensor([[2.0]])])
def test_premul_sum(factor: Any) -> None:
    op = ReduceOp.PREMUL_SUM(factor)
    assert op.type is RedOpType.PREMUL_SUM
    assert op.factor is factor
    assert repr(factor) in repr(op)
    assert op == ReduceOp.PREMUL_SUM(factor)
    assert op != ReduceOp.SUM
    assert op != ReduceOp.SUM


@cases("factor", ["2", None, True, [2.0], object()])
def test_premul_sum_wants_a_number(factor: Any) -> None:
    with pytest.raises(TypeError, match="factor must be a number or a tensor with one element") as caught:
        ReduceOp.PREMUL_SUM(factor)
    assert repr(factor) in str(caught.value)


@cases("shape", [(0,), (2,), (1, 3)])
def test_premul_sum_wants_one_element(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="factor must have one element") as caught:
        ReduceOp.PREMUL_SUM(torch.zeros(shape))
    assert str(shape) in str(caught.value)


@cases(
    "factor",
    [
        torch.empty(1, device="meta"),
        torch.tensor([2.0]).to_sparse(),
        1 << 64,
        -(1 << 63) - 1,
        10**400,
    ],
)
def test_premul_sum_wants_a_factor_that_torch_can_multiply_with(factor: Any) -> None:
    with pytest.raises(ValueError, match="factor must be") as caught:
        ReduceOp.PREMUL_SUM(factor)
    assert repr(factor) in str(caught.value)


@cases("factor", [(1 << 64) - 1, -(1 << 63)])
def test_premul_sum_takes_all_integers_of_64_bits(factor: int) -> None:
    assert ReduceOp.PREMUL_SUM(factor).factor == factor


@cases("kind", [RedOpType.PREMUL_SUM, "PREMUL_SUM"])
def test_premul_sum_needs_its_factor(kind: Any) -> None:
    with pytest.raises(ValueError, match="factor"):
        ReduceOp(kind)


def test_factors_are_compared() -> None:
    assert ReduceOp.PREMUL_SUM(2) == ReduceOp.PREMUL_SUM(2.0)
    assert ReduceOp.PREMUL_SUM(2) != ReduceOp.PREMUL_SUM(3)
    assert ReduceOp.PREMUL_SUM(torch.tensor(2.0)) == ReduceOp.PREMUL_SUM(torch.tensor([2.0]))
    assert ReduceOp.PREMUL_SUM(torch.tensor(2.0)) != ReduceOp.PREMUL_SUM(torch.tensor(3.0))
    assert ReduceOp.SUM != "SUM"


@cases("kind", PLAIN)
def test_torchs_members_and_instances_are_understood(kind: RedOpType) -> None:
    member = getattr(dist.ReduceOp, kind.name)
    options = dist.AllreduceOptions()
    options.reduceOp = member
    for theirs in (member, getattr(dist.ReduceOp.RedOpType, kind.name), dist.ReduceOp(member), options.reduceOp):
        assert ReduceOp.of(theirs) == ReduceOp(kind)


@cases("factor", [2.0, torch.tensor(0.5), torch.tensor([3])])
def test_the_factor_of_torchs_premul_sum_is_kept(factor: Any) -> None:
    made = ReduceOp.of(dist._make_nccl_premul_sum(factor))
    assert made.type is RedOpType.PREMUL_SUM
    assert made == ReduceOp.PREMUL_SUM(factor)
    assert isinstance(made.factor, torch.Tensor) == isinstance(factor, torch.Tensor)


def test_torchs_premul_sum_without_a_factor_is_refused() -> None:
    with pytest.raises(ValueError, match="PREMUL_SUM needs a factor"):
        ReduceOp.of(dist.ReduceOp.PREMUL_SUM)


def test_of_returns_ours_as_it_is() -> None:
    op = ReduceOp.PREMUL_SUM(2)
    assert ReduceOp.of(op) is op


class Impostor:
    name = "SUM"


@cases("op", ["SUM", None, 0, RedOpType.SUM, Impostor(), torch.float32])
def test_of_refuses_everything_else(op: object) -> None:
    with pytest.raises(TypeError, match=r"op must be one of ReduceOp\.SUM, .*ReduceOp\.PREMUL_SUM") as caught:
        ReduceOp.of(op)
    assert repr(op) in str(caught.value)


@cases("dtype", DTYPES, ids=str)
def test_legality(dtype: torch.dtype) -> None:
    ops = [*(ReduceOp(kind) for kind in PLAIN), ReduceOp.PREMUL_SUM(2)]
    assert {op.type.name for op in ops if is_legal(op, dtype)} == legal_kinds(dtype)


def test_other_dtypes_are_not_reduced() -> None:
    ops = [*(ReduceOp(kind) for kind in PLAIN), ReduceOp.PREMUL_SUM(2)]
    assert not [(dtype, op) for dtype in CODES if dtype not in DTYPES for op in ops if is_legal(op, dtype)]


def test_illegal_names_op_and_dtype() -> None:
    with pytest.raises(ValueError, match=r"op BAND cannot reduce torch\.float32"):
        ReduceOp.BAND.check(torch.float32)


@cases("make", [lambda value: value, torch.tensor], ids=["number", "tensor"])
def test_factor_must_fit_the_dtype(make: Any) -> None:
    whole, real, imaginary = make(2), make(0.5), make(1j)
    for dtype in DTYPES:
        if "PREMUL_SUM" not in legal_kinds(dtype):
            continue
        assert is_legal(ReduceOp.PREMUL_SUM(whole), dtype)
        assert is_legal(ReduceOp.PREMUL_SUM(real), dtype) == (dtype.is_floating_point or dtype.is_complex)
        assert is_legal(ReduceOp.PREMUL_SUM(imaginary), dtype) == dtype.is_complex
    with pytest.raises(ValueError, match=r"factor .*0\.5.* must be an integer for torch\.int32"):
        ReduceOp.PREMUL_SUM(real).check(torch.int32)
    with pytest.raises(ValueError, match=r"factor .*1.*j.* is complex, but the tensor is torch\.float32"):
        ReduceOp.PREMUL_SUM(imaginary).check(torch.float32)


@cases(
    "op", [*(ReduceOp(kind) for kind in PLAIN), *map(ReduceOp.PREMUL_SUM, (2, 0.5, 1j, torch.tensor(2.0)))], ids=repr
)
def test_survives_pickle_and_copy(op: ReduceOp) -> None:
    for again in (pickle.loads(pickle.dumps(op)), copy.copy(op), copy.deepcopy(op)):
        assert again == op
        assert hash(again) == hash(op)
        assert repr(again) == repr(op)


def test_a_snapshot_does_not_see_later_changes_of_the_factor() -> None:
    factor = torch.tensor(2.0)
    taken = ReduceOp.PREMUL_SUM(factor).snapshot()
    factor.fill_(100)
    assert taken.factor == torch.tensor(2.0)
    assert ReduceOp.SUM.snapshot() is ReduceOp.SUM
