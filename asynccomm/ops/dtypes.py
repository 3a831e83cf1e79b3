"""Facts about torch's dtypes: names, codes that are equal in every process, and the real types of complex ones."""

from __future__ import annotations

import re
import zlib
from typing import Final

import torch
from torch import Tensor

BY_NAME: Final = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
CODES: Final = {dtype: zlib.crc32(name.encode()) for name, dtype in BY_NAME.items()}  #: 32-bit codes
BY_CODE: Final = {code: dtype for dtype, code in CODES.items()}
REAL: Final = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
#: integers of less than a byte and quantized numbers; torch does not copy plain tensors of them
UNCOPIED: Final = frozenset(dtype for name, dtype in BY_NAME.items() if re.match(r"torch\.(u?int[1-7]$|q)", name))
#: real floating-point dtypes that torch computes in, or converts to float32 to compute
FLOATS: Final = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
)
COMPLEX: Final = {real: pair for pair, real in REAL.items()}


def in_reals(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs along one more dimension, without autograd, in the same memory; others unchanged.

    A lazily conjugated tensor has no such pairs in memory; the caller resolves it first.
    """
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
