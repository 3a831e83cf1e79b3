"""Random arguments of the operations on uneven tensors, on lists, on messages and on objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .arguments import SINGLE, SMALL, Arguments, Draw, Slot
from .reference import legal
from .values import DTYPES


def _extents(d: Draw) -> list[int]:
    """Along a dimension, for each rank."""
    if d.chance(0.2):
        return [d.random.choice((0, 1, 2, 3, 5))] * d.size
    most = d.numel()
    return [max(0, most + d.random.randrange(-2, 3)) if d.chance(0.7) else d.random.randrange(4) for _ in range(d.size)]


def _rest(d: Draw) -> tuple[tuple[int, ...], int]:
    """The other dimensions, and where the one in question stands among them."""
    rest = d.random.choice(((), (), (), (2,), (3,), (1,), (2, 2), (0,)))
    return rest, d.random.randrange(len(rest) + 1)


def _at(rest: tuple[int, ...], dim: int, extent: int) -> tuple[int, ...]:
    return (*rest[:dim], extent, *rest[dim:])


def _numbered(d: Draw, rest: tuple[int, ...], dim: int) -> int:
    return dim - len(rest) - 1 if d.chance(0.3) else dim


def _all_gather_v(d: Draw) -> Arguments:
    rest, dim = _rest(d)
    sizes = _extents(d)
    given = d.chance(0.5)
    ranks: list[dict[str, Any]] = []
    for size in sizes:
        output = d.maybe(Slot(_at(rest, dim, sum(sizes)), d.dtype, True))
        ranks.append({"output": output, "input": Slot(_at(rest, dim, size), d.dtype)})
    return {"sizes": sizes if given else None, "dim": _numbered(d, rest, dim)}, ranks


def _reduce_scatter_v(d: Draw) -> Arguments:
    op = d.reduces()
    rest, dim = _rest(d)
    sizes = _extents(d)
    ranks = d.factors(op)
    for size, arguments in zip(sizes, ranks, strict=True):
        arguments["output"] = d.maybe(Slot(_at(rest, dim, size), d.dtype, True))
        arguments["input"] = Slot(_at(rest, dim, sum(sizes)), d.dtype)
    even = len(set(sizes)) == 1 and d.chance(0.5)
    return {"op": op, "sizes": None if even else sizes, "dim": _numbered(d, rest, dim)}, ranks


def _all_to_all_v_single(d: Draw) -> Arguments:
    rest, _ = _rest(d)
    exchanged = d.chance(0.5)
    sends = [_extents(d) for _ in range(d.size)]
    if d.chance(0.3):
        sends = [[rows[0]] * d.size for rows in sends] if exchanged else [[sends[0][0]] * d.size] * d.size
    ranks: list[dict[str, Any]] = []
    for rank in range(d.size):
        rows = sends[rank]
        receives = [each[rank] for each in sends]
        spare = [d.random.randrange(3) if d.chance(0.3) else 0 for _ in range(2)]
        equal = len(set(rows)) == 1 and not spare[0] and d.chance(0.5)
        output = d.maybe(Slot((sum(receives) + spare[1], *rest), d.dtype, True))
        own = {"output": output, "input": Slot((sum(rows) + spare[0], *rest), d.dtype)}
        sizes = {"output_split_sizes": None if exchanged else receives, "input_split_sizes": None if equal else rows}
        ranks.append({**own, **sizes})
    return {}, ranks


def _any_slots(d: Draw, count: int) -> list[Slot]:
    """Of any shapes and dtypes."""
    dtypes = [d.dtype if d.chance(0.5) else d.any_dtype() for _ in range(count)]
    return _list(d, dtypes)


def _written(d: Draw, like: Slot) -> Slot:
    return Slot(d.shape(like.numel), like.dtype, True)


def _gather_v(d: Draw) -> Arguments:
    root, inputs = d.root(), _any_slots(d, d.size)
    ranks: list[dict[str, Any]] = [{"output_list": None, "input": slot} for slot in inputs]
    ranks[root]["output_list"] = d.maybe([_written(d, slot) for slot in inputs])
    return {"root": root}, ranks


def _scatter_v(d: Draw) -> Arguments:
    root, inputs = d.root(), _any_slots(d, d.size)
    ranks: list[dict[str, Any]] = [{"output": d.maybe(_written(d, slot)), "input_list": None} for slot in inputs]
    ranks[root]["input_list"] = inputs
    return {"root": root}, ranks


# -- lists ------------------------------------------------------------------------------------------------------------


def _dtypes(d: Draw, op: str | None = None) -> list[str]:
    """Of the tensors of a list: mostly one."""
    count = d.random.choice((1, 2, 2, 3, 4))
    fit = [name for name in DTYPES if op is None or op in legal(name)]
    return [d.dtype if d.chance(0.8) else d.random.choice(fit) for _ in range(count)]


def _list(d: Draw, dtypes: list[str], *, written: bool = False) -> list[Slot]:
    return [Slot(d.shape(d.numel(dtype)), dtype, written) for dtype in dtypes]


def _plain_factors(d: Draw, op: str) -> list[dict[str, Any]]:
    """Factors that are legal for every dtype."""
    return [{"factor": d.random.choice((1, 2, 3))} if op == "PREMUL_SUM" else {} for _ in range(d.size)]


def _all_reduce_coalesced(d: Draw) -> Arguments:
    op = d.reduces()
    slots = _list(d, _dtypes(d, op), written=True)
    return {"op": op}, [{"tensors": slots, **factors} for factors in _plain_factors(d, op)]


def _broadcast_coalesced(d: Draw) -> Arguments:
    root, slots = d.root(), _list(d, _dtypes(d))
    written = [Slot(slot.shape, slot.dtype, True) for slot in slots]
    return {"root": root}, [{"tensors": slots if rank == root else written} for rank in range(d.size)]


def _all_gather_coalesced(d: Draw) -> Arguments:
    slots = _list(d, _dtypes(d))
    ranks: list[dict[str, Any]] = []
    for _ in range(d.size):
        lists = [[Slot(slot.shape, slot.dtype, True) for slot in slots] for _ in range(d.size)]
        ranks.append({"output_lists": d.maybe(lists), "tensors": slots})
    return {}, ranks


def _reduce_scatter_coalesced(d: Draw) -> Arguments:
    op = d.reduces()
    dtypes = _dtypes(d, op)
    shapes = [d.shape(d.numel(dtype)) or (1,) for dtype in dtypes]
    inputs = [Slot((s[0] * d.size, *s[1:]), dtype) for s, dtype in zip(shapes, dtypes, strict=True)]
    whole = d.chance(0.8)  # or an input whose first dimension cannot be divided
    ranks = _plain_factors(d, op)
    for arguments in ranks:
        arguments["inputs"] = inputs if whole else [Slot((1, *slot.shape), slot.dtype) for slot in inputs]
        outputs = [Slot(shape, dtype, True) for shape, dtype in zip(shapes, dtypes, strict=True)]
        arguments["outputs"] = d.maybe(outputs) if whole else outputs
    return {"op": op}, ranks


LARGE = 1 << 14  # elements: lists of tensors that are larger take the oracle minutes


def _v_coalesced(d: Draw, dtypes: list[str], sizes: list[int], *, gathers: bool) -> tuple[int, list[dict[str, Any]]]:
    if max(sizes) >= LARGE:
        dtypes = dtypes[:1]
    rests = [d.random.choice(((), (2,), (3,))) if max(sizes) < LARGE else () for _ in dtypes]
    dim = 0 if not all(rests) or d.chance(0.6) else 1
    ranks: list[dict[str, Any]] = []
    for size in sizes:
        small = [_at(rest, dim, size) for rest in rests]
        large = [_at(rest, dim, sum(sizes)) for rest in rests]
        inputs, outputs = (small, large) if gathers else (large, small)
        made = [Slot(shape, dtype, True) for shape, dtype in zip(outputs, dtypes, strict=True)]
        read = [Slot(shape, dtype) for shape, dtype in zip(inputs, dtypes, strict=True)]
        ranks.append({"outputs": d.maybe(made), "inputs": read})
    return dim, ranks


def _all_gather_v_coalesced(d: Draw) -> Arguments:
    sizes = _extents(d)
    dim, ranks = _v_coalesced(d, _dtypes(d), sizes, gathers=True)
    return {"sizes": sizes if d.chance(0.5) else None, "dim": dim}, ranks


def _reduce_scatter_v_coalesced(d: Draw) -> Arguments:
    op = d.reduces()
    sizes = _extents(d)
    dim, ranks = _v_coalesced(d, _dtypes(d, op), sizes, gathers=False)
    factors = _plain_factors(d, op)
    return {"op": op, "sizes": sizes, "dim": dim}, [{**a, **b} for a, b in zip(ranks, factors, strict=True)]


# -- objects ----------------------------------------------------------------------------------------------------------


def _object(d: Draw) -> Any:
    tensor = d.slot(d.random.choice(SMALL)) if d.chance(0.6) else None
    plain = d.random.choice((None, 7, -(1 << 70), 0.5, "text", [1, [2, None]], {"a": True}))
    return {"plain": plain, "tensor": tensor} if d.chance(0.7) else plain


def _objects(d: Draw) -> Arguments:
    return {}, [{"obj": _object(d)} for _ in range(d.size)]


def _rooted_objects(d: Draw) -> Arguments:
    return {"root": d.root()}, [{"obj": _object(d)} for _ in range(d.size)]


def _scatter_object_list(d: Draw) -> Arguments:
    root = d.root()
    ranks: list[dict[str, Any]] = [{"input_list": None} for _ in range(d.size)]
    ranks[root]["input_list"] = [_object(d) for _ in range(d.size)]
    return {"root": root}, ranks


def _broadcast_tensor_dict(d: Draw) -> Arguments:
    root = d.root()
    ranks: list[dict[str, Any]] = [{"tensor_dict": None} for _ in range(d.size)]
    tensors = {f"t{i}": slot for i, slot in enumerate(_any_slots(d, d.random.randrange(4)))}
    ranks[root]["tensor_dict"] = {**tensors, "nested": {"more": [_object(d)]}} if d.chance(0.5) else tensors
    return {"root": root}, ranks


MORE: dict[str, Callable[[Draw], Arguments]] = {
    "all_gather_v": _all_gather_v,
    "reduce_scatter_v": _reduce_scatter_v,
    "all_to_all_v_single": _all_to_all_v_single,
    "gather_v": _gather_v,
    "scatter_v": _scatter_v,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "broadcast_coalesced": _broadcast_coalesced,
    "all_gather_coalesced": _all_gather_coalesced,
    "reduce_scatter_coalesced": _reduce_scatter_coalesced,
    "all_gather_v_coalesced": _all_gather_v_coalesced,
    "reduce_scatter_v_coalesced": _reduce_scatter_v_coalesced,
}
OBJECTS: dict[str, Callable[[Draw], Arguments]] = {
    "all_gather_object": _objects,
    "gather_object": _rooted_objects,
    "broadcast_object": _rooted_objects,
    "scatter_object_list": _scatter_object_list,
    "broadcast_tensor_dict": _broadcast_tensor_dict,
}
ARGUMENTS = {**SINGLE, **MORE, **OBJECTS}


def message_slots(d: Draw) -> tuple[Slot, Slot]:
    """What is sent, and where it goes."""
    m = d.numel()
    d.pairs = False
    send, recv = d.slot(m), d.slot(m, written=True)
    ends = [{"send": send, "recv": recv}]
    d.paired(ends, ("send", "recv"))
    return ends[0]["send"], ends[0]["recv"]
