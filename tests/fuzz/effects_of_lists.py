"""What operations on lists do: with each of the list what the operation on one tensor does, all read before any write.
Also what operations on objects give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .effects import EFFECTS, Effect, Fresh, Read, Value
from .program import Step, View


def _each(step: Step, read: Read, op: str, names: dict[str, str]) -> list[Effect]:
    """The effects of ``op`` on each of the list; ``names`` of its arguments by those of the list's."""
    count = next(len(a[key]) for a in step.ranks for key in names if a.get(key) is not None)
    effects = []
    for i in range(count):
        ranks = []
        for arguments in step.ranks:
            single = {name: None if arguments.get(key) is None else arguments[key][i] for key, name in names.items()}
            ranks.append({**single, "factor": arguments.get("factor")})
        effects.append(EFFECTS[op](replace(step, op=op, ranks=tuple(ranks)), read))
    return effects


def _merged(step: Step, effects: list[Effect], name: str) -> Effect:
    merged = Effect([], [], made=True)
    for rank, arguments in enumerate(step.ranks):
        merged.writes.append([write for effect in effects for write in effect.writes[rank]])
        merged.results.append(None if arguments.get(name) is None else name)
    return merged


def _all_reduce(step: Step, read: Read) -> Effect:
    return _merged(step, _each(step, read, "all_reduce", {"tensors": "tensor"}), "tensors")


def _broadcast(step: Step, read: Read) -> Effect:
    return _merged(step, _each(step, read, "broadcast", {"tensors": "tensor"}), "tensors")


def _all_gather(step: Step, read: Read) -> Effect:
    values: list[list[Value]] = [[read(i, view) for view in a["tensors"]] for i, a in enumerate(step.ranks)]
    effect = Effect([], [], made=True)
    for arguments in step.ranks:
        lists = arguments.get("output_lists")
        made: list[list[View | Fresh]] = [[Fresh(v.shape, v.dtype) for v in arguments["tensors"]] for _ in step.ranks]
        pairs = [list(zip(targets, given, strict=True)) for targets, given in zip(lists or made, values, strict=True)]
        if lists is not None:  # the tensors are gathered as if one after the other
            pairs = [list(ranks) for ranks in zip(*pairs, strict=True)]
        effect.writes.append([pair for several in pairs for pair in several])
        effect.results.append(None if lists is None else "output_lists")
    return effect


def _singles(op: str) -> Callable[[Step, Read], Effect]:
    def effect(step: Step, read: Read) -> Effect:
        return _merged(step, _each(step, read, op, {"outputs": "output", "inputs": "input"}), "outputs")

    return effect


# -- objects ----------------------------------------------------------------------------------------------------------


def _objects(step: Step, read: Read) -> Effect:
    """Views in objects stand for themselves: whoever looks at a result knows whose they are."""
    everything: list[Any] = [a.get("obj") for a in step.ranks]
    root = step.common.get("root", 0)
    nothing: list[list[Any]] = [[] for _ in step.group]
    effect = Effect(nothing, [None] * len(step.group))
    for rank in range(len(step.group)):
        match step.op:
            case "all_gather_object":
                effect.objects[rank] = [_told(read, i, obj) for i, obj in enumerate(everything)]
            case "gather_object":
                gathered = [_told(read, i, obj) for i, obj in enumerate(everything)]
                effect.objects[rank] = gathered if rank == root else None
            case "broadcast_object" | "broadcast_tensor_dict" if rank == root:
                effect.results[rank] = "obj" if step.op == "broadcast_object" else "tensor_dict"
            case "broadcast_object":
                effect.objects[rank] = _told(read, root, everything[root])
            case "scatter_object_list":
                effect.objects[rank] = _told(read, root, step.ranks[root]["input_list"][rank])
            case "broadcast_tensor_dict":
                effect.objects[rank] = _told(read, root, step.ranks[root]["tensor_dict"])
    return effect


def _told(read: Read, rank: int, obj: Any) -> Any:
    """An object in which tensors are pairs of a Fresh and its Value."""
    if isinstance(obj, View):
        return Fresh(obj.shape, obj.dtype), read(rank, obj)
    if isinstance(obj, dict):
        return {key: _told(read, rank, item) for key, item in obj.items()}
    if isinstance(obj, list):
        return [_told(read, rank, item) for item in obj]
    return obj


OBJECTS = ("all_gather_object", "gather_object", "broadcast_object", "scatter_object_list", "broadcast_tensor_dict")

EFFECTS_OF_ALL: dict[str, Callable[[Step, Read], Effect]] = {
    **EFFECTS,
    "all_reduce_coalesced": _all_reduce,
    "broadcast_coalesced": _broadcast,
    "all_gather_coalesced": _all_gather,
    "reduce_scatter_coalesced": _singles("reduce_scatter_single"),
    "all_gather_v_coalesced": _singles("all_gather_v"),
    "reduce_scatter_v_coalesced": _singles("reduce_scatter_v"),
    **dict.fromkeys(OBJECTS, _objects),
}
