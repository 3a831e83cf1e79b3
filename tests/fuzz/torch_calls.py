"""Steps by torch's own functions: which of them torch has, and how they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import distributed as dist

from .legality import refusal, uses
from .program import Step, View

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
_GATHERS = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTERS = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
OPS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "reduce_scatter_single",
    "scatter",
    "gather",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)


def by_torch(step: Step) -> Step | None:
    """The step, of the whole world, as calls of torch's functions; None if they cannot do it."""
    members = range(len(step.group))
    if step.group != tuple(members):
        return None
    views = [use.view for member in members for use in uses(step, member)]
    if step.op not in OPS or "tag" in step.common or step.common.get("dim", 0) != 0:
        return None
    if not all(_plain(view) for view in views) or len({view.dtype for view in views}) > 1:
        return None
    if step.common.get("op", "SUM") not in _REDUCTIONS or any(refusal(step, member) for member in members):
        return None
    if not all(_has_outputs(step, member, own) for member, own in enumerate(step.ranks)):
        return None
    flat = step.op.endswith("_single")  # torch wants alike what has the same elements
    if any(len(view.shape) != 1 for view in views) if flat else len({view.shape for view in views}) > 1:
        return None
    return replace(step, issue="torch", scope=0)


def _plain(view: View) -> bool:
    step = 1
    for extent, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return view.dtype in DTYPES and bool(view.numel) and not view.conj and not view.neg


def _has_outputs(step: Step, member: int, own: Mapping[str, Any]) -> bool:
    """Whether everything is given that torch does not make itself."""
    root = step.common.get("root", member)
    needed = {"output", "tensor_list"} if step.op not in ("gather", "scatter") else {"output"}
    if step.op == "all_to_all" or (step.op == "gather" and member == root):
        needed.add("output_list")
    return "out" not in own and not any(own.get(name, step) is None for name in needed)


def right_in_gloo(step: Step) -> bool:
    """Whether torch's gloo does it as it should: it changes the others' tensors in reduce, and loses NaN."""
    return step.op != "reduce" and step.common.get("op") not in ("MIN", "MAX")


def torch_call(step: Step, member: int, given: dict[str, Any], group: Any = None) -> None:
    """Call it, and block until it is done."""
    root = step.group[given["root"]] if "root" in given else 0
    op = getattr(dist.ReduceOp, step.common["op"]) if "op" in step.common else None
    match step.op:
        case "all_reduce":
            dist.all_reduce(given["tensor"], op, group)
        case "broadcast":
            dist.broadcast(given["tensor"], root, group)
        case "reduce":
            dist.reduce(given["tensor"], root, op, group)
        case "all_gather":
            dist.all_gather(given["tensor_list"], given["tensor"], group)
        case "all_gather_single":
            _GATHERS(given["output"], given["input"], group)
        case "reduce_scatter_single":
            _SCATTERS(given["output"], given["input"], op, group)
        case "scatter":
            dist.scatter(given["output"], given["input_list"], root, group)
        case "gather":
            dist.gather(given["input"], given["output_list"], root, group)
        case "all_to_all":
            dist.all_to_all(given["output_list"], given["input_list"], group)
        case "all_to_all_single":
            dist.all_to_all_single(given["output"], given["input"], None, None, group)
        case "barrier":
            dist.barrier(group)
        case _:
            raise AssertionError(f"torch has no {step.op}")
