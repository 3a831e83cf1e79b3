"""Programs: what all ranks of one world do, as plain data that every process can build, print and change.

A rank's memory is some *arenas*, whose content follows from their description. Steps call methods of the Comm; their
tensors are *views* of arenas. Arguments that all ranks share are in ``common``, each rank's own in ``ranks``, both
under the names that the method has for them. What is not a View, a list or a dict there is passed on as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

ISSUES = ("await", "flight", "thread", "wait", "torch")


@dataclass(frozen=True, slots=True)
class Arena:
    """One storage of one rank.

    Args:
        fill: the kind of its content, see ``values.FILLS``; ``seed`` tells several of one kind apart.
    """

    dtype: str
    numel: int
    fill: str = "position"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in an arena; offset and strides count in elements of ``dtype``."""

    arena: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return torch_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def span(self) -> tuple[int, int]:
        """The first byte in the arena, and the one behind the last; equal if there is no element."""
        start = self.offset * self.itemsize
        if not self.numel:
            return start, start
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return start, start + extent * self.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """From one rank of the group to another; ``anyone``: the receiver does not name the sender."""

    src: int
    dst: int
    tag: int
    send: View
    recv: View
    anyone: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of the ranks ``group`` of the world, in the order that they have in its comm.

    Args:
        op: a method of the Comm; ``messages`` sends and receives, ``batch`` does so by ``batch_op_create``.
        issue: ``await``: and with it all that is in flight; ``flight``: the next step goes on at once; ``thread``: the
            call is made in another thread; ``wait``: another thread waits; ``torch``: torch's function for it.
        scope: neighbours with the same number, not 0, share one ``comm.coalesce()``.
    """

    op: str
    group: tuple[int, ...]
    common: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[Mapping[str, Any], ...] = ()
    messages: tuple[Message, ...] = ()
    issue: str = "await"
    scope: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """``arenas[rank]`` are that rank's."""

    arenas: tuple[tuple[Arena, ...], ...]
    steps: tuple[Step, ...]

    @property
    def size(self) -> int:
        return len(self.arenas)


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def views_in(value: Any) -> Iterator[View]:
    """All views in an argument, in order."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from views_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from views_in(item)


def mapped(value: Any, change: Callable[[View], Any]) -> Any:
    """The argument with every view changed."""
    if isinstance(value, View):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return value


def with_views(step: Step, change: Callable[[int, View], View]) -> Step:
    """The step with every view changed; ``change`` is told the world's rank, too."""
    ranks = tuple(
        mapped(arguments, lambda view, rank=rank: change(rank, view))
        for rank, arguments in zip(step.group, step.ranks, strict=False)
    )
    messages = tuple(
        replace(m, send=change(step.group[m.src], m.send), recv=change(step.group[m.dst], m.recv))
        for m in step.messages
    )
    return replace(step, ranks=ranks, messages=messages)


# -- as JSON ----------------------------------------------------------------------------------------------------------


def dumps(program: Program) -> str:
    return json.dumps(_plain(program), separators=(",", ":"))


def loads(text: str) -> Program:
    data = json.loads(text)
    arenas = tuple(tuple(Arena(*arena) for arena in rank) for rank in data["arenas"])
    return Program(arenas, tuple(_step(step) for step in data["steps"]))


def _plain(value: Any) -> Any:
    match value:
        case View():
            return {"view": _fields(value)}
        case Arena():
            return _fields(value)
        case Message() | Step() | Program():
            return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case complex():
            return {"complex": [value.real, value.imag]}
        case _:
            return value


def _fields(value: Any) -> list[Any]:
    return [getattr(value, item.name) for item in fields(value)]


def _value(data: Any) -> Any:
    if isinstance(data, list):
        return [_value(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "view" in data:
        arena, offset, shape, strides, *rest = data["view"]
        return View(arena, offset, tuple(shape), tuple(strides), *rest)
    if "complex" in data:
        return complex(*data["complex"])
    return {key: _value(item) for key, item in data.items()}


def _step(data: dict[str, Any]) -> Step:
    messages = tuple(Message(**{key: _value(item) for key, item in message.items()}) for message in data["messages"])
    ranks = tuple(_value(arguments) for arguments in data["ranks"])
    return Step(data["op"], tuple(data["group"]), _value(data["common"]), ranks, messages, data["issue"], data["scope"])
