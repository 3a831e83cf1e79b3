"""Plans: which trainer sends which part of which tensor to one server. A function of layouts, without I/O.

Guarantees: every element of every tensor of the server is sent exactly once, by a trainer that holds the element. Tied
tensors of the server are sent once. Elements that several trainers hold are sent by the trainer that has the fewest
bytes to send so far; the largest tensors are given away first. Servers of equal layouts get equal plans. Tensors of the
server that overlap in part are each sent, and fit only trainers with tensors that overlap in the same way: others could
have two values for one element of the server.

Trainers and server compute the same plan from the same layouts, so plans never travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, final

import torch

from asynccomm.weights.errors import LayoutError
from asynccomm.weights.layout import Layout, Slice

__all__ = ["Box", "Plan", "BoxTransfer", "intersection", "plan", "remainder"]

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@final
class BoxTransfer(NamedTuple):
    """A box of one tensor that one trainer sends to the server."""

    source: str  #: the name of the tensor at the trainer
    name: str  #: the name of the tensor at the server
    dtype: torch.dtype  #: of the server, in which the box is sent
    offsets: tuple[int, ...]  #: in the whole tensor
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


Plan: TypeAlias = list[list[BoxTransfer]]  # by trainer, in the order of the server's layout


def plan(trainers: Sequence[Layout], server: Layout, label: str = "", *, strict: bool = True) -> Plan:
    """The transfers that fill a server.

    Args:
        trainers: the layout of each trainer.
        server: the server's layout.
        label: the server's name, for errors.
        strict: whether a tensor of the trainers that the server does not have is an error.

    Raises: LayoutError with all differences.
    """
    sources, problems = _match(trainers, server, strict)
    order = sorted(sources, key=lambda name: (-_nbytes(server[name]), name))
    loads = [0] * len(trainers)
    found: dict[str, list[tuple[int, BoxTransfer]]] = {}
    for name in order:
        target, source = server[name], sources[name]
        remaining: list[Box] = [(target.offsets, target.sizes)] if math.prod(target.sizes) else []
        found[name] = []
        holders = [rank for rank, layout in enumerate(trainers) if source in layout]
        for rank in sorted(holders, key=lambda rank: (loads[rank], rank)):
            if not remaining:
                break
            held = trainers[rank][source]
            left: list[Box] = []
            for box in remaining:
                shared = intersection(box, (held.offsets, held.sizes))
                if shared is None:
                    left.append(box)
                    continue
                transfer = BoxTransfer(source, name, target.torch_dtype, *shared)
                found[name].append((rank, transfer))
                loads[rank] += transfer.nbytes
                left.extend(remainder(box, shared))
            remaining = left
        if remaining:
            offsets, sizes = remaining[0]
            problems.setdefault("in part held by no trainer", []).append(f"{name} (from {offsets}, sizes {sizes})")
    if problems:
        raise LayoutError(label, problems)
    plans: Plan = [[] for _ in trainers]
    for name in server:
        for rank, transfer in found.get(name, ()):
            plans[rank].append(transfer)
    return plans


def intersection(a: Box, b: Box) -> Box | None:
    """The elements that two boxes have in common; None: no element."""
    starts = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def remainder(box: Box, part: Box) -> Iterator[Box]:
    """The elements of ``box`` outside of ``part``, which lies in it, as boxes without common elements."""
    offsets, sizes = list(box[0]), list(box[1])
    for dim, (start, size) in enumerate(zip(*part, strict=True)):
        for first, last in ((offsets[dim], start), (start + size, offsets[dim] + sizes[dim])):
            if first < last:
                cut, length = offsets.copy(), sizes.copy()
                cut[dim], length[dim] = first, last - first
                yield tuple(cut), tuple(length)
        offsets[dim], sizes[dim] = start, size


def _nbytes(part: Slice) -> int:
    return math.prod(part.sizes) * part.torch_dtype.itemsize


def _match(trainers: Sequence[Layout], server: Layout, strict: bool) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The trainers' name for each tensor of the server that has memory of its own; and the differences."""
    problems: dict[str, list[str]] = {}
    offered: dict[str, Slice] = {}
    for layout in trainers:
        for name, part in layout.items():
            first = offered.setdefault(name, part)
            if (first.shape, first.dtype) != (part.shape, part.dtype):
                problems.setdefault("different among the trainers", []).append(name)
    groups: dict[str, list[str]] = {}
    for name, part in server.items():
        groups.setdefault(part.tied or name, []).append(name)
    sources = {}
    for first_name, names in groups.items():
        there = [name for name in names if name in offered]
        if not there:
            problems.setdefault("missing at the trainers", []).append(first_name)
            continue
        if not _tied(trainers, there):
            problems.setdefault("tied at the server only", []).append(" = ".join(there))
        if _fits(first_name, server[first_name], offered[there[0]], problems):
            sources[first_name] = there[0]
    overlapping: dict[str, list[str]] = {}
    for name in sources:
        if (place := server[name].overlap) is not None:
            overlapping.setdefault(place.first, []).append(name)
    for names in overlapping.values():
        if not _overlap_alike(trainers, [sources[name] for name in names], [server[name] for name in names]):
            problems.setdefault("overlapping at the server, and not so at the trainers", []).append(" and ".join(names))
    if strict and (extra := [name for name in offered if name not in server]):
        problems["missing at the server"] = extra
    return sources, problems


def _tied(trainers: Sequence[Layout], names: Sequence[str]) -> bool:
    """Whether the tensors ``names`` are one tensor on all trainers, as far as they hold elements."""
    for layout in trainers:
        held = [(name, layout[name]) for name in names if name in layout]
        memories = {part.tied or name for name, part in held if math.prod(part.sizes)}
        if len(memories) > 1:
            return False
    return True


def _overlap_alike(trainers: Sequence[Layout], names: Sequence[str], here: Sequence[Slice]) -> bool:
    """Whether the tensors ``names`` of all trainers, as far as they hold elements, overlap as those of the server."""
    for layout in trainers:
        there = [layout[name] for name in names if name in layout]
        if any(math.prod(part.sizes) for part in there) and _relation(there) != _relation(here):
            return False
    return True


def _relation(parts: Sequence[Slice]) -> list[object]:
    """A value that is equal for tensors that overlap each other in the same way, also in another dtype."""
    mixed = len({part.dtype for part in parts}) > 1  # then their bytes have to be the same, else their elements
    first = parts[0].overlap
    found: list[object] = []
    for part in parts:
        place = part.overlap
        if place is None or first is None or place.first != first.first:
            found.append(None)
            continue
        form = part.offsets, part.sizes, place.strides, place.conjugated, place.negated, mixed and part.dtype
        found.append(((place.start - first.start) / part.torch_dtype.itemsize, form))
    return found


def _fits(name: str, here: Slice, there: Slice, problems: dict[str, list[str]]) -> bool:
    """Whether shape and dtype of a tensor fit; else the difference is added to ``problems``."""
    if here.shape != there.shape:
        problems.setdefault("other shapes", []).append(f"{name} ({here.shape}, at the trainers {there.shape})")
        return False
    if here.dtype != there.dtype and not _converts(there.torch_dtype, here.torch_dtype):
        problems.setdefault("other dtypes", []).append(f"{name} ({here.dtype}, at the trainers {there.dtype})")
        return False
    return True


def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether values may be converted. Formats of one byte need scales, which a copy does not have."""
    return (source.is_floating_point and target.is_floating_point and source.itemsize > 1 and target.itemsize > 1) or (
        source.is_complex and target.is_complex
    )
