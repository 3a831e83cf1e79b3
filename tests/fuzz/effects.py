"""What each operation does, told in whole tensors: from what all ranks bring to what each of them gets, in order.

``read`` gives the elements of a view as a flat Value at the moment when the operation takes effect. An effect reads
everything, and only then says what is written: pairs of a target (a View, or Fresh for a tensor that is made) and a
Value, for each rank of the group, in the order of the output lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .program import Message, Step, View, torch_dtype
from .reference import FREE, Margin, reduced


@dataclass(frozen=True, slots=True)
class Value:
    """Elements, as bytes; ``margin`` where a reduction left some play. ``itemsize`` and ``reals`` are those of one."""

    data: Tensor
    itemsize: int
    reals: int = 1
    margin: Margin | None = None

    def __len__(self) -> int:
        return len(self.data) // self.itemsize

    def take(self, index: Tensor) -> Value:
        """The elements with these numbers."""
        data = self.data.view(-1, self.itemsize)[index].reshape(-1)
        margin = self.margin
        if margin is not None:
            reals = (index[:, None] * self.reals + torch.arange(self.reals)).reshape(-1)
            margin = margin.take(reals)
        return Value(data, self.itemsize, self.reals, margin)

    def part(self, start: int, count: int) -> Value:
        """``count`` elements from number ``start``."""
        return self.take(torch.arange(start, start + count))


@dataclass(frozen=True, slots=True)
class Fresh:
    """A tensor that the operation makes."""

    shape: tuple[int, ...]
    dtype: str


Target = View | Fresh
Read = Callable[[int, View], Value]  # of a rank in the group
Writes = list[tuple[Target, Value]]


@dataclass(slots=True)
class Effect:
    """For each rank of the group what is written, and which argument is the result (None: what was made, if anything).

    ``made``: the result is a list of what was made, and not the one tensor.
    """

    writes: list[Writes]
    results: list[str | None]
    made: bool = False
    objects: dict[int, Any] = field(default_factory=dict)  #: results that are Python objects, by rank


def joined(values: Sequence[Value]) -> Value:
    """One after the other."""
    if len(values) == 1:
        return values[0]
    first = values[0]
    data = torch.cat([value.data for value in values])
    if all(value.margin is None for value in values):
        return Value(data, first.itemsize, first.reals)
    margins = [_margin_of(value) for value in values]
    parts = [torch.cat([getattr(margin, name) for margin in margins]) for name in ("kind", "low", "high")]
    return Value(data, first.itemsize, first.reals, Margin(*parts))


def _margin_of(value: Value) -> Margin:
    if value.margin is not None:
        return value.margin
    nothing = torch.zeros(len(value) * value.reals, dtype=torch.float64)
    return Margin(nothing.to(torch.int64), nothing, nothing)


def tensor_of(value: Value, dtype: str) -> Tensor:
    return value.data.view(torch_dtype(dtype))


def value_of(tensor: Tensor, margin: Margin | None = None) -> Value:
    """Of a flat tensor that nothing else uses."""
    return Value(tensor.view(torch.uint8), tensor.itemsize, 2 if tensor.is_complex() else 1, margin)


def unknown(value: Value) -> Value:
    """The same, of which nothing is known."""
    nothing = torch.zeros(len(value) * value.reals, dtype=torch.float64)
    return Value(value.data, value.itemsize, value.reals, Margin(torch.full(nothing.shape, FREE), nothing, nothing))


# -- reductions -------------------------------------------------------------------------------------------------------


def _reduced(step: Step, values: Sequence[Value], dtype: str) -> Value:
    """``values`` of the ranks, which for complex and real ones together are of ``dtype``, the real one."""
    factors = [arguments.get("factor") for arguments in step.ranks]
    result, margin = reduced([tensor_of(value, dtype) for value in values], step.common["op"], factors)
    value = value_of(result, margin)
    return unknown(value) if any(_tainted(given) for given in values) else value


def _tainted(value: Value) -> bool:
    return value.margin is not None


def _all_reduce(step: Step, read: Read) -> Effect:
    tensors = [arguments["tensor"] for arguments in step.ranks]
    total = _reduced(step, [read(i, view) for i, view in enumerate(tensors)], tensors[0].dtype)
    targets = ["tensor" if arguments.get("out") is None else "out" for arguments in step.ranks]
    return Effect([[(a[name], total)] for a, name in zip(step.ranks, targets, strict=True)], list(targets))


def _reduce(step: Step, read: Read) -> Effect:
    effect = _all_reduce(step, read)
    root = step.common["root"]
    for rank in range(len(step.group)):
        if rank != root:
            effect.writes[rank], effect.results[rank] = [], None
    return effect


def _real(views: Sequence[View]) -> str:
    """The dtype of all of them, which is the real one if only some are complex."""
    names = sorted({view.dtype for view in views}, key=lambda name: name.startswith("complex"))
    return names[0]


def _reduce_scatter(step: Step, read: Read) -> Effect:
    lists = [arguments["input_list"] for arguments in step.ranks]
    effect = Effect([], [])
    given = [[read(i, view) for view in views] for i, views in enumerate(lists)]
    for i, arguments in enumerate(step.ranks):
        output = arguments.get("output")
        dtype = _real([*lists[0], *([] if output is None else [output])])
        total = _reduced(step, [values[i] for values in given], dtype)
        target = Fresh(lists[i][i].shape, lists[i][i].dtype) if output is None else output
        effect.writes.append([(target, total)])
        effect.results.append(None if output is None else "output")
    return effect


def _extents(step: Step, shape: Sequence[int], dim: int) -> list[int]:
    sizes = step.common.get("sizes")
    n = len(step.group)
    return list(sizes) if sizes is not None else [shape[dim] // n] * n


def _reduce_scatter_single(step: Step, read: Read) -> Effect:
    views = [arguments["input"] for arguments in step.ranks]
    outputs = [arguments.get("output") for arguments in step.ranks]
    dtype = _real([views[0], *[view for view in outputs if view is not None]])
    total = _reduced(step, [read(i, view) for i, view in enumerate(views)], dtype)
    effect = Effect([], [])
    for i, (view, output) in enumerate(zip(views, outputs, strict=True)):
        effect.writes.append([_share(step, view, output, total, i, view.dtype)])
        effect.results.append(None if output is None else "output")
    return effect


def _share(step: Step, view: View, output: View | None, total: Value, rank: int, dtype: str) -> tuple[Target, Value]:
    """Of a total over the shape of ``view`` what goes to one rank."""
    dim = step.common.get("dim", 0)
    if step.common.get("sizes") is None and (dim == 0 or not view.shape or dim % len(view.shape) == 0):
        count = len(total) // len(step.group)
        shape = (view.shape[0] // len(step.group), *view.shape[1:]) if view.shape else (1,)
        return output or Fresh(shape, dtype), total.part(rank * count, count)
    dim %= len(view.shape)
    extents = _extents(step, view.shape, dim)
    index = torch.arange(view.numel).view(view.shape).narrow(dim, sum(extents[:rank]), extents[rank])
    return output or Fresh(tuple(index.shape), dtype), total.take(index.reshape(-1))


# -- moves ------------------------------------------------------------------------------------------------------------


def _broadcast(step: Step, read: Read) -> Effect:
    root = step.common["root"]
    value = read(root, step.ranks[root]["tensor"])
    writes: list[Writes] = [[] if i == root else [(a["tensor"], value)] for i, a in enumerate(step.ranks)]
    return Effect(writes, ["tensor"] * len(step.group))


def _lists(step: Step, name: str, shapes: Callable[[int], list[Fresh]], values: Callable[[int], list[Value]]) -> Effect:
    """Outputs of a list for each rank, or new ones."""
    effect = Effect([], [], made=True)
    for i, arguments in enumerate(step.ranks):
        given = arguments.get(name)
        targets = shapes(i) if given is None else given
        effect.writes.append(list(zip(targets, values(i), strict=True)))
        effect.results.append(None if given is None else name)
    return effect


def _all_gather(step: Step, read: Read) -> Effect:
    views = [arguments["tensor"] for arguments in step.ranks]
    values = [read(i, view) for i, view in enumerate(views)]
    return _lists(
        step, "tensor_list", lambda i: [Fresh(views[i].shape, views[i].dtype)] * len(values), lambda i: values
    )


def _concatenated(step: Step, shapes: Sequence[tuple[int, ...]], values: Sequence[Value]) -> tuple[list[int], Value]:
    """Along the step's dim: the shape, and the elements. A scalar counts as a vector of one."""
    shapes = [shape or (1,) for shape in shapes]
    dim = step.common.get("dim", 0) % len(shapes[0])
    shape = list(shapes[0])
    shape[dim] = sum(each[dim] for each in shapes)
    whole = joined(values)
    if dim:
        starts = [sum(math.prod(s) for s in shapes[:i]) for i in range(len(shapes))]
        index = torch.cat(
            [torch.arange(math.prod(s)).view(s) + start for s, start in zip(shapes, starts, strict=True)], dim
        )
        whole = whole.take(index.reshape(-1))
    return shape, whole


def _all_gather_single(step: Step, read: Read) -> Effect:
    views = [arguments["input"] for arguments in step.ranks]
    shape, whole = _concatenated(step, [view.shape for view in views], [read(i, v) for i, v in enumerate(views)])
    effect = Effect([], [])
    for view, arguments in zip(views, step.ranks, strict=True):
        output = arguments.get("output")
        effect.writes.append([(output or Fresh(tuple(shape), view.dtype), whole)])
        effect.results.append(None if output is None else "output")
    return effect


def _gather_single(step: Step, read: Read) -> Effect:
    return _at_root(step, _all_gather_single(step, read))


def _at_root(step: Step, effect: Effect) -> Effect:
    for rank in range(len(step.group)):
        if rank != step.common["root"]:
            effect.writes[rank], effect.results[rank] = [], None
    return effect


def _gather(step: Step, read: Read) -> Effect:
    views = [arguments["input"] for arguments in step.ranks]
    values = [read(i, view) for i, view in enumerate(views)]
    shapes = [Fresh(view.shape, view.dtype) for view in views]
    if step.op == "gather":
        shapes = [shapes[step.common["root"]]] * len(views)
    return _at_root(step, _lists(step, "output_list", lambda i: shapes, lambda i: values))


def _scatter(step: Step, read: Read) -> Effect:
    root = step.common["root"]
    inputs = step.ranks[root]["input_list"]
    values = [read(root, view) for view in inputs]
    effect = Effect([], [])
    for arguments, view, value in zip(step.ranks, inputs, values, strict=True):
        output = arguments.get("output")
        effect.writes.append([(output or Fresh(view.shape, view.dtype), value)])
        effect.results.append(None if output is None else "output")
    return effect


def _scatter_single(step: Step, read: Read) -> Effect:
    root = step.common["root"]
    view = step.ranks[root]["input"]
    total = read(root, view)
    effect = Effect([], [])
    for rank, arguments in enumerate(step.ranks):
        output = arguments.get("output")
        effect.writes.append([_share(step, view, output, total, rank, view.dtype)])
        effect.results.append(None if output is None else "output")
    return effect


def _all_to_all(step: Step, read: Read) -> Effect:
    lists = [arguments["input_list"] for arguments in step.ranks]
    values = [[read(i, view) for view in views] for i, views in enumerate(lists)]
    return _lists(
        step,
        "output_list",
        lambda i: [Fresh(views[i].shape, views[i].dtype) for views in lists],
        lambda i: [given[i] for given in values],
    )


def _all_to_all_single(step: Step, read: Read) -> Effect:
    views = [arguments["input"] for arguments in step.ranks]
    values = [read(i, view) for i, view in enumerate(views)]
    n = len(views)
    effect = Effect([], [])
    for i, arguments in enumerate(step.ranks):
        parts = [value.part(i * (len(value) // n), len(value) // n) for value in values]
        output = arguments.get("output")
        effect.writes.append([(output or Fresh(views[i].shape, views[i].dtype), joined(parts))])
        effect.results.append(None if output is None else "output")
    return effect


def rows_for(arguments: Mapping[str, Any], n: int) -> list[int]:
    """The rows of a rank's input that go to each rank in all_to_all_v_single."""
    sizes = arguments.get("input_split_sizes")
    return list(sizes) if sizes is not None else [arguments["input"].shape[0] // n] * n


def _all_to_all_v_single(step: Step, read: Read) -> Effect:
    views = [arguments["input"] for arguments in step.ranks]
    values = [read(i, view) for i, view in enumerate(views)]
    n = len(views)
    effect = Effect([], [])
    for i, arguments in enumerate(step.ranks):
        parts, rows = [], 0
        for view, value, other in zip(views, values, step.ranks, strict=True):
            sends, row = rows_for(other, n), math.prod(view.shape[1:])
            parts.append(value.part(sum(sends[:i]) * row, sends[i] * row))
            rows += sends[i]
        output = arguments.get("output")
        shape = (rows, *views[i].shape[1:])
        target = Fresh(shape, views[i].dtype) if output is None else _rows(output, rows)
        effect.writes.append([(target, joined(parts))])
        effect.results.append(None if output is None else "output")
    return effect


def _rows(view: View, rows: int) -> View:
    """The first rows of a view."""
    return View(view.arena, view.offset, (rows, *view.shape[1:]), view.strides, view.dtype, view.conj, view.neg)


def messages(step: Step, read: Read) -> Effect:
    """What each receives: in order for each pair and tag, which is the order of the list."""
    values = [read(message.src, message.send) for message in step.messages]
    effect = Effect([[] for _ in step.group], [None] * len(step.group))
    for message, value in zip(step.messages, values, strict=True):
        effect.writes[message.dst].append((message.recv, value))
    return effect


def sent_by(step: Step, rank: int) -> list[tuple[str, Message]]:
    """What a rank of the group calls, in order."""
    calls = []
    for message in step.messages:
        calls += [("send", message)] if message.src == rank else []
        calls += [("recv", message)] if message.dst == rank else []
    return calls


EFFECTS: dict[str, Callable[[Step, Read], Effect]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_gather_v": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_v": _reduce_scatter_single,
    "scatter": _scatter,
    "scatter_v": _scatter,
    "scatter_single": _scatter_single,
    "gather": _gather,
    "gather_v": _gather,
    "gather_single": _gather_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_v_single": _all_to_all_v_single,
    "barrier": lambda step, read: Effect([[] for _ in step.group], [None] * len(step.group)),
    "messages": messages,
    "batch": messages,
}
