"""Reductions on the host against references in float64 and in Python's whole numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm.backends.arithmetic import accumulate, accumulator, combine, flat, is_plain, narrow, resolved, widen
from asynccomm.ops.reduce_op import RedOpType, ReduceOp
from asynccomm.testing.conformance.data import DTYPES, combinations, layouts
from tests.cases import cases
from tests.sampling import examples

CASES = list(combinations())
SIGNED = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}
UNSIGNED = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
WHOLE = {**SIGNED, **UNSIGNED}
REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
KINDS = RedOpType
quick = examples(150)


def run(rows: Sequence[Tensor], op: ReduceOp, output: Tensor | None = None) -> Tensor:
    """What a backend does with one tensor from each rank."""
    out = torch.empty_like(rows[0], memory_format=torch.contiguous_format) if output is None else output
    wide = torch.stack([widen(row, op) for row in rows])
    narrow(combine(wide, op, bools=rows[0].dtype == torch.bool), out, op, len(rows))
    return out


def bits_of(dtype: torch.dtype) -> tuple[int, int]:
    """The smallest and the largest number of ``dtype``."""
    if dtype in SIGNED:
        return -(1 << (SIGNED[dtype] - 1)), (1 << (SIGNED[dtype] - 1)) - 1
    return 0, (1 << UNSIGNED[dtype]) - 1


def wrapped(value: int, dtype: torch.dtype) -> int:
    """``value`` as ``dtype`` holds it."""
    low, high = bits_of(dtype)
    return (value - low) % (high - low + 1) + low


def whole(numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint64:
        return torch.tensor([wrapped(n, torch.int64) for n in numbers], dtype=torch.int64).view(torch.uint64)
    return torch.tensor(numbers, dtype=torch.int64).to(dtype)


def numbers(tensor: Tensor) -> list[int]:
    if tensor.dtype == torch.uint64:
        return [wrapped(n, torch.uint64) for n in tensor.view(torch.int64).tolist()]
    return [int(n) for n in tensor.tolist()]


def reference(column: Sequence[int], kind: RedOpType) -> int:
    """The exact result."""
    match kind:
        case KINDS.SUM | KINDS.PREMUL_SUM:
            return sum(column)
        case KINDS.AVG:
            total = sum(column)
            return abs(total) // len(column) * (1 if total >= 0 else -1)
        case KINDS.PRODUCT:
            return math.prod(column)
        case KINDS.MIN:
            return min(column)
        case KINDS.MAX:
            return max(column)
        case KINDS.BAND:
            return reduce(int.__and__, column)
        case KINDS.BOR:
            return reduce(int.__or__, column)
        case KINDS.BXOR:
            return reduce(int.__xor__, column)


def columns(rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True))


def table(element: st.SearchStrategy[Any]) -> st.SearchStrategy[list[list[Any]]]:
    """One row per rank, all of one length."""
    return st.integers(0, 6).flatmap(
        lambda n: st.lists(st.lists(element, min_size=n, max_size=n), min_size=1, max_size=7)
    )


@quick
@given(st.data())
def test_whole_numbers_are_exact(data: st.DataObject) -> None:
    dtype, op = data.draw(st.sampled_from([(d, op) for d, op in CASES if d in WHOLE]))
    low, high = bits_of(dtype)
    if op.type is KINDS.AVG and WHOLE[dtype] == 64:
        low, high = low // 8, high // 8  # there is nothing wider for the sum of seven
    rows = data.draw(table(st.integers(low, high)))
    tensors = [whole(row, dtype) for row in rows]
    kept = [tensor.clone() for tensor in tensors]
    expected = [wrapped(reference(column, op.type), dtype) for column in columns(rows)]
    assert numbers(run(tensors, op)) == expected
    for tensor, before in zip(tensors, kept, strict=True):
        assert numbers(tensor) == numbers(before)


@quick
@given(st.data())
def test_whole_numbers_times_factors(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(WHOLE)))
    rows = data.draw(table(st.integers(*bits_of(dtype))))
    factors = [data.draw(st.integers(-100, 100)) for _ in rows]
    make = data.draw(st.sampled_from([int, torch.tensor, lambda f: torch.tensor([f])]))
    wide = [widen(whole(row, dtype), ReduceOp.PREMUL_SUM(make(f))) for row, f in zip(rows, factors, strict=True)]
    out = whole(rows[0], dtype)
    narrow(combine(torch.stack(wide), ReduceOp.PREMUL_SUM(1)), out, ReduceOp.PREMUL_SUM(1), len(rows))
    expected = [wrapped(sum(n * f for n, f in zip(c, factors, strict=True)), dtype) for c in columns(rows)]
    assert numbers(out) == expected


@quick
@given(st.data())
def test_bools(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from([op for d, op in CASES if d == torch.bool]))
    rows = data.draw(table(st.booleans()))
    tensors = [torch.tensor(row, dtype=torch.bool) for row in rows]
    out = run(tensors, op)
    assert out.dtype == torch.bool
    assert out.tolist() == [bool(reference(column, op.type)) for column in columns(rows)]
    assert out.view(torch.uint8).le(1).all()
    assert [tensor.tolist() for tensor in tensors] == rows


def check_close(actual: Tensor, exact: Tensor, scale: Tensor, steps: int) -> None:
    """``steps`` roundings of numbers as large as ``scale`` are allowed, in the accumulator, and one in the output."""
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(actual.dtype, actual.dtype)
    allowed = scale * torch.finfo(wide).eps * steps + exact.abs() * torch.finfo(actual.dtype).eps
    allowed += torch.finfo(actual.dtype).smallest_normal
    difference = (actual.double() - exact).abs()
    assert (difference <= allowed).all(), (actual, exact)


@quick
@given(st.data())
def test_real_numbers(data: st.DataObject) -> None:
    dtype, op = data.draw(st.sampled_from([(d, op) for d, op in CASES if d in REAL]))
    rows = data.draw(table(st.floats(-4, 4, width=16)))
    tensors = [torch.tensor(row, dtype=torch.float64).to(dtype) for row in rows]
    kept = [tensor.clone() for tensor in tensors]
    exact = torch.stack([tensor.double() for tensor in tensors])
    result = {
        KINDS.SUM: lambda: exact.sum(0),
        KINDS.AVG: lambda: exact.sum(0) / len(rows),
        KINDS.PRODUCT: lambda: exact.prod(0),
        KINDS.MIN: lambda: exact.amin(0),
        KINDS.MAX: lambda: exact.amax(0),
    }[op.type]()
    scale = exact.abs().clamp(min=1).prod(0) if op.type is KINDS.PRODUCT else exact.abs().sum(0)
    out = run(tensors, op)
    assert out.dtype == dtype
    check_close(out, result, scale, 2 * len(rows))
    for tensor, before in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, before)


@quick
@given(st.data())
def test_complex_numbers(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(COMPLEX))
    op = data.draw(st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM(0.5), ReduceOp.PREMUL_SUM(2j)]))
    whole_numbers = st.builds(complex, st.integers(-9, 9), st.integers(-9, 9))
    rows = data.draw(table(whole_numbers))
    tensors = [torch.tensor(row, dtype=torch.complex64).to(dtype) for row in rows]
    if data.draw(st.booleans()):
        tensors = [tensor.conj() for tensor in tensors]
        rows = [[z.conjugate() for z in row] for row in rows]
    factor: Any = 1 if op.factor is None else op.factor
    expected = torch.tensor([sum(c) * factor for c in columns(rows)], dtype=torch.complex128)
    if op.type is KINDS.AVG:
        expected /= len(rows)
    out = run(tensors, op)
    assert out.dtype == dtype
    tolerance = 1e-3 if dtype == torch.complex32 else 1e-6
    torch.testing.assert_close(out.to(torch.complex128), expected, rtol=tolerance, atol=0)


@cases("dtype, op", CASES, ids=lambda x: str(x))
def test_every_layout_in_and_out(dtype: torch.dtype, op: ReduceOp) -> None:
    for shape in ((), (1,), (0,), (2, 3), (2, 0, 3)):
        values = torch.arange(math.prod(shape)).add(1).view(shape)
        source = (values % 2 == 0) if dtype == torch.bool else values.to(torch.float32).to(dtype)
        plain = run([source] * 3, op)
        for name, strange in layouts(source):
            blank = torch.ones(shape, dtype=torch.bool) if dtype == torch.bool else torch.full(shape, 77.0).to(dtype)
            output = next(t for n, t in layouts(blank) if n == name)
            run([strange] * 3, op, output)
            assert output.shape == source.shape
            assert torch.equal(resolved(output).view(torch.uint8), resolved(plain).view(torch.uint8)), (shape, name)


@cases("dtype", [*REAL, *COMPLEX], ids=str)
def test_premul_sum_of_floats(dtype: torch.dtype) -> None:
    for factor in (3, 0.5, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64), torch.tensor([[2]])):
        source = torch.tensor([1.0, -2.0, 6.0]).to(dtype)
        out = run([source, source], ReduceOp.PREMUL_SUM(factor))
        assert out.to(torch.complex64).real.tolist() == [2 * n * float(factor) for n in (1.0, -2.0, 6.0)]


def test_factors_may_require_grad() -> None:
    factor = torch.tensor(2.0, requires_grad=True)
    source = torch.ones(3, requires_grad=True)
    wide = widen(source, ReduceOp.PREMUL_SUM(factor))
    assert not wide.requires_grad
    assert wide.tolist() == [2.0] * 3


@cases("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_rounded_once(dtype: torch.dtype) -> None:
    step = float(torch.finfo(dtype).eps)
    rows = [torch.tensor([1.0]).to(dtype), *(torch.tensor([step / 4]).to(dtype) for _ in range(4))]
    assert run(rows, ReduceOp.SUM).item() == 1.0 + step
    big = torch.tensor([float(torch.finfo(dtype).max)]).to(dtype)
    if dtype == torch.float16:
        assert run([big, big], ReduceOp.AVG).item() == big.item(), "the sum does not fit, the average does"
        assert run([big, big], ReduceOp.PREMUL_SUM(0.5)).item() == big.item()


def test_averages_truncate_towards_zero_and_never_wrap() -> None:
    for dtype, low in ((torch.int8, -128), (torch.int16, -(1 << 15)), (torch.int32, -(1 << 31))):
        rows = [torch.tensor([low, -low - 1, -1, 1, -7, 7], dtype=dtype)] * 3
        assert run(rows, ReduceOp.AVG).tolist() == [low, -low - 1, -1, 1, -7, 7]
        mixed = [torch.tensor([-1, 1, -7, 7], dtype=dtype), torch.zeros(4, dtype=dtype)]
        assert run(mixed, ReduceOp.AVG).tolist() == [0, 0, -3, 3]
    for dtype in (torch.uint8, torch.uint16, torch.uint32):
        high = (1 << UNSIGNED[dtype]) - 1
        assert numbers(run([whole([high], dtype)] * 5, ReduceOp.AVG)) == [high]


@cases("dtype", DTYPES, ids=str)
def test_an_accumulator_holds_what_it_accumulates(dtype: torch.dtype) -> None:
    for kind in RedOpType:
        wide = accumulator(dtype, kind)
        assert wide.itemsize >= (dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize)
        assert not wide.is_complex


def test_nan_is_not_lost() -> None:
    rows = [torch.tensor([math.nan, 1.0, math.inf]), torch.tensor([1.0, math.nan, -math.inf])]
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        assert run(rows, op)[:2].isnan().all()
    assert run(rows, ReduceOp.SUM)[2].isnan()


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.PREMUL_SUM(0.3)], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 5, 8, 17])
def test_the_order_is_that_of_the_ranks_wherever_an_element_stands(op: ReduceOp, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    rows = torch.randn(ranks, 1003, generator=generator)
    together = combine(rows, op)
    one_by_one = torch.cat([combine(rows[:, i : i + 1].clone(), op) for i in range(rows.shape[1])])
    assert torch.equal(together, combine(rows.clone(), op))
    expected = rows[0].clone()
    for row in rows[1:]:
        expected = expected * row if op.type is KINDS.PRODUCT else expected + row
    assert torch.equal(together, one_by_one), "the bits depend on where a chunk was cut"
    assert torch.equal(together, expected)


def test_widening_shares_memory_when_it_can() -> None:
    for dtype in (torch.float32, torch.int64, torch.uint64, torch.bool, torch.complex64):
        tensor = torch.zeros(4, dtype=dtype)
        assert widen(tensor, ReduceOp.SUM).data_ptr() == tensor.data_ptr()
    for tensor in (torch.zeros(4, dtype=torch.float16), torch.zeros(4, 2)[:, 1], torch.zeros(4, dtype=torch.int16)):
        assert widen(tensor, ReduceOp.SUM).data_ptr() != tensor.data_ptr()


def test_narrowing_in_place() -> None:
    for dtype in (torch.float32, torch.int64, torch.complex64):
        tensor = torch.tensor([8, -9, 2]).to(dtype)
        narrow(widen(tensor, ReduceOp.AVG), tensor, ReduceOp.AVG, 4)
        expected = [2, -2, 0] if dtype == torch.int64 else [2.0, -2.25, 0.5]
        assert tensor.tolist() == expected


def test_narrowing_into_a_leaf_that_requires_grad() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    narrow(torch.ones(3), leaf, ReduceOp.SUM, 1)
    assert leaf.tolist() == [1.0] * 3
    assert leaf.is_leaf


def test_plain_and_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert is_plain(z)
    assert not is_plain(z.conj())
    assert not is_plain(z.conj().imag)  # negative
    assert not is_plain(torch.zeros(2, 3).t())
    assert resolved(z).data_ptr() == z.data_ptr()
    assert resolved(z.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert resolved(z.conj().imag).tolist() == [-2.0, 4.0]
    for tensor in (torch.zeros(3, 2).t(), torch.zeros(()), torch.zeros(0, 3), torch.zeros(4, 3)[:1, :1]):
        out = resolved(tensor)
        assert out.dim() == 1
        assert out.stride() == (1,)
        assert out.numel() == tensor.numel()
        assert is_plain(out)
    single = torch.zeros(8).as_strided((1, 1), (5, 7))
    assert flat(single).stride() == (1,)
    assert not resolved(torch.ones(2, requires_grad=True)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("n", [1, 3, 40])
def test_a_nan_has_the_same_bits_wherever_it_is_written(dtype: torch.dtype, n: int) -> None:
    bits = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x7FFFFFFF])
    total = bits.to(torch.int32).view(torch.float32).repeat(n)
    plain, gaps = torch.zeros(4 * n, dtype=dtype), torch.zeros(12 * n, dtype=dtype)[::3]
    for output in (plain, gaps):
        narrow(total.clone(), output, ReduceOp.SUM, 2)
    assert torch.equal(plain.view(torch.uint8), gaps.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not KINDS.PREMUL_SUM], ids=str)
def test_accumulate_is_combine_without_a_copy(kind: RedOpType) -> None:
    rows = [torch.arange(5, dtype=torch.int32) * (rank + 3) + 1 for rank in range(3)]
    op = ReduceOp(kind)
    expected, memory = combine(rows, op), rows[0].clone()
    total = accumulate([memory, *rows[1:]], op)
    assert torch.equal(total, expected)
    assert (total.data_ptr() == memory.data_ptr()) is (kind not in (KINDS.MIN, KINDS.MAX))
