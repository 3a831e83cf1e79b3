"""The tensors of a module's state by name, for its broadcast from one rank to all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from asynccomm.comm.methods.base import wrong_kind
from asynccomm.errors import PayloadError
from asynccomm.ops.parcels import MAX_HEAD
from asynccomm.ops.validation import CommInfo, check_tensor
from asynccomm.serialization.objects import PayloadKind, kind_of, pack_value, reading, unpack_value
from asynccomm.serialization.plain import CODES, DTYPES

_USUAL = (Tensor, torch.nn.Parameter)
SEVERAL = 4  # names that an error lists for each difference


@final
class StateReceiver:
    """The tensors of one state by name; on receiving ranks the ``place`` of the operation."""

    def __init__(self, group: CommInfo, state: object, *, written: bool) -> None:
        self.names: list[str] = []
        self.numbers: list[int] = []  #: the index in ``tensors`` of each name
        self.tensors: list[Tensor] = []  #: each distinct tensor once
        self._rank = group.rank
        seen: dict[object, int] = {}
        by_address: dict[int, int] = {}  # the address alone distinguishes most tensors
        for name, tensor in _entries(state).items():
            if not isinstance(name, str):
                raise TypeError(f"state must have strings for names, got {name!r}")
            if type(tensor) not in _USUAL and is_lazy(tensor):
                raise ValueError(f"state[{name!r}] has no values yet: run the module once before")
            check_tensor(group, "state", tensor, written=written, key=name)
            if tensor.dtype not in CODES:
                raise ValueError(f"state[{name!r}] has dtype {tensor.dtype}, which cannot be sent")
            number = len(self.tensors)
            first = by_address.setdefault(tensor.data_ptr(), number)
            if first != number:
                seen.setdefault(identity(self.tensors[first]), first)
                number = seen.setdefault(identity(tensor), number)
            if number == len(self.tensors):
                self.tensors.append(tensor.detach())
            self.names.append(name)
            self.numbers.append(number)
        if written and isinstance(state, torch.nn.Module):
            check_copies(
                {name: self.tensors[n] for name, n in zip(self.names, self.numbers, strict=True)}, _entries(state)
            )
        metas = [(CODES[tensor.dtype], tuple(tensor.shape)) for tensor in self.tensors]
        self.head: bytes = pack_value(
            PayloadKind.STATE, (self.names, self.numbers, metas)
        )  #: the description sent beside the values
        if len(self.head) > MAX_HEAD:
            raise ValueError(f"state has too many names to be sent: {len(self.names)}")

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        if head == self.head:  # the usual case
            return self.tensors
        if (kind := kind_of(source, head)) is not PayloadKind.STATE:
            raise wrong_kind("broadcast_state", self._rank, source, kind)
        with reading(source):
            names, numbers, metas = _checked(unpack_value(source, head))
            problems = self._problems(source, names, numbers, metas)
            if problems:
                raise PayloadError(f"the state of rank {source} does not fit that of rank {self._rank}: {problems}")
            mine = dict(zip(self.names, self.numbers, strict=True))
            places = {number: self.tensors[mine[name]] for name, number in zip(names, numbers, strict=True)}
            return [places[number] for number in range(len(metas))]

    def _problems(
        self, source: int, names: list[str], numbers: list[int], metas: list[tuple[torch.dtype, tuple[int, ...]]]
    ) -> str:
        mine = dict(zip(self.names, self.numbers, strict=True))
        theirs = dict(zip(names, numbers, strict=True))
        shapes, dtypes, tied = [], [], []
        pairs: dict[int, int] = {}  # the number of the tensor here, by its number there; ``back`` is the inverse
        back: dict[int, int] = {}
        for name in names:
            if name not in mine:
                continue
            tensor, (dtype, shape) = self.tensors[mine[name]], metas[theirs[name]]
            if tensor.shape != shape:
                shapes.append(f"{name} ({shape}, here {tuple(tensor.shape)})")
            if tensor.dtype != dtype:
                dtypes.append(f"{name} ({dtype}, here {tensor.dtype})")
            if (
                pairs.setdefault(theirs[name], mine[name]) != mine[name]
                or back.setdefault(mine[name], theirs[name]) != theirs[name]
            ):
                tied.append(name)
        found = {
            "missing there": [name for name in self.names if name not in theirs],
            "missing here": [name for name in names if name not in mine],
            "other shapes": shapes,
            "other dtypes": dtypes,
            "tied to others on one of them only": tied,
        }
        return "; ".join([f"{what}: {_several(items)}" for what, items in found.items() if items])


def _entries(state: object) -> Mapping[Any, Any]:
    if isinstance(state, torch.nn.Module):
        return state.state_dict(keep_vars=True)  # each tensor is detached once, by ``StateReceiver``
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a torch.nn.Module or a mapping of names to tensors, got {type(state).__name__}")
    return state


def check_copies(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Compare two readings of a state that is to be written, both alive.

    Raises: ValueError if it gives copies, which a module with an unusual ``state_dict`` does: the values would be lost.
    """
    copies = [name for name, tensor in first.items() if tensor.numel() and tensor.data_ptr() != second[name].data_ptr()]
    if copies:
        raise ValueError(f"state must give its tensors themselves, but gives new copies of these: {copies}")


def identity(tensor: Tensor) -> object:
    """A value that is equal for two views of the same elements, and for no other tensors."""
    if not tensor.numel():
        return object()  # an empty tensor shares no memory
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _checked(value: Any) -> tuple[list[str], list[int], list[tuple[torch.dtype, tuple[int, ...]]]]:
    """The contents of a head, as :attr:`StateReceiver.head` has them. Raises any exception for another structure."""
    names, numbers, metas = value
    if not all(type(name) is str for name in names) or len(set(names)) != len(names) or len(numbers) != len(names):
        raise ValueError("its names are wrong")
    if not all(type(number) is int for number in numbers) or {*numbers} != {*range(len(metas))}:
        raise ValueError("its numbers are wrong")
    for code, shape in metas:
        if type(code) is not int or code < 0 or type(shape) is not tuple:
            raise ValueError("its shapes are wrong")
    return names, numbers, [(DTYPES[code], shape) for code, shape in metas]


def _several(items: Sequence[str]) -> str:
    return ", ".join(items[:SEVERAL]) + (f" and {len(items) - SEVERAL} more" if len(items) > SEVERAL else "")
