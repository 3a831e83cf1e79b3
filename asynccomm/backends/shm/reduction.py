"""Reductions through slots: the dtype in which values travel, and the combination of the ranks' parts.

Where torch can combine tensors of the caller's dtype without loss, they travel unchanged and are combined in place.
Half types travel as halves and are added up in fp32. All other cases (small integers under AVG, unsigned integers,
factors) are widened by ``backends/arithmetic.py`` before, and narrowed after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.kernels import DTYPES, OPERATORS
from asynccomm.ops.dtypes import REAL, in_reals
from asynccomm.ops.reduce_op import RedOpType, ReduceOp

_PAIRWISE: Final[dict[RedOpType, Callable[..., Tensor]]] = {
    RedOpType.SUM: torch.add,
    RedOpType.AVG: torch.add,
    RedOpType.PREMUL_SUM: torch.add,
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}


def _lesser(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """The minimum, of equals the first: torch.minimum takes either, so the sign of a zero would depend on its place."""
    return torch.where((b < a) | (b.isnan() & ~a.isnan()), b, a, out=out)


def _greater(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return torch.where((b > a) | (b.isnan() & ~a.isnan()), b, a, out=out)


_FLOATING: Final = {**_PAIRWISE, RedOpType.MIN: _lesser, RedOpType.MAX: _greater}
_HALF: Final = {torch.float16: torch.float16, torch.bfloat16: torch.bfloat16, torch.complex32: torch.float16}
_EXACT: Final = frozenset({RedOpType.MIN, RedOpType.MAX})  # exact in any dtype: the result is one of the values
# Elements up to which torch's operations use no OpenMP threads. OpenMP creates a team for each calling thread, and the
# team spins at the end of every operation: in two ranks, each with a team as large as the number of cores, a reduction
# of 256 KiB took 12 ms instead of 40 us.
SERIAL: Final = 32767

_known: dict[tuple[torch.dtype, RedOpType, int], Reduction] = {}  # reductions without a factor


def reduction_for(dtype: torch.dtype, reduction: ReduceOp, size: int) -> Reduction:
    """The reduction of ``dtype`` over ``size`` ranks."""
    if reduction.factor is not None:
        return Reduction(dtype, reduction, size)
    key = (dtype, reduction.type, size)
    found = _known.get(key)
    if found is None:
        found = _known[key] = Reduction(dtype, reduction, size)
    return found


@final
class Reduction:
    """One kind of reduction: a dtype, an operation and a number of ranks.

    Attributes:
        dtype: the dtype in which values travel.
        as_it_is: whether values travel in the dtype of the tensors, without a factor.
        kernel: dtype, operator and divisor (0: none), as the executor in C numbers them; None if it has no such kernel.
    """

    def __init__(self, dtype: torch.dtype, reduction: ReduceOp, size: int) -> None:
        self._reduction = reduction
        self._size = size
        self._divide = reduction.type is RedOpType.AVG
        half = _HALF.get(dtype) if reduction.factor is None else None
        self._half = half is not None
        self.dtype: torch.dtype = half if half is not None else arithmetic.accumulator(dtype, reduction.type)
        self.as_it_is: bool = self.dtype == dtype and reduction.factor is None
        # whether the tensors' own bytes travel, perhaps as another dtype
        same = REAL.get(dtype, dtype) == self.dtype or dtype in (torch.bool, torch.uint64)
        self._raw = same and reduction.factor is None
        kind = RedOpType.BOR if dtype == torch.bool and reduction.type is RedOpType.SUM else reduction.type
        self._pairwise = (_FLOATING if self.dtype.is_floating_point else _PAIRWISE)[kind]
        self.kernel: tuple[int, int, int] | None = None
        if self.dtype in DTYPES:
            divisor = size if self._divide else 0
            self.kernel = DTYPES.index(self.dtype), OPERATORS[kind], divisor
        # one sum of two halves needs no fp32 total: torch computes it in fp32 and rounds once
        rounds = size > 2 or self._divide
        self._wide = self._half and rounds and reduction.type not in _EXACT

    def contribution(self, tensor: Tensor) -> Tensor:
        """A rank's contribution, as a vector of ``dtype``; the tensor's own memory if possible."""
        if self.as_it_is:
            return arithmetic.resolved(tensor)
        if not self._half:
            return arithmetic.widen(tensor, self._reduction)
        return in_reals(arithmetic.resolved(tensor)).view(-1)  # complex32

    def target(self, output: Tensor) -> tuple[Tensor, Callable[[], object] | None]:
        """The vector of ``dtype`` for the combined values, and the function that then writes them to ``output``.

        If possible, the vector is the output's own memory, and there is no function.
        """
        if arithmetic.is_plain(output) and not output.is_inference():
            values = arithmetic.resolved(output)
            if not self.as_it_is:
                values = in_reals(values).view(-1)
                if values.dtype == torch.bool:
                    values = values.view(torch.uint8)
                if values.dtype == torch.uint64:
                    values = values.view(torch.int64)
            if values.dtype == self.dtype:
                return values, None
        landing = torch.empty(output.numel() * (2 if output.is_complex() else 1), dtype=self.dtype, device="cpu")
        # divided already, hence SUM
        return landing, lambda: arithmetic.narrow(landing, output, ReduceOp.SUM, self._size)

    def contributions(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A rank's contribution of several tensors, as plain tensors; their own memory if possible.

        Their dtype may differ from ``dtype``, because ``vectors.Scattered`` uses only their bytes.
        """
        if self._raw:
            # is_plain inlined: there may be hundreds of tensors
            return [
                t if t.is_contiguous() and not (t.is_neg() or t.is_conj()) else arithmetic.plain(t) for t in tensors
            ]
        return [self.contribution(tensor) for tensor in tensors]

    def targets(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Callable[[], object]]]:
        """``target`` for several outputs: plain tensors to be filled as bytes, and the functions to call then."""
        values, lands = [], []
        for output in outputs:
            if self._raw and arithmetic.is_plain(output):
                values.append(output)
                continue
            value, land = self.target(output)
            values.append(value)
            if land is not None:
                lands.append(land)
        return values, lands

    def combine(self, rows: Sequence[Tensor], out: Tensor) -> None:
        """Combine the ranks' parts, in rank order; ``out`` may be the first or the second part."""
        if out.numel() > SERIAL and torch.get_num_threads() > 1:
            for *parts, part in zip(*(torch.split(row, SERIAL) for row in (*rows, out)), strict=True):
                self._combine(parts, part)
        else:
            self._combine(rows, out)

    def _combine(self, rows: Sequence[Tensor], out: Tensor) -> None:
        if self._wide:
            self._combine_wide(rows, out)
            return
        pairwise: Any = self._pairwise
        if len(rows) == 1:
            out.copy_(rows[0])
        else:
            pairwise(rows[0], rows[1], out=out)
            for row in rows[2:]:
                pairwise(out, row, out=out)
        if self._divide:
            _divide(out, self._size)

    def _combine_wide(self, rows: Sequence[Tensor], out: Tensor) -> None:
        total = rows[0].to(torch.float32)
        pairwise: Any = self._pairwise
        for row in rows[1:]:
            pairwise(total, row, out=total)
        if self._divide:
            _divide(total, self._size)
        out.copy_(total)


def _divide(values: Tensor, size: int) -> None:
    if values.is_floating_point():
        values.div_(size)
    else:
        values.div_(size, rounding_mode="trunc")
