"""Tokens to the ranks of their experts, and the experts' results back: ``dispatch`` and ``combine``.

Both directions of a dispatch are linear, and each is the transpose of the other: :class:`Path` has both. ``combine``
uses the way back, and the gradients of both calls use the opposite way.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, SupportsIndex, final

import torch
from torch import Tensor

from asynccomm.ops import dims, lists, variable
from asynccomm.ops.base import Call, layout_of
from asynccomm.ops.movement import AllGather
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.routing import Arrangement, Route, Routing
from asynccomm.ops.validation import CommInfo, as_list, check_sizes, check_tensor, empty


class Path(Protocol):
    """The way of the rows of one dispatch, for tensors of any shape beyond dim 0."""

    def forth(self, rows: Tensor) -> Call:
        """From a row for each token of this rank to a row for each token that this rank has received."""

    def back(self, rows: Tensor) -> Call:
        """From a row for each received token to the sum of the ranks' rows for each token of this rank."""


#: given the tensors that a dispatch has received and their path, returns the tensors to go on with, and the anchor
Link = Callable[[list[Tensor], Path], tuple[list[Tensor], Tensor | None]]


@final
@dataclass(frozen=True, slots=True)
class ToAll:
    """Every token goes to every rank."""

    group: CommInfo
    sizes: list[int]  #: the number of tokens of each rank

    def forth(self, rows: Tensor) -> Call:
        return dims.all_gather_v(self.group, None, rows, self.sizes, 0).named("dispatch")

    def back(self, rows: Tensor) -> Call:
        return dims.reduce_scatter_v(self.group, None, rows, self.sizes, ReduceOp.SUM, 0).named("combine")


@final
@dataclass(frozen=True, slots=True, eq=False)
class ToExperts:
    """Every token goes to the ranks of its experts."""

    group: CommInfo
    route: Route
    receives: list[int]  #: the number of tokens from each rank
    count: int  #: of the tokens of this rank

    def forth(self, rows: Tensor) -> Call:
        room = empty(rows, [len(self.route.tokens), *rows.shape[1:]])
        call = dims.all_to_all_v_single(self.group, None, room, self.receives, self.route.sends)
        return call.named("dispatch")._replace(copies=((partial(_select, room, self.route.tokens), rows),))

    def back(self, rows: Tensor) -> Call:
        call = dims.all_to_all_v_single(self.group, None, rows, self.route.sends, self.receives)
        return call.named("combine")._replace(finish=self._sum)

    def _sum(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return sum_rows(rows, self.route.tokens, self.count)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """The rows that a rank has received by ``dispatch``, and the way back for ``combine``.

    With a routing, there is a row for each token and each of its experts on this rank, sorted by expert, then by rank
    and place of the token. Without one, there is a row for each token of each rank, in rank order.
    """

    hidden: Tensor  #: the rows of ``hidden``
    extras: list[Tensor]  #: the rows of each of ``extras``
    weights: Tensor | None  #: the weight of each row, if the routing had weights
    experts: tuple[int, ...]  #: ids of this rank's experts, ascending; empty without a routing
    expert_counts: list[int]  #: rows of each of ``experts``: ``hidden.split(expert_counts)``; empty without a routing
    rank_counts: list[int]  #: tokens received from each rank
    path: Path  #: for the library
    arrangement: Arrangement | None  #: for the library
    group: CommInfo  #: for the library
    anchor: Tensor | None  #: an empty tensor that leads backward to the dispatch, if it has gradients; for the library

    def partial_sums(self, rows: Tensor) -> Tensor:
        """For each received token, the weighted sum of its ``rows`` on this rank. For the library."""
        if self.arrangement is None:
            return rows
        return sum_rows(rows, self.arrangement.rows, sum(self.rank_counts), self.weights)


def dispatch(
    group: CommInfo,
    hidden: Tensor,
    routing: Routing | None,
    extras: Sequence[Tensor],
    sizes: Sequence[SupportsIndex] | None,
    link: Link | None = None,
    note: str = "",
) -> Call:
    """The checked call. ``note`` must be equal on all ranks."""
    tensors = _checked(group, hidden, extras)
    if routing is None:
        return _to_all(group, tensors, sizes, link, note)
    if sizes is not None:
        raise ValueError(f"sizes must be None with a routing, which decides them; got {sizes!r}")
    route = Route.of(group, routing, len(hidden))
    rooms = [empty(t, [len(route.tokens), *t.shape[1:]]) for t in tensors]
    copies = [(partial(_select, room, route.tokens), t) for room, t in zip(rooms, tensors, strict=True)]
    for part in (routing.experts, routing.weights):
        if part is not None:  # read now: the program may change them
            rooms.append(part.detach().index_select(0, route.tokens))
    shares = list(zip(*[dims.parts_along(room, 0, route.sends) for room in rooms], strict=True))
    note = f"{note}, experts {route.placement.checksum:#x}, {'with' if routing.weights is not None else 'no'} weights"
    finish = partial(_by_expert, group, route, len(hidden), len(extras), link)
    call = variable.exchange(group, "dispatch", shares, finish, note, shared=False)
    return call._replace(copies=tuple(copies))


def combine(group: CommInfo, rows: Tensor, sent: Dispatched) -> Call:
    """The checked call."""
    check_rows(group, rows, sent)
    arrangement = sent.arrangement
    if arrangement is None:
        return sent.path.back(rows)
    room = empty(rows, [sum(sent.rank_counts), *rows.shape[1:]])
    return sent.path.back(room)._replace(copies=((partial(_fill_sums, room, sent), rows),))


def check_rows(group: CommInfo, rows: Tensor, sent: Dispatched) -> None:
    """Check the arguments of ``combine``. Raises: TypeError, ValueError."""
    if not isinstance(sent, Dispatched):
        raise TypeError(f"sent must be the result of dispatch(), got {sent!r} ({type(sent).__name__})")
    if sent.group is not group:
        raise ValueError(f"sent was dispatched on another comm, {sent.group.name!r}, not on this one, {group.name!r}")
    check_tensor(group, "rows", rows)
    if not (rows.is_floating_point() or rows.is_complex()):
        raise TypeError(f"rows must be floating-point or complex, got {rows.dtype}")
    ReduceOp.SUM.check(rows.dtype)
    expected = len(sent.hidden)
    if not rows.dim() or len(rows) != expected:
        raise ValueError(f"rows must have one row for each of the {expected} of sent.hidden, got {tuple(rows.shape)}")


def sum_rows(rows: Tensor, index: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """``count`` rows: number j is the sum of the ``rows[i]``, times ``weights[i]``, with ``index[i] == j``.

    Sums of halves and float8 are computed in float32.
    """
    wide = _widened(rows.dtype)
    if weights is not None:
        wide = torch.promote_types(wide, _widened(weights.dtype))
    values = rows.to(wide)
    if weights is not None:
        values = values * weights.to(wide).view(-1, *[1] * (rows.dim() - 1))
    return (
        torch.zeros(count, *rows.shape[1:], dtype=wide, device=rows.device).index_add_(0, index, values).to(rows.dtype)
    )


def _widened(dtype: torch.dtype) -> torch.dtype:
    """At least float32. torch promotes no float8."""
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


def _checked(group: CommInfo, hidden: Tensor, extras: Sequence[Tensor]) -> list[Tensor]:
    check_tensor(group, "hidden", hidden)
    if not hidden.dim():
        raise ValueError("hidden must have a row (of dim 0) for each token, got a scalar")
    for i, tensor in enumerate(as_list("extras", extras)):
        check_tensor(group, "extras", tensor, key=i)
        if not tensor.dim() or len(tensor) != len(hidden):
            raise ValueError(
                f"extras[{i}] must have a row for each of the {len(hidden)} tokens, got shape {tuple(tensor.shape)}"
            )
    return [hidden, *extras]


def _to_all(
    group: CommInfo, tensors: list[Tensor], sizes: Sequence[SupportsIndex] | None, link: Link | None, note: str
) -> Call:
    if sizes is not None:
        call = lists.all_gather_v(group, None, tensors, sizes, 0).named("dispatch")
        counts = check_sizes("sizes", sizes, group.size)
        op = call.op
        if note:  # nothing but the operation is compared
            assert isinstance(op, AllGather)
            op = replace(op, layout=layout_of([op.layout, zlib.crc32(note.encode())]))
        return call._replace(op=op, finish=lambda received: _as_received(group, link, received, counts))
    finish = partial(_as_received, group, link)
    return variable.exchange(group, "dispatch", [tensors], finish, note, shared=True, form="routing=None")


def _as_received(group: CommInfo, link: Link | None, received: Sequence[Tensor], counts: list[int]) -> Dispatched:
    path = ToAll(group, counts)
    data, anchor = (received, None) if link is None else link(list(received), path)
    hidden, *extras = data
    return Dispatched(hidden, extras, None, (), [], counts, path, None, group, anchor)


def _by_expert(
    group: CommInfo,
    route: Route,
    tokens: int,
    extras: int,
    link: Link | None,
    received: Sequence[Tensor],
    counts: list[int],
) -> Dispatched:
    path = ToExperts(group, route, counts, tokens)
    arranged = Arrangement.of(route.placement, received[extras + 1])
    data = [*received[: extras + 1], *received[extras + 2 :]]
    data, anchor = (data, None) if link is None else link(data, path)
    rows = [tensor.index_select(0, arranged.rows) for tensor in data[: extras + 1]]
    weights = data[extras + 1][arranged.rows, arranged.slots] if len(data) > extras + 1 else None
    experts = route.placement.experts
    return Dispatched(rows[0], rows[1:], weights, experts, arranged.counts, counts, path, arranged, group, anchor)


def _select(room: Tensor, index: Tensor, tensor: Tensor) -> None:
    with torch.inference_mode(room.is_inference()):
        torch.index_select(tensor, 0, index, out=room)


def _fill_sums(room: Tensor, sent: Dispatched, rows: Tensor) -> None:
    with torch.no_grad():
        dims.put(room, sent.partial_sums(rows))
