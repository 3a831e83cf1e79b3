"""The numbers of the kernels of reductions in C (``_kernels.c``)."""

from __future__ import annotations

from typing import Final

import torch

from asynccomm.ops.reduce_op import RedOpType

# in the order of the enumerations of _kernels.h
DTYPES: Final = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
OPERATORS: Final = {
    RedOpType.SUM: 0,
    RedOpType.AVG: 0,
    RedOpType.PREMUL_SUM: 0,
    RedOpType.PRODUCT: 1,
    RedOpType.MIN: 2,
    RedOpType.MAX: 3,
    RedOpType.BAND: 4,
    RedOpType.BOR: 5,
    RedOpType.BXOR: 6,
}


def exact_kernel(dtype: torch.dtype, reduction: RedOpType) -> tuple[int, int] | None:
    """The numbers of a kernel with the bits of ``arithmetic.accumulate``, except for NaNs; None: there is none."""
    floating_order = dtype.is_floating_point and reduction in (RedOpType.MIN, RedOpType.MAX)  # signs of zeros
    if dtype not in DTYPES or floating_order:
        return None
    return DTYPES.index(dtype), OPERATORS[reduction]
