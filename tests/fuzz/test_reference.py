"""The reference for reductions: what is legal, exact values, and how much play there is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from asynccomm import ReduceOp
from asynccomm.backends import arithmetic
from tests.cases import cases

from .program import Arena, torch_dtype
from .reference import BOUNDED, EXACT, FREE, legal, reduced
from .values import DTYPES, content

KINDS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


def op_of(kind: str) -> ReduceOp:
    return ReduceOp.PREMUL_SUM(2) if kind == "PREMUL_SUM" else getattr(ReduceOp, kind)


@cases("dtype", DTYPES)
def test_what_is_legal_is_what_the_library_takes(dtype: str) -> None:
    taken = []
    for kind in KINDS:
        try:
            op_of(kind).check(torch_dtype(dtype))
        except ValueError:
            continue
        taken.append(kind)
    assert sorted(legal(dtype)) == sorted(taken)


def by_arithmetic(rows: list[torch.Tensor], kind: str, size: int) -> torch.Tensor:
    op = op_of(kind)
    total = arithmetic.combine(
        torch.stack([arithmetic.widen(row, op) for row in rows]), op, bools=rows[0].dtype == torch.bool
    )
    output = torch.empty_like(rows[0])
    arithmetic.narrow(total, output, op, size)
    return output


@cases("fill", ["position", "small", "special", "random"])
@cases("dtype", [dtype for dtype in DTYPES if legal(dtype)])
def test_it_agrees_with_the_arithmetic_that_backends_share(dtype: str, fill: str) -> None:
    for size in (1, 2, 3, 4):
        rows = [content(Arena(dtype, 40, fill, 3), rank) for rank in range(size)]
        for kind in legal(dtype):
            expected, margin = reduced(rows, kind, [2] * size)
            actual = by_arithmetic(rows, kind, size)
            real = expected.dtype.to_real() if expected.dtype.is_complex else expected.dtype
            got, wanted = actual.view(real), expected.view(real)
            same = (
                got.view(torch.uint8).view(-1, real.itemsize) == wanted.view(torch.uint8).view(-1, real.itemsize)
            ).all(1)
            if margin is not None:
                wide = got.double()
                within = (margin.low <= wide) & (wide <= margin.high) | (torch.isnan(margin.low) & torch.isnan(wide))
                same |= (margin.kind == BOUNDED) & within | (margin.kind == FREE)
            assert same.all(), (kind, size, [row[~same] for row in [got, wanted]])


def one(kind: str, *values: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, int, float, float]:
    result, margin = reduced([torch.tensor([value], dtype=dtype) for value in values], kind, [None] * len(values))
    if margin is None:
        return result.item(), EXACT, 0.0, 0.0
    return result.item(), int(margin.kind[0]), margin.low.item(), margin.high.item()


def test_whole_numbers_are_exact_and_others_have_a_margin() -> None:
    assert one("SUM", 1.0, 2.0, 4.0)[:2] == (7.0, EXACT)
    assert one("PRODUCT", 3.0, 5.0, 7.0)[:2] == (105.0, EXACT)
    value, kind, low, high = one("SUM", 0.1, 0.2, 0.3)
    assert kind == BOUNDED
    assert low < 0.6 < high
    assert high - low < 1e-5
    assert value == pytest.approx(0.6)


def test_nan_and_infinity_go_through() -> None:
    for kind in ("SUM", "MIN", "MAX", "PRODUCT", "AVG"):
        _, vague, low, _ = one(kind, 1.0, math.nan, 2.0)
        assert vague == BOUNDED, kind
        assert math.isnan(low), kind
    assert math.isnan(one("SUM", math.inf, -math.inf, 0.0)[2])
    assert one("SUM", math.inf, 1.0, 1.0)[2:] == (math.inf, math.inf)
    assert one("MAX", -0.0, 0.0)[1] == BOUNDED


def test_what_overflows_on_the_way_is_free() -> None:
    assert one("SUM", 3e38, 3e38, -3e38)[1] == FREE
    assert one("PRODUCT", 1e30, 1e30, 1e-30)[1] == FREE


def scaled(*values: tuple[float, float], dtype: torch.dtype) -> int:
    """The kind of a sum of such values times factors."""
    rows = [torch.tensor([value], dtype=dtype) for value, _ in values]
    _, margin = reduced(rows, "PREMUL_SUM", [factor for _, factor in values])
    assert margin is not None
    return int(margin.kind[0])


def test_factors_and_products_may_be_rounded_to_the_dtype() -> None:
    assert scaled((3.0, 2), (5.0, -1), dtype=torch.float32) == EXACT
    assert scaled((10.0, 0.3), (5.0, -1), dtype=torch.float32) == BOUNDED, "10 * 0.3 is whole, but 0.3 is none"
    assert scaled((60000.0, 2), (-math.inf, 1), dtype=torch.float16) == FREE, "infinities in float16"
    assert scaled((60000.0, 2), (60000.0, -2), dtype=torch.float16) == FREE
    assert scaled((60000.0, 2), (-math.inf, 1), dtype=torch.float32) == BOUNDED
    assert scaled((300.0, 2), (-math.inf, 1), dtype=torch.float16) == BOUNDED


def test_integers_wrap_and_their_average_is_cut_towards_zero() -> None:
    assert one("SUM", 100, 100, dtype=torch.int8)[0] == -56
    assert one("AVG", -1, -2, dtype=torch.int32)[0] == -1
    assert one("AVG", 100, 101, dtype=torch.int8)[0] == 100
    assert one("SUM", 2**64 - 1, 2, dtype=torch.uint64)[0] == 1
