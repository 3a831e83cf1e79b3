"""Random arguments for every operation, all of them legal: what is placed in memory later is a Slot so far.

A drawing function gives the arguments that all ranks share, and each rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from .program import torch_dtype
from .reference import legal
from .values import COMPLEX, DTYPES, FLOAT8, FLOATS, INTS

THRESHOLDS = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes at which transports do something else
SMALL = (0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 8, 12, 16, 31, 33)
NO_COMPLEX_PAIR = 0.85  # of the calls on complex tensors


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that has no place yet. ``written``: it may be, so it must not overlap itself."""

    shape: tuple[int, ...]
    dtype: str
    written: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Arguments = tuple[dict[str, Any], list[dict[str, Any]]]


class Draw:
    """One operation's arguments in the making: ``size`` ranks, ``big`` how probable large tensors are."""

    def __init__(self, random: Random, size: int, big: float, dtypes: Sequence[str] = DTYPES) -> None:
        self.random, self.size, self._big, self._dtypes = random, size, big, dtypes
        self.dtype = self.any_dtype()
        self.pairs = False  #: some are complex, and some real

    def any_dtype(self) -> str:
        usual = self.random.random() < 0.5
        return self.random.choice(
            [name for name in ("float32", "int32", "float64") if name in self._dtypes] if usual else self._dtypes
        )

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def numel(self, dtype: str | None = None) -> int:
        """Elements of one rank's share, of the operation's dtype or another one."""
        if self.chance(self._big):
            exact = self.random.choice(THRESHOLDS) // torch_dtype(dtype or self.dtype).itemsize
            return max(1, exact // self.random.choice((1, self.size)) + self.random.choice((-1, 0, 0, 1)))
        return self.random.choice(SMALL)

    def shape(self, numel: int) -> tuple[int, ...]:
        """Any of so many elements."""
        shape = [numel]
        if numel == 1 and self.chance(0.3):
            return ()
        divisors = [d for d in (2, 3, 4, 5, 7) if numel and numel % d == 0]
        if divisors and self.chance(0.4):
            first = self.random.choice(divisors)
            shape = [first, numel // first]
        if self.chance(0.1):
            shape.insert(self.random.randrange(len(shape) + 1), 1)
        return tuple(shape)

    def slot(self, numel: int, *, written: bool = False) -> Slot:
        return Slot(self.shape(numel), self.dtype, written)

    def root(self) -> int:
        return self.random.randrange(self.size)

    def maybe(self, value: Any) -> Any:
        return None if self.chance(0.25) else value

    def reduces(self) -> str:
        """Take a dtype that can be reduced; returns a reduction for it."""
        while not legal(self.dtype):
            self.dtype = self.any_dtype()
        return self.random.choice(legal(self.dtype))

    def factors(self, op: str) -> list[dict[str, Any]]:
        """Each rank's factor, if the reduction has one."""
        if op != "PREMUL_SUM":
            return [{} for _ in range(self.size)]
        kinds: Sequence[Any] = (1, 2, 3)
        if self.dtype in COMPLEX or self.dtype in (*FLOATS, *FLOAT8):
            kinds = (2, -1, 0.5, 3.0, 0.3)
        if self.dtype in COMPLEX and not self.pairs:
            kinds = (*kinds, 1j, 2 - 1j)
        if self.dtype in INTS and self.dtype.startswith("int"):
            kinds = (*kinds, -2)
        as_tensor = self.chance(0.2)
        return [{"factor": self.random.choice(kinds), "as_tensor": as_tensor} for _ in range(self.size)]

    def paired(self, ranks: list[dict[str, Any]], names: Sequence[str]) -> None:
        """Turn some complex arguments into real ones of pairs, alike on all ranks."""
        if self.dtype not in COMPLEX or self.chance(NO_COMPLEX_PAIR):
            return
        self.pairs = True
        name = self.random.choice(names)
        for arguments in ranks:
            if arguments.get(name) is not None:
                arguments[name] = _in_reals(arguments[name])

    def dim(self, shape: Sequence[int]) -> int:
        """A dimension, also counted from the end."""
        return self.random.randrange(-len(shape), len(shape))


def _in_reals(value: Any) -> Any:
    if isinstance(value, Slot):
        return replace(value, shape=(*value.shape, 2), dtype=COMPLEX[value.dtype])
    return [_in_reals(item) for item in value]


# -- of equal sizes ---------------------------------------------------------------------------------------------------


def _all_reduce(d: Draw) -> Arguments:
    op, m = d.reduces(), d.numel()
    ranks = d.factors(op)
    for arguments in ranks:
        out = d.slot(m, written=True) if d.chance(0.4) else None
        arguments["tensor"] = d.slot(m, written=out is None)
        if out is not None:
            arguments["out"] = out
    return {"op": op}, ranks


def _reduce(d: Draw) -> Arguments:
    common, ranks = _all_reduce(d)
    root = d.root()
    ranks[root]["tensor"] = replace(ranks[root]["tensor"], written="out" not in ranks[root])
    return {**common, "root": root}, ranks


def _broadcast(d: Draw) -> Arguments:
    root, m = d.root(), d.numel()
    return {"root": root}, [{"tensor": d.slot(m, written=i != root)} for i in range(d.size)]


def _all_gather(d: Draw) -> Arguments:
    counts = [d.numel()] * d.size
    if d.chance(0.3):
        counts = [d.random.choice(SMALL) for _ in counts]
    ranks: list[dict[str, Any]] = []
    for rank in range(d.size):
        outputs = [d.slot(count, written=True) for count in counts]
        ranks.append({"tensor_list": outputs, "tensor": d.slot(counts[rank])})
    if len(set(counts)) == 1 and d.chance(0.25):
        shape = d.shape(counts[0])
        ranks = [{"tensor_list": d.maybe(a["tensor_list"]), "tensor": Slot(shape, d.dtype)} for a in ranks]
        return {}, ranks
    d.paired(ranks, ("tensor_list", "tensor"))
    return {}, ranks


def _with(shape: Sequence[int], dim: int, extent: int) -> tuple[int, ...]:
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _single(d: Draw, *, output: bool) -> Arguments:
    """``output``: the larger one is; else the input is."""
    shape = d.shape(d.numel())
    dim = 0 if not shape or d.chance(0.6) else d.dim(shape)
    along = dim % len(shape) if shape else 0
    whole = _with(shape, along, shape[along] * d.size) if shape else (d.size,)
    if not output:
        shape = shape or (1,)
    large, small = ("output", "input") if output else ("input", "output")
    ranks: list[dict[str, Any]] = [
        {large: Slot(whole, d.dtype, output), small: Slot(shape, d.dtype, not output)} for _ in range(d.size)
    ]
    if dim == 0:
        for arguments in ranks:
            if d.chance(0.3):
                arguments["output"] = d.slot(arguments["output"].numel, written=True)
        d.paired(ranks, ("output", "input"))
    if not d.pairs:
        ranks = [{**arguments, "output": d.maybe(arguments["output"])} for arguments in ranks]
    return {"dim": dim} if dim or d.chance(0.1) else {}, ranks


def _all_gather_single(d: Draw) -> Arguments:
    return _single(d, output=True)


def _reduce_scatter_single(d: Draw) -> Arguments:
    op = d.reduces()
    common, ranks = _single(d, output=False)
    return {**common, "op": op}, _merge(ranks, d.factors(op))


def _merge(ranks: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**a, **b} for a, b in zip(ranks, others, strict=True)]


def _reduce_scatter(d: Draw) -> Arguments:
    op = d.reduces()
    counts = [d.numel()] * d.size
    if d.chance(0.3):
        counts = [d.random.choice(SMALL) for _ in counts]
    ranks: list[dict[str, Any]] = [
        {"output": d.slot(count, written=True), "input_list": [d.slot(each) for each in counts]} for count in counts
    ]
    d.paired(ranks, ("input_list", "output"))
    if not d.pairs:
        ranks = [{**arguments, "output": d.maybe(arguments["output"])} for arguments in ranks]
    return {"op": op}, _merge(ranks, d.factors(op))


def _scatter(d: Draw) -> Arguments:
    root, m = d.root(), d.numel()
    ranks: list[dict[str, Any]] = [{"output": d.slot(m, written=True), "input_list": None} for _ in range(d.size)]
    ranks[root]["input_list"] = [d.slot(m) for _ in range(d.size)]
    d.paired(ranks, ("output", "input_list"))
    return {"root": root}, ranks


def _gather(d: Draw) -> Arguments:
    root, m = d.root(), d.numel()
    ranks: list[dict[str, Any]] = [{"output_list": None, "input": d.slot(m)} for _ in range(d.size)]
    outputs = d.maybe([d.slot(m, written=True) for _ in range(d.size)])
    ranks[root]["output_list"] = outputs
    if outputs is not None:
        d.paired(ranks, ("output_list", "input"))
    return {"root": root}, ranks


def _gather_single(d: Draw) -> Arguments:
    root = d.root()
    shape = d.shape(d.numel())
    dim = d.dim(shape) if shape and d.chance(0.5) else 0
    along = dim % len(shape) if shape else 0
    whole = _with(shape, along, shape[along] * d.size) if shape else (d.size,)
    ranks: list[dict[str, Any]] = [{"output": None, "input": Slot(shape, d.dtype)} for _ in range(d.size)]
    ranks[root]["output"] = d.maybe(Slot(whole, d.dtype, True))
    return {"root": root, "dim": dim}, ranks


def _scatter_single(d: Draw) -> Arguments:
    root = d.root()
    shape = d.shape(d.numel()) or (1,)
    dim = d.dim(shape) if d.chance(0.5) else 0
    along = dim % len(shape)
    part = Slot(shape, d.dtype, True)
    ranks: list[dict[str, Any]] = [{"output": part, "input": None} for _ in range(d.size)]
    ranks[root] = {"output": d.maybe(part), "input": Slot(_with(shape, along, shape[along] * d.size), d.dtype)}
    return {"root": root, "dim": dim}, ranks


def _all_to_all(d: Draw) -> Arguments:
    if d.chance(0.25):  # new outputs, of any dtypes
        lists = [[Slot(d.shape(d.random.choice(SMALL)), d.any_dtype()) for _ in range(d.size)] for _ in range(d.size)]
        return {}, [{"output_list": None, "input_list": slots} for slots in lists]
    even = d.numel()
    counts = [[even if d.chance(0.5) else d.random.choice(SMALL) for _ in range(d.size)] for _ in range(d.size)]
    ranks: list[dict[str, Any]] = []
    for rank in range(d.size):
        outputs = [d.slot(counts[source][rank], written=True) for source in range(d.size)]
        ranks.append({"output_list": outputs, "input_list": [d.slot(count) for count in counts[rank]]})
    d.paired(ranks, ("output_list", "input_list"))
    return {}, ranks


def _all_to_all_single(d: Draw) -> Arguments:
    m = d.numel() * d.size
    ranks: list[dict[str, Any]] = [{"output": d.slot(m, written=True), "input": d.slot(m)} for _ in range(d.size)]
    d.paired(ranks, ("output", "input"))
    if not d.pairs:
        ranks = [{**a, "output": d.maybe(a["output"])} for a in ranks]
    return {}, ranks


def _barrier(d: Draw) -> Arguments:
    return {}, [{} for _ in range(d.size)]


SINGLE: dict[str, Callable[[Draw], Arguments]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "scatter": _scatter,
    "scatter_single": _scatter_single,
    "gather": _gather,
    "gather_single": _gather_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}
