"""What is in an arena: content that follows from its description, the same in every process."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from .program import Arena, torch_dtype

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says once per process that its support of complex32 is incomplete
    torch.empty(1, dtype=torch.complex32)

FLOATS = ("float32", "float64", "float16", "bfloat16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
ONLY_MOVED = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
INTS = ("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
DTYPES = (*FLOATS, *INTS, *COMPLEX, "bool", *FLOAT8, *ONLY_MOVED)

FILLS = ("constant", "blocks", "position", "small", "special", "random")  # the simplest first

_SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0, 0.5, 3.0, 1e-40, -1e-45, 6e-8, 60000.0, 3e38, 1e-320]


def content(arena: Arena, rank: int) -> Tensor:
    """The elements of an arena of ``rank``."""
    dtype = torch_dtype(arena.dtype)
    real = torch_dtype(COMPLEX.get(arena.dtype, arena.dtype))
    numel = arena.numel * (2 if dtype.is_complex else 1)
    values = _values(arena.fill, numel, rank, arena.seed, real)
    return values.view(dtype) if dtype.is_complex else values


def _values(fill: str, numel: int, rank: int, seed: int, dtype: torch.dtype) -> Tensor:
    index = torch.arange(numel)
    if fill == "constant":
        whole = torch.full((numel,), rank + 1)
    elif fill == "blocks":
        whole = (index * 8 // max(1, numel) + 3 * rank + seed) % 7 + 1
    elif fill == "position":
        whole = (index * 5 + index // 7 + 3 * rank + 11 * seed) % 7 + 1
    else:
        random = torch.Generator().manual_seed(1009 * seed + rank)
        if fill == "special":
            return _special(numel, dtype, random)
        if fill == "random":
            return _random(numel, dtype, random)
        whole = torch.randint(-4, 5, (numel,), generator=random)
    if dtype == torch.bool:
        return whole % 2 == 0
    if not dtype.is_signed:
        whole = whole.abs()
    return whole.to(torch.float32).to(dtype) if dtype.is_floating_point else whole.to(dtype)


def _special(numel: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return _random(numel, dtype, random)
    if dtype.is_floating_point:
        choice = torch.tensor(_SPECIAL, dtype=torch.float64).to(dtype)
    else:
        bounds = torch.iinfo(dtype)
        choice = torch.tensor([bounds.min, bounds.max, bounds.min + 1, bounds.max - 1, 0, 1, 2], dtype=dtype)
    picked = torch.randint(0, len(choice), (numel,), generator=random)
    # not all the types can be indexed, but their bytes can
    return choice.view(torch.uint8).view(len(choice), dtype.itemsize)[picked].reshape(-1).view(dtype)


def _random(numel: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=random).to(torch.bool)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(numel, dtype=torch.float64, generator=random).to(dtype)
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=random).view(dtype)
