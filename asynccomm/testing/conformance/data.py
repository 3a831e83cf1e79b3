"""Test data that every rank can compute for every rank, references, and layouts that are hard on a transport."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import final

import torch
from torch import Tensor

from asynccomm.ops.reduce_op import RedOpType, ReduceOp

__all__ = [
    "COMPLEX",
    "DTYPES",
    "FLOAT8",
    "FLOATS",
    "REDUCTIONS",
    "SHAPES",
    "GuardedOutput",
    "chunks",
    "combinations",
    "everyones",
    "expect_all_equal",
    "expect_equal",
    "layouts",
    "negated",
    "reduced",
    "sample",
    "sentinel",
    "strided",
]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*FLOATS, *INTS, *COMPLEX, torch.complex32, torch.bool, *FLOAT8]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns once per process that its support of complex32 is incomplete
    torch.empty(1, dtype=torch.complex32)

_COMPARED = frozenset([*FLOATS, *COMPLEX])  # dtypes that torch.equal accepts
_SHOWN = 16  # elements of each tensor in an error
REDUCTIONS = [ReduceOp(kind) for kind in RedOpType if kind is not RedOpType.PREMUL_SUM]
SHAPES = [(), (1,), (0,), (5,), (3, 4), (2, 0, 3), (1031,)]


def sample(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    """The data of ``rank``: small whole numbers that depend on rank and position, exact in every dtype and sum."""
    shape = torch.Size(shape)
    count = shape.numel()
    pattern = _pattern((rank * 3 + salt * 11) % 7, dtype, torch.get_default_device())
    if count > len(pattern):
        pattern = pattern.view(torch.uint8).repeat(-(-count // len(pattern))).view(dtype)
    return pattern[:count].clone().view(shape)


@cache
def _pattern(start: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The repeating pattern of long samples."""
    index = torch.arange(49 * 40, dtype=torch.int64, device=device)
    values = (index * 5 + index // 7 + start) % 7 + 1  # 7 is prime: ranks 0 to 6 all differ
    if dtype == torch.bool:
        values = values % 2 == 0
    elif dtype in FLOAT8:
        values = values.clamp(max=4)  # products of four are exact
    elif dtype.is_complex:
        values = values.to(torch.complex64).mul(1 - 2j)
    return values.to(dtype)


def sentinel(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """An output whose elements equal no result."""
    if dtype == torch.bool:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.full(tuple(shape), 99, dtype=torch.float32).to(dtype)


def reduced(tensors: Sequence[Tensor], reduction: object) -> Tensor:
    """The expected result of reducing one tensor per rank, in the tensors' dtype, computed exactly.

    Args:
        reduction: a ReduceOp of asynccomm or of torch; all ranks must have the same factor of a PREMUL_SUM.
    """
    op = ReduceOp.of(reduction)
    dtype = tensors[0].dtype
    if dtype.is_complex:
        rows = torch.stack([t.to(torch.complex128) for t in tensors])
    elif dtype.is_floating_point:
        rows = torch.stack([t.to(torch.float64) for t in tensors])
    else:
        rows = torch.stack([t.to(torch.int64) for t in tensors])
    kind, size = op.type, len(tensors)
    if kind is RedOpType.SUM:
        result = rows.sum(0)
    elif op.factor is not None:
        result = rows.mul(op.factor).sum(0)
    elif kind is RedOpType.AVG:
        result = rows.sum(0) / size if rows.dtype != torch.int64 else rows.sum(0).div(size, rounding_mode="trunc")
    elif kind is RedOpType.PRODUCT:
        result = rows.prod(0)
    elif kind is RedOpType.MIN:
        result = rows.amin(0)
    elif kind is RedOpType.MAX:
        result = rows.amax(0)
    else:
        result = rows[0]
        for row in rows[1:]:
            result = {
                RedOpType.BAND: torch.bitwise_and,
                RedOpType.BOR: torch.bitwise_or,
                RedOpType.BXOR: torch.bitwise_xor,
            }[kind](result, row)
    return (result != 0) if dtype == torch.bool else result.to(dtype)


def layouts(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values in different memory layouts; each layout has its own memory."""
    yield "contiguous", tensor.clone()
    if tensor.dim() == 2:
        yield "transposed", tensor.t().clone(memory_format=torch.contiguous_format).t()
    if tensor.dim() >= 1:
        wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
        wide[..., 1] = tensor
        yield "strided", wide[..., 1]
        padded = torch.cat([torch.zeros(1, *tensor.shape[1:], dtype=tensor.dtype), tensor])
        yield "offset", padded[1:]
    if tensor.is_complex():
        yield "conjugated", tensor.conj().resolve_conj().conj()
    elif tensor.dtype in (torch.float32, torch.float64):
        yield "negated", negated(tensor)


def strided(tensor: Tensor) -> Tensor:
    """The same values with gaps between all elements, and with the first dimension innermost."""
    turned = tensor.movedim(0, -1) if tensor.dim() else tensor
    wide = torch.zeros(*turned.shape, 2, dtype=tensor.dtype)
    wide[..., 1] = turned
    return wide[..., 1].movedim(-1, 0) if tensor.dim() else wide[..., 1]


def negated(tensor: Tensor) -> Tensor:
    """The same values of a real tensor, as a view that negates the values in its memory."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


@final
class GuardedOutput:
    """An output in the middle of a larger tensor, which reveals writes beside the output.

    Args:
        shape, dtype: shape and dtype of the output.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        self._whole = sentinel([extent + 2 for extent in shape] or [2], dtype)
        self.output: Tensor = _middle(self._whole) if len(shape) else self._whole[0]  #: filled with sentinels

    def expect(self, expected: Tensor, what: str) -> None:
        """Check that the output holds ``expected``, and that the memory around it is unchanged."""
        expect_equal(self.output, expected, what)
        self.output.copy_(sentinel(self.output.shape, self.output.dtype))
        expect_equal(self._whole, sentinel(self._whole.shape, self._whole.dtype), f"{what}: memory beside the output")


def _middle(tensor: Tensor) -> Tensor:
    for dim in range(tensor.dim()):
        tensor = tensor.narrow(dim, 1, tensor.shape[dim] - 2)
    return tensor


def everyones(size: int, shape: Sequence[int], dtype: torch.dtype = torch.float32, salt: int = 0) -> list[Tensor]:
    """The samples of all ranks."""
    return [sample(rank, shape, dtype, salt) for rank in range(size)]


def chunks(tensor: Tensor, extents: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Consecutive parts of ``tensor`` with the given extents along ``dim``."""
    return list(torch.split(tensor, list(extents), dim))


def expect_equal(actual: Tensor, expected: Tensor, what: str) -> None:
    """Compare bit for bit, but floats with a tolerance of one rounding of the reference."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: got {actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
        )
    if actual.dtype in _COMPARED and torch.equal(actual, expected):
        return  # the usual case, much faster than the comparison below
    wide = torch.complex128 if actual.is_complex() else torch.float64 if actual.is_floating_point() else None
    a, b = (actual, expected) if wide is None else (actual.to(wide), expected.to(wide))
    if wide is None:
        wrong = _signed(a) != _signed(b)
    else:
        tolerance = torch.finfo(actual.dtype).eps
        wrong = ~torch.isclose(a, b, rtol=tolerance, atol=0, equal_nan=True)
    if wrong.any():
        places = wrong.flatten().nonzero()
        first = int(places[0])
        shown = slice(first, first + _SHOWN)
        raise AssertionError(
            f"{what}: {len(places)} of {wrong.numel()} elements differ; from flat index {first} on:"
            f"\n got      {actual.flatten()[shown].tolist()}\n expected {b.flatten()[shown].tolist()}"
        )


def expect_all_equal(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    """Compare two lists of tensors."""
    assert len(actual) == len(expected), f"{what}: got {len(actual)} tensors, expected {len(expected)}"
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        expect_equal(one, other, f"{what} [{i}]")


def _signed(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int64) if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) else tensor


def combinations(dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[tuple[torch.dtype, ReduceOp]]:
    """Every dtype with every reduction that is legal for the dtype."""
    for dtype, op in itertools.product(dtypes, REDUCTIONS):
        try:
            op.check(dtype)
        except ValueError:
            continue
        yield dtype, op
