"""What a reduction must give, computed apart from the library: in float64, in integers, and with a margin.

An element is exact (these very bits), bounded (anything between two numbers, with any sign of zero; NaN where NaN is
the bound) or free (overflow that depends on the order of adding up). Whatever it is, all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT, BOUNDED, FREE = 0, 1, 2

_FLOAT, _WHOLE = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"), ("BAND", "BOR", "BXOR")
WIDE = {torch.float64: torch.float64}  # the dtype of the accumulator, where it is not float32


@dataclass(frozen=True, slots=True)
class Margin:
    """For each real number of a result: its kind, and between what a bounded one must be."""

    kind: Tensor
    low: Tensor
    high: Tensor

    def take(self, index: Tensor) -> Margin:
        return Margin(self.kind[index], self.low[index], self.high[index])


def legal(dtype: str) -> tuple[str, ...]:
    """The reductions that tensors of ``dtype`` can go through."""
    if dtype.startswith("complex"):
        return "SUM", "AVG", "PREMUL_SUM"
    if dtype == "bool":
        return "SUM", "PRODUCT", "MIN", "MAX", *_WHOLE
    if dtype == "uint64":
        return "SUM", "PRODUCT", "PREMUL_SUM", *_WHOLE
    if dtype.startswith("float") or dtype == "bfloat16":
        return _FLOAT if dtype not in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu") else ()
    return *_FLOAT, *_WHOLE


def reduced(rows: Sequence[Tensor], kind: str, factors: Sequence[complex | None]) -> tuple[Tensor, Margin | None]:
    """Flat rows of one dtype, one for each rank, and each rank's factor for PREMUL_SUM.

    Returns: the result in that dtype, and the margin of its reals; None: all of them are exact.
    """
    dtype = rows[0].dtype
    if dtype == torch.bool:
        return _of_bools(rows, kind), None
    if dtype.is_complex:
        return _of_complex(rows, kind, factors)
    if not dtype.is_floating_point:
        return _of_integers(rows, kind, factors), None
    return _of_floats(rows, kind, factors)


def _of_bools(rows: Sequence[Tensor], kind: str) -> Tensor:
    table = torch.stack(list(rows))
    if kind == "BXOR":
        return table.sum(0) % 2 == 1
    return table.all(0) if kind in ("PRODUCT", "MIN", "BAND") else table.any(0)


def _of_integers(rows: Sequence[Tensor], kind: str, factors: Sequence[complex | None]) -> Tensor:
    dtype = rows[0].dtype
    wide = [row.view(torch.int64) if dtype == torch.uint64 else row.to(torch.int64) for row in rows]
    if kind == "PREMUL_SUM":
        wide = [row * int(factor.real) for row, factor in zip(wide, factors, strict=True) if factor is not None]
    result = wide[0].clone()
    for row in wide[1:]:
        match kind:
            case "PRODUCT":
                result *= row
            case "MIN":
                result = torch.minimum(result, row)
            case "MAX":
                result = torch.maximum(result, row)
            case "BAND":
                result &= row
            case "BOR":
                result |= row
            case "BXOR":
                result ^= row
            case _:
                result += row
    if kind == "AVG":
        result = result.div(len(rows), rounding_mode="trunc")
    return result.view(torch.uint64) if dtype == torch.uint64 else result.to(dtype)


def _of_complex(rows: Sequence[Tensor], kind: str, factors: Sequence[complex | None]) -> tuple[Tensor, Margin | None]:
    dtype = rows[0].dtype
    if kind != "PREMUL_SUM":
        flat = [torch.view_as_real(row).reshape(-1) for row in rows]
        result, margin = _of_floats(flat, kind, factors)
        return result.view(dtype), margin
    real = torch.view_as_real(rows[0]).dtype
    parts, sizes = [], []
    for row, factor in zip(rows, factors, strict=True):
        assert factor is not None
        pairs = torch.view_as_real(row).double()
        a, b = pairs[:, 0], pairs[:, 1]
        c, d = factor.real, factor.imag
        parts.append(torch.stack([a * c - b * d, a * d + b * c], 1).reshape(-1))
        size = _size(torch.stack([a, b])) * (abs(c) + abs(d))
        sizes.append(torch.stack([size, size], 1).reshape(-1))
    total, size = sum(parts), sum(sizes)
    assert isinstance(total, Tensor)
    assert isinstance(size, Tensor)
    whole = _whole([*parts, *(factor_parts(f, len(total)) for f in factors)])
    result, margin = _settled(total, size, whole, len(rows), real, scaled=True)
    margin.kind[~torch.isfinite(total)] = FREE  # what becomes of infinities is left to the multiplication
    return result.view(dtype), margin


def factor_parts(factor: complex | None, numel: int) -> Tensor:
    """Whether a factor is whole, for each element."""
    value = complex(factor or 0)
    exact = value.real == int(value.real) and value.imag == int(value.imag)
    return torch.full((numel,), 0.0 if exact else 0.5, dtype=torch.float64)


def _of_floats(rows: Sequence[Tensor], kind: str, factors: Sequence[complex | None]) -> tuple[Tensor, Margin | None]:
    dtype = rows[0].dtype
    wide = [row.double() for row in rows]
    if kind in ("MIN", "MAX"):
        return _extreme(wide, kind, dtype)
    if kind == "PRODUCT":
        return _product(wide, dtype)
    if kind == "PREMUL_SUM":
        wide = [row * factor.real for row, factor in zip(wide, factors, strict=True) if factor is not None]
    table = torch.stack(wide)
    total, size = table.sum(0), _size(table)
    if kind == "SUM" and len(rows) <= 2:  # one addition, rounded: the same for everybody
        return _exact(_added(rows, dtype), total)
    whole = _whole(wide)
    if kind != "PREMUL_SUM":
        return _settled(total, size, whole, len(rows), dtype, divided=kind == "AVG")
    # factors and products may be rounded to the dtype of the tensors, as NCCL does
    whole &= _whole([factor_parts(factor, len(total)) for factor in factors])
    whole &= torch.stack([row.to(dtype).double() == row for row in wide]).all(0)
    result, margin = _settled(total, size, whole, len(rows), dtype, scaled=True)
    margin.kind[(torch.isfinite(table) & (table.abs() >= torch.finfo(dtype).max)).any(0)] = FREE
    return result, margin


def _size(table: Tensor) -> Tensor:
    """How large the finite numbers of each column are together."""
    return torch.where(torch.isfinite(table), table, 0.0).abs().sum(0)


def _added(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    result = rows[0].to(WIDE.get(dtype, torch.float32))
    for row in rows[1:]:
        result = result + row.to(result.dtype)
    return result.to(dtype)


def _exact(result: Tensor, total: Tensor) -> tuple[Tensor, Margin | None]:
    """All exact but for the sign of zero and the bits of NaN."""
    vague = torch.isnan(result.double()) | (result.double() == 0)
    if not vague.any():
        return result, None
    wide = result.double()
    return result, Margin(torch.where(vague, BOUNDED, EXACT), wide, wide)


def _extreme(wide: Sequence[Tensor], kind: str, dtype: torch.dtype) -> tuple[Tensor, Margin | None]:
    table = torch.stack(list(wide))
    result = table.amin(0) if kind == "MIN" else table.amax(0)
    return _exact(result.to(dtype), result)


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Where all are whole numbers."""
    return torch.stack([part == part.round() for part in parts]).all(0)


def _product(wide: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Margin | None]:
    table = torch.stack(list(wide))
    total = table.prod(0)
    accumulator = torch.finfo(WIDE.get(dtype, torch.float32))
    most, least = table.abs().clamp(min=1).prod(0), table.abs().clamp(max=1).prod(0)
    exact = _whole(wide) & (most <= 2 / accumulator.eps)
    bound = total.abs() * (len(wide) * accumulator.eps * 4)
    margin = _margin(total, bound, exact, dtype)
    vanishes = (least < accumulator.tiny) & ~(table == 0).any(0)
    margin.kind[(most > accumulator.max) & ~torch.isinf(table).any(0) | vanishes] = FREE
    margin.kind[torch.isnan(table).any(0)] = BOUNDED
    return total.to(WIDE.get(dtype, torch.float32)).to(dtype), margin


def _settled(
    total: Tensor,
    size: Tensor,
    whole: Tensor,
    count: int,
    dtype: torch.dtype,
    *,
    scaled: bool = False,
    divided: bool = False,
) -> tuple[Tensor, Margin]:
    """A sum of ``count`` numbers whose absolute values add up to ``size``."""
    wide = WIDE.get(dtype, torch.float32)
    accumulator = torch.finfo(wide)
    exact = whole & (size <= 2 / accumulator.eps)
    bound = size * (4 * count * accumulator.eps)
    if scaled:
        bound = bound + size * (2 * torch.finfo(dtype).eps)
    result = total.to(wide)
    if divided:
        result, total, bound = result / count, total / count, bound / count
        if count & (count - 1):
            exact = exact & (total == total.round())
    margin = _margin(total, bound, exact, dtype)
    margin.kind[(size > accumulator.max) & ~torch.isnan(total)] = FREE
    return result.to(dtype), margin


def _margin(total: Tensor, bound: Tensor, exact: Tensor, dtype: torch.dtype) -> Margin:
    """Around ``total``, which is rounded to ``dtype`` in the end."""
    info = torch.finfo(dtype)
    bound = bound + total.abs() * info.eps + info.smallest_normal * info.eps * 2
    low, high = total - bound, total + bound
    endless = ~torch.isfinite(total)
    low, high = torch.where(endless, total, low), torch.where(endless, total, high)
    kind = torch.where(exact & ~endless & (total != 0), EXACT, BOUNDED)
    kind[~endless & (high.abs().maximum(low.abs()) >= info.max)] = FREE  # it may or may not overflow
    kind[endless & torch.isinf(total) & (info.dtype == "float8_e4m3fn")] = FREE  # which has no infinity
    return Margin(kind, low, high)
