"""The ways to combine tensors: eight plain reductions and PREMUL_SUM(factor).

This module alone decides which reductions are legal for which dtypes:

| dtype        | SUM AVG | PRODUCT MIN MAX | BAND BOR BXOR | PREMUL_SUM |
|--------------|---------|-----------------|---------------|------------|
| float, half  | yes     | yes             | no            | yes        |
| int          | yes     | yes             | yes           | int factor |
| uint64       | SUM     | PRODUCT         | yes           | int factor |
| bool         | SUM     | yes             | yes           | no         |
| complex      | yes     | no              | no            | yes        |
| float8       | yes     | yes             | no            | yes        |

AVG of integers truncates towards zero; that of int64 is wrong where the sum exceeds int64, and no other is. SUM of
bools is a logical or, as with ``torch.add``. Complex numbers have no order, and a product of their real views would be
garbage. Of the float8 types, only those that NCCL supports can be reduced, e4m3fn and e5m2; the others, and dtypes that
are not in the table, can only be moved (broadcast, gather, ...).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import torch
from torch import Tensor

from asynccomm.ops.dtypes import FLOATS, REAL

if TYPE_CHECKING:
    from torch.distributed import ReduceOp as TorchReduceOp


class RedOpType(enum.Enum):
    """The kind of a reduction. Compare by name with other systems: their numbers differ."""

    SUM = "SUM"
    AVG = "AVG"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"
    PREMUL_SUM = "PREMUL_SUM"

    # members are single; Enum's own hash is a Python function, run several times per call
    __hash__: Callable[[object], int] = object.__hash__  # type: ignore[assignment]


_INTEGERS: Final = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32}  # and uint64, in part
)
_BITWISE: Final = frozenset({RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR})
_LINEAR: Final = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM})


@final
class ReduceOp:
    """A way to combine the ranks' tensors; immutable. Use the class attributes or :meth:`PREMUL_SUM`.

    Args:
        type: the kind of reduction. ``RedOpType.PREMUL_SUM`` needs a factor; use ``ReduceOp.PREMUL_SUM`` for it.
    """

    __slots__ = ("_factor", "_type")

    SUM: ReduceOp
    AVG: ReduceOp
    PRODUCT: ReduceOp
    MIN: ReduceOp
    MAX: ReduceOp
    BAND: ReduceOp
    BOR: ReduceOp
    BXOR: ReduceOp

    def __init__(self, type: RedOpType) -> None:
        self._type = RedOpType(type)
        if self._type is RedOpType.PREMUL_SUM:
            raise ValueError("type PREMUL_SUM needs a factor: use ReduceOp.PREMUL_SUM(factor)")
        self._factor: float | complex | Tensor | None = None

    @staticmethod
    def PREMUL_SUM(factor: float | complex | Tensor) -> ReduceOp:
        """Sum after each rank has multiplied its own input by its own ``factor``.

        Args:
            factor: a number, or a tensor with one element (any device; read when the operation is called).

        Raises: TypeError, ValueError: another factor; also an integer that is neither an int64 nor a uint64.
        """
        if isinstance(factor, Tensor):
            if factor.numel() != 1:
                raise ValueError(f"factor must have one element, got shape {tuple(factor.shape)}")
            if factor.layout is not torch.strided or factor.is_quantized or factor.is_meta:
                raise ValueError(f"factor must be a plain, dense tensor with a value, got {factor!r}")
        elif isinstance(factor, bool) or not isinstance(factor, (int, float, complex)):
            raise TypeError(f"factor must be a number or a tensor with one element, got {factor!r}")
        elif isinstance(factor, int) and not -(1 << 63) <= factor < 1 << 64:
            raise ValueError(f"factor must be from -2**63 to 2**64 - 1 if it is an integer, got {factor}")
        op = ReduceOp(RedOpType.SUM)
        op._type, op._factor = RedOpType.PREMUL_SUM, factor
        return op

    @classmethod
    def of(cls, op: object) -> ReduceOp:
        """``op`` itself, or the same reduction if ``op`` is torch's: a member or an instance of its ReduceOp."""
        if type(op) is cls:
            return op
        if type(op).__module__.startswith("torch"):
            name = getattr(op, "name", None)
            if name is None:  # an instance of torch's ReduceOp holds its member in ``op``
                name = getattr(getattr(op, "op", None), "name", None)
                if name == "PREMUL_SUM":
                    return cls.PREMUL_SUM(_factor_of(op))
            if name in _PLAIN:
                return _PLAIN[name]
            if name == "PREMUL_SUM":
                return cls(RedOpType.PREMUL_SUM)  # raises: a factor is missing
        names = ", ".join(f"ReduceOp.{t.name}" for t in RedOpType) + "(factor)"  # PREMUL_SUM is the last
        raise TypeError(f"op must be one of {names}; got {op!r}")

    @property
    def type(self) -> RedOpType:
        """The kind of the reduction."""
        return self._type

    @property
    def factor(self) -> float | complex | Tensor | None:
        """The factor of PREMUL_SUM, else None."""
        return self._factor

    def snapshot(self) -> ReduceOp:
        """The same reduction with a copy of a factor that is a tensor: the caller cannot change it after the call."""
        factor = self._factor
        return ReduceOp.PREMUL_SUM(factor.detach().clone()) if isinstance(factor, Tensor) else self

    def check(self, dtype: torch.dtype) -> None:
        """Raise ``ValueError`` when tensors of ``dtype`` cannot be reduced this way."""
        kind = self._type
        if dtype in REAL:
            legal = kind in _LINEAR
        elif dtype in FLOATS:
            legal = kind not in _BITWISE
        elif dtype == torch.bool:
            legal = kind not in (RedOpType.AVG, RedOpType.PREMUL_SUM)
        elif dtype == torch.uint64:  # reduced as int64, which gives wrong results where the sign matters
            legal = kind not in (RedOpType.AVG, RedOpType.MIN, RedOpType.MAX)
        else:
            legal = dtype in _INTEGERS
        if not legal:
            raise ValueError(f"op {self} cannot reduce {dtype}")
        factor = self._factor
        if factor is None:
            return
        factor_is_complex = factor.is_complex() if isinstance(factor, Tensor) else isinstance(factor, complex)
        if factor_is_complex and not dtype.is_complex:
            raise ValueError(f"factor {factor!r} of PREMUL_SUM is complex, but the tensor is {dtype}")
        factor_is_float = factor.is_floating_point() if isinstance(factor, Tensor) else isinstance(factor, float)
        if factor_is_float and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"factor {factor!r} of PREMUL_SUM must be an integer for {dtype}")

    def __repr__(self) -> str:
        return self._type.name if self._factor is None else f"PREMUL_SUM({self._factor!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReduceOp):
            return NotImplemented
        return self._type is other._type and (self._factor is other._factor or bool(self._factor == other._factor))

    def __hash__(self) -> int:
        return hash(self._type)

    def __reduce__(self) -> tuple[object, ...]:
        if self._factor is None:
            return ReduceOp, (self._type,)
        return ReduceOp.PREMUL_SUM, (self._factor,)


#: the reductions that methods of a comm take: ours, and a member or an instance of torch's ReduceOp
if TYPE_CHECKING:
    ReduceOpLike: TypeAlias = ReduceOp | TorchReduceOp | TorchReduceOp.RedOpType
elif torch.distributed.is_available():  # no string: get_type_hints would look up its names in the modules of methods
    ReduceOpLike = ReduceOp | torch.distributed.ReduceOp | torch.distributed.ReduceOp.RedOpType
else:
    ReduceOpLike = ReduceOp


def _factor_of(op: Any) -> Any:
    """The factor of torch's PREMUL_SUM: an attribute since torch 2.15, only in the pickled state before."""
    try:
        return op.factor
    except AttributeError:
        return op.__getstate__()[1]


_PLAIN: Final = {kind.name: ReduceOp(kind) for kind in RedOpType if kind is not RedOpType.PREMUL_SUM}
for _name, _op in _PLAIN.items():
    setattr(ReduceOp, _name, _op)

CONSTANTS: Final = tuple(_PLAIN.values())  #: all reductions without a factor
