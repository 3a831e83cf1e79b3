"""Layouts: for each tensor of a rank its name, global shape, dtype, and the part that this rank holds.

A part is a box: its offsets in the global tensor, and its sizes. A plain tensor is whole, unless the caller names its
part by :class:`Shard` or :class:`Region`. The part of a DTensor follows from its placements and its mesh.

Layouts are values without tensors. Ranks exchange them as JSON, and ``plan`` computes the transfers between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from asynccomm.backends.regions import Region as MemoryRegion
from asynccomm.backends.regions import disjoint, overlap, region
from asynccomm.comm.methods.state_dict import identity
from asynccomm.control.transport.schema import Message
from asynccomm.ops.dtypes import BY_NAME
from asynccomm.ops.validation import CommInfo, as_index, check_tensor
from asynccomm.ops.windows import check_shape

__all__ = ["Layout", "Overlap", "Region", "Rename", "Shard", "Slice", "State", "Weights", "collect"]

State: TypeAlias = nn.Module | Mapping[str, Tensor]
Rename: TypeAlias = Callable[[str], str | None]


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that is cut along one dimension into equal parts, as in tensor parallelism.

    Args:
        dim: counted from the end if negative.
        index: the number of this part, from 0.
        of: the number of parts.
    """

    dim: int
    index: int
    of: int

    def __post_init__(self) -> None:
        for field in ("dim", "index", "of"):
            number = as_index(getattr(self, field))
            if number is None:
                raise TypeError(f"{field} must be an integer, got {getattr(self, field)!r}")
            object.__setattr__(self, field, number)
        if not 0 <= self.index < self.of:
            raise ValueError(f"index must be in [0, {self.of}), got {self.index}")

    def place(self, name: str, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The global shape and the offsets of a local tensor of ``sizes``. Raises: ValueError."""
        if not -len(sizes) <= self.dim < len(sizes):
            raise ValueError(f"shards[{name!r}] must name a dimension of a tensor of {len(sizes)}, got {self.dim}")
        shape, offsets = list(sizes), [0] * len(sizes)
        shape[self.dim] *= self.of
        offsets[self.dim] = sizes[self.dim] * self.index
        return tuple(shape), tuple(offsets)


@final
@dataclass(frozen=True, slots=True)
class Region:
    """The part, as large as the local tensor, that begins at ``offsets`` of a global tensor of ``shape``."""

    shape: Sequence[int]
    offsets: Sequence[int]

    def __post_init__(self) -> None:
        for field in ("shape", "offsets"):
            object.__setattr__(self, field, check_shape(getattr(self, field), field))

    def place(self, name: str, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The global shape and the offsets of a local tensor of ``sizes``. Raises: ValueError."""
        shape, offsets = tuple(self.shape), tuple(self.offsets)
        fits = len(shape) == len(offsets) == len(sizes) and all(
            offset >= 0 and offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"shards[{name!r}] must contain a tensor of shape {tuple(sizes)}, got shape {shape}, offsets {offsets}"
            )
        return shape, offsets


@final
class Overlap(Message, frozen=True):
    """The place of a tensor in memory that it shares in part with others of its rank, such as views and their base."""

    first: str  #: the earliest tensor of the group: of those that overlap, each at least one other
    start: int  #: bytes from the first element of that tensor
    strides: tuple[int, ...]  #: in elements; 0 for dimensions of size 1
    conjugated: bool = False  #: lazily
    negated: bool = False  #: lazily


@final
class Slice(Message, frozen=True):
    """The part of one tensor that a rank holds."""

    shape: tuple[int, ...]  #: of the whole tensor
    dtype: str  #: as ``str(tensor.dtype)``
    offsets: tuple[int, ...]  #: of the part in the whole tensor
    sizes: tuple[int, ...]  #: of the part
    tied: str = ""  #: the name of an earlier tensor of this rank in the same memory; empty: none
    overlap: Overlap | None = None  #: None: the tensor shares memory with tied tensors alone

    def __post_init__(self) -> None:
        if self.dtype not in BY_NAME:
            raise ValueError(f"dtype must be one of torch's, got {self.dtype!r}")
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise ValueError(
                f"shape, offsets and sizes must have one length, got {self.shape}, {self.offsets}, {self.sizes}"
            )
        bounds = zip(self.offsets, self.sizes, self.shape, strict=True)
        if not all(
            offset >= 0 and size >= 0 and (not size or offset + size <= whole) for offset, size, whole in bounds
        ):
            raise ValueError(f"the part must lie in the tensor, got {self.shape}, {self.offsets}, {self.sizes}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return BY_NAME[self.dtype]


Layout: TypeAlias = dict[str, Slice]


@final
@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a rank under their shared names, and their layout."""

    layout: Layout
    tensors: dict[str, Tensor]  #: the local parts, detached, in the memory of the state
    owners: dict[str, Tensor]  #: parameters and buffers of a module, which may get other memory


def collect(
    state: object,
    group: CommInfo,
    *,
    shards: Mapping[str, Shard | Region] | None = None,
    rename: Rename | None = None,
    written: bool = False,
) -> Weights:
    """The tensors in ``state``, with their layout.

    Args:
        state: a module, for all parameters and buffers in its ``state_dict()``, or a mapping of names to tensors.
        group: the device of the tensors.
        shards: the parts of plain tensors that are not whole, by names in ``state``.
        rename: gives the name that trainers and servers share, for a name in ``state``; None drops the tensor.
        written: whether the tensors are to be written.

    Raises: TypeError, ValueError naming the tensor.
    """
    entries = _entries(state)
    parts = {} if shards is None else shards
    if not isinstance(parts, Mapping):
        raise TypeError(f"shards must be a mapping of names to Shard or Region, got {shards!r}")
    if unknown := [name for name in parts if name not in entries]:
        raise ValueError(f"shards must have names of tensors in state, got {unknown}")
    for own, part in parts.items():
        if not isinstance(part, (Shard, Region)):
            raise TypeError(f"shards[{own!r}] must be a Shard or Region, got {part!r}")
    if rename is not None and not callable(rename):
        raise TypeError(f"rename must be a function of a name, got {rename!r}")
    members = [*state.parameters(), *state.buffers()] if isinstance(state, nn.Module) else []
    movable = {id(tensor) for tensor in members}
    found = Weights({}, {}, {})
    seen: dict[object, str] = {}
    for own, value in entries.items():
        name = own if rename is None else rename(own)
        if name is None:
            continue
        if not isinstance(name, str):
            raise TypeError(f"rename must return a str or None, got {name!r} for {own!r}")
        if name in found.layout:
            raise ValueError(f"rename must give each tensor another name, got {name!r} a second time, for {own!r}")
        if isinstance(value, Tensor) and is_lazy(value):
            raise ValueError(f"state[{own!r}] has no values yet: run the module once before")
        local, shape, offsets = _place(own, value, parts.get(own))
        check_tensor(group, "state", local, written=written, key=own)
        key = identity(local), shape, offsets
        tied = seen.setdefault(key, name)
        found.layout[name] = Slice(shape, str(local.dtype), offsets, tuple(local.shape), "" if tied == name else tied)
        found.tensors[name] = local
        if id(value) in movable:
            found.owners[name] = value
    _note_overlaps(found.layout, found.tensors)
    return found


def _note_overlaps(layout: Layout, tensors: Mapping[str, Tensor]) -> None:
    """Set ``overlap`` of the tensors that share memory with others, apart from tied ones."""
    memory = {name: region(tensors[name]) for name, part in layout.items() if not part.tied and tensors[name].numel()}
    if disjoint((), list(memory.values())):
        return
    groups = {name: {name} for name in memory}
    answers: dict[object, bool] = {}  # of ``overlap``, which columns of one matrix ask with few different arguments
    near: list[tuple[MemoryRegion, str]] = []  # the tensors that reach into the memory of the next one
    for name, here in sorted(memory.items(), key=lambda item: item[1]):
        near = [(there, other) for there, other in near if there[1] > here[0]]
        for there, other in near:
            if groups[name] is groups[other]:
                continue
            case = there[0] - here[0], there[1] - here[0], there[2], here[1] - here[0], here[2]
            if (shared := answers.get(case)) is None:
                shared = answers[case] = overlap(here, there)
            if shared:
                smaller, larger = sorted((groups[name], groups[other]), key=len)
                larger |= smaller
                groups.update(dict.fromkeys(smaller, larger))
        near.append((here, name))
    leaders: dict[int, str] = {}
    for name, part in layout.items():
        group = groups.get(part.tied or name, ())
        if len(group) > 1:
            first, tensor = leaders.setdefault(id(group), name), tensors[name]
            start = tensor.data_ptr() - tensors[first].data_ptr()
            strides = tuple(stride if n > 1 else 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            place = Overlap(first, start, strides, tensor.is_conj(), tensor.is_neg())
            layout[name] = msgspec.structs.replace(part, overlap=place)


def _entries(state: object) -> Mapping[Any, Any]:
    if isinstance(state, nn.Module):
        return state.state_dict(keep_vars=True)
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a torch.nn.Module or a mapping of names to tensors, got {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"state must have strings for names, got {name!r}")
        if not isinstance(value, Tensor):
            raise TypeError(f"state[{name!r}] must be a torch.Tensor, got {type(value).__name__}")
    return state


def _place(name: str, value: Tensor, part: Shard | Region | None) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """The local part of a tensor, the global shape, and the offsets of the part."""
    if not isinstance(value, Tensor):
        raise TypeError(f"state[{name!r}] must be a torch.Tensor, got {type(value).__name__}")
    if is_dtensor(value):
        if part is not None:
            raise ValueError(f"shards must not have {name!r}: the part of a DTensor follows from its placements")
        return _place_dtensor(name, value)
    local = value.detach()
    sizes = tuple(local.shape)
    if part is None:
        return local, sizes, (0,) * len(sizes)
    return local, *part.place(name, sizes)


def is_dtensor(value: Tensor) -> bool:
    """Whether ``value`` is a DTensor. torch's package of DTensor is not imported: without it there are none."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def _place_dtensor(name: str, value: Any) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    # no public function of torch gives the offsets; those of its checkpoints call this one
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415  # slow import

    if any(placement.is_partial() for placement in value.placements):
        raise ValueError(
            f"state[{name!r}] must hold values, but its placements {value.placements} hold sums to be made"
        )
    local, shape = value.detach().to_local(), tuple(value.shape)
    sizes, offsets = compute_local_shape_and_global_offset(shape, value.device_mesh, value.placements)
    if not offsets and shape:  # this rank is not in the mesh
        return local.new_empty((0,) * len(shape)), shape, (0,) * len(shape)
    if tuple(local.shape) != tuple(sizes):
        raise ValueError(
            f"state[{name!r}] has a local tensor of shape {tuple(local.shape)}, its placements give {sizes}"
        )
    return local, shape, tuple(offsets)
