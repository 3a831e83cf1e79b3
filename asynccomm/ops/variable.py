"""Collectives on tensors of a size that only their owner knows; the other ranks allocate memory when the data arrives.

All of them are parcels. The head of a parcel describes the payload, so the ranks need to agree only on the call.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, SupportsIndex, final

import torch
from torch import Tensor

from asynccomm.errors import PayloadError
from asynccomm.ops.base import Call, Parcel
from asynccomm.ops.dims import parts_along, put, room_for_rows, rows_to_send
from asynccomm.ops.dtypes import BY_NAME
from asynccomm.ops.lists import as_many, one_extent
from asynccomm.ops.parcels import Parcels
from asynccomm.ops.validation import (
    CommInfo,
    check_dim,
    check_dtype,
    check_numel,
    check_off_root,
    check_rank,
    check_several,
    check_tensor,
    empty,
)

_ROWS: Final = struct.Struct("=QI")  # extent along the dimension, checksum of dtype and the other dimensions


def all_gather_v(group: CommInfo, output: Tensor | None, input: Tensor, dim: SupportsIndex) -> Call:
    """Concatenate the ranks' inputs along ``dim``; they have the same dtype and the same other dimensions."""
    check_tensor(group, "input", input)
    along = check_dim(dim, input, "input")
    if output is not None:
        _check_output(group, "output", output, "input", input, along)
    joined = _Concatenated(group, None if output is None else [output], [input], [along])
    return joined.call(Parcels("all_gather_v"), [[input]], _single, input.nbytes)


def all_gather_v_coalesced(
    group: CommInfo, outputs: Sequence[Tensor] | None, inputs: Sequence[Tensor], dim: SupportsIndex
) -> Call:
    """As ``all_gather_v``, for several tensors of one extent along ``dim``."""
    items = check_several(group, "inputs", inputs)
    dims = [check_dim(dim, tensor, f"inputs[{i}]") for i, tensor in enumerate(items)]
    one_extent(items, dims)
    if outputs is not None:
        as_many("outputs", check_several(group, "outputs", outputs, written=True), "inputs", items)
        for i, (output, tensor, along) in enumerate(zip(outputs, items, dims, strict=True)):
            _check_output(group, f"outputs[{i}]", output, f"inputs[{i}]", tensor, along)
    joined = _Concatenated(group, outputs, items, dims)
    return joined.call(Parcels("all_gather_v_coalesced"), [items], _list, sum([t.nbytes for t in items]))


def all_to_all_v_single(group: CommInfo, output: Tensor | None, input: Tensor, input_split_sizes: object) -> Call:
    """Send rows of dim 0 to each rank; no rank knows in advance how many rows it receives."""
    sends = rows_to_send(group, input, input_split_sizes)
    if output is not None:
        room_for_rows(group, output, input, sends[group.rank])
    parts = parts_along(input, 0, sends)
    joined = _Concatenated(group, None if output is None else [output], [parts[group.rank]], [0], spare=True)
    return joined.call(Parcels("all_to_all_v_single", shared=False), [[part] for part in parts], _single)


def exchange(
    group: CommInfo,
    method: str,
    shares: Sequence[Sequence[Tensor]],
    finish: Callable[[Sequence[Tensor], list[int]], Any],
    note: str,
    *,
    shared: bool,
    form: str = "",
) -> Call:
    """Send rows of several tensors: one share for all ranks, or one for each rank; all tensors of a share have as many.

    Args:
        shares: read when the operation takes effect.
        finish: makes the result of the tensors of all received rows, in rank order, and the number from each rank.
        note: must be equal on all ranks.
        form: the field of ``Parcels``.
    """
    own = shares[0] if shared else shares[group.rank]
    joined = _Concatenated(group, None, own, [0] * len(own), note=note)
    expected = sum([tensor.nbytes for tensor in own])
    op = Parcels(method, shared=shared, form=form)
    return joined.call(op, shares, lambda it: finish(it.outputs(), it.extents()), expected)


def _check_output(group: CommInfo, name: str, output: Tensor, like_name: str, like: Tensor, dim: int) -> None:
    """Check the output as far as possible before any data has arrived."""
    check_tensor(group, name, output, written=True)
    check_dtype(name, output, like_name, like)
    found, own = list(output.shape), list(like.shape)
    fits = len(found) == len(own)
    if fits:
        room, needed = found.pop(dim), own.pop(dim)
        fits = found == own and (room >= needed if group.size > 1 else room == needed)
    if not fits:
        raise ValueError(
            f"{name} must have the shape of {like_name}, {tuple(like.shape)}, but along dim {dim} the extent of all "
            f"ranks together, got {tuple(output.shape)}"
        )


def _single(joined: _Concatenated) -> Tensor:
    return joined.outputs()[0]


def _list(joined: _Concatenated) -> Sequence[Tensor]:
    return joined.outputs()


def all_to_all(group: CommInfo, input_list: Sequence[Tensor]) -> Call:
    """Send tensors of any shapes and dtypes; the received tensors are new."""
    inputs = check_several(group, "input_list", input_list, length=group.size)
    shaped = _WithShapes(group, None, range(group.size))
    return shaped.call(Parcels("all_to_all", shared=False), inputs, own=group.rank)


def gather_v(group: CommInfo, output_list: Sequence[Tensor] | None, input: Tensor, root: SupportsIndex) -> Call:
    """Gather tensors of any shapes on the root."""
    rank = check_rank(group, "root", root)
    check_tensor(group, "input", input)
    op = Parcels("gather_v", taker=rank)
    if rank != group.rank:
        check_off_root(group, rank, "output_list", output_list)
        return Call(op, (), (), None, None, (_shaped_parcel(input),))
    if output_list is not None:
        check_several(group, "output_list", output_list, length=group.size, written=True)
        _check_own("output_list", output_list, input, group.rank, "input")
    return _WithShapes(group, output_list, range(group.size)).call(op, [input], own=0)


def scatter_v(group: CommInfo, output: Tensor | None, input_list: Sequence[Tensor] | None, root: SupportsIndex) -> Call:
    """Scatter tensors of any shapes from the root."""
    rank = check_rank(group, "root", root)
    if output is not None:
        check_tensor(group, "output", output, written=True)
    op = Parcels("scatter_v", shared=False, giver=rank)
    shaped = _WithShapes(group, None if output is None else [output], [rank], single=True)
    if rank != group.rank:
        check_off_root(group, rank, "input_list", input_list)
        return shaped.call(op, (), expected=0 if output is None else output.nbytes)
    if input_list is None:
        raise ValueError(f"input_list must be given on the root (rank {rank}), got None")
    inputs = check_several(group, "input_list", input_list, length=group.size)
    if output is not None:
        _check_own("input_list", inputs, output, rank, "output")
    return shaped.call(op, inputs, own=rank)


def _check_own(name: str, tensors: Sequence[Tensor], like: Tensor, rank: int, like_name: str) -> None:
    check_dtype(f"{name}[{rank}]", tensors[rank], like_name, like)
    check_numel(f"{name}[{rank}]", tensors[rank], like.numel(), f"as many as {like_name}")


@final
class _Concatenated:
    """Received parts, concatenated along one dimension into one tensor, or into several tensors of one extent.

    Args:
        outputs: the tensors to fill; None: new tensors.
        own: this rank's parts.
        dims: the dimension of each part, counted from 0.
        spare: the outputs may be larger than all parts together.
        note: compared with those of the other ranks, as dtypes and dimensions are.
    """

    def __init__(
        self,
        group: CommInfo,
        outputs: Sequence[Tensor] | None,
        own: Sequence[Tensor],
        dims: Sequence[int],
        *,
        spare: bool = False,
        note: str = "",
    ) -> None:
        self._rank = group.rank
        self._alone = group.size == 1
        self._given = outputs
        self._outputs = outputs  # or their stand-ins
        self._like = [empty(tensor, (0,)) for tensor in own]
        self._shapes = [list(tensor.shape) for tensor in own]
        self._own: Sequence[Tensor] = ()
        self._dims = dims
        self._spare = spare
        rests = [[n for i, n in enumerate(t.shape) if i != dim] for t, dim in zip(own, dims, strict=True)]
        self._kind = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')} {[*rest[:dim], 'n', *rest[dim:]]}".replace("'", "")
            for t, rest, dim in zip(own, rests, dims, strict=True)
        )
        self._kind += note
        self._routed = bool(note)
        self._sum = zlib.crc32(self._kind.encode())
        # bytes for each index along the dimension
        self._unit = sum([torch.Size(rest).numel() * t.itemsize for t, rest in zip(own, rests, strict=True)])
        self._extents = {group.rank: own[0].shape[dims[0]]}
        self._parts: dict[int, list[Tensor]] = {}

    def call(
        self, op: Parcels, shares: Sequence[Sequence[Tensor]], value: Callable[[_Concatenated], Any], expected: int = 0
    ) -> Call:
        """The call that sends ``shares``: one for all ranks, or one for each rank."""
        parcels = tuple([self._parcel(share) for share in shares])
        begin = partial(self.begin, 0 if op.shared else self._rank)
        outputs = tuple(self._given or ())
        return Call(op, (), outputs, self, value, parcels, self.place, expected, begin, self.keep)

    def _parcel(self, parts: Sequence[Tensor]) -> Parcel:
        extent = parts[0].shape[self._dims[0]]
        return Parcel(_ROWS.pack(extent, self._sum), tuple([part.detach() for part in parts]))

    def begin(self, own: int, parcels: Sequence[Parcel], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Take this rank's part from parcel number ``own``, when the operation takes effect."""
        self._own = parcels[own].tensors
        if outputs:
            self._outputs = outputs
        if not self._alone:
            return ()
        self._make_parts({})
        assert self._outputs is not None
        return () if outputs else self._outputs

    def keep(self) -> None:
        """Copy this rank's own parts into the outputs."""
        if self._parts:  # unless all payloads were empty
            for mine, own in zip(self._parts[self._rank], self._own, strict=True):
                put(mine, own)
        self._own = ()

    def place(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        if len(head) != _ROWS.size:
            raise PayloadError(f"rank {source} sent a head of {len(head)} bytes, not {_ROWS.size}")
        extent, checksum = _ROWS.unpack(head)
        if checksum != self._sum:
            text = f"rank {source} sent a tensor that differs in dtype or in a dimension that must be equal"
            raise PayloadError(f"{text}{', or in its routing,' if self._routed else ''} from this rank's: {self._kind}")
        if extent * self._unit != lengths[source]:
            raise PayloadError(f"rank {source} sent {lengths[source]} bytes for an extent of {extent}")
        self._extents[source] = extent
        if not self._unit:  # empty payloads: the outputs are made when all heads are here
            return ()
        if not self._parts:
            self._make_parts({source: n // self._unit for source, n in lengths.items()})
        return self._parts[source]

    def _make_parts(self, others: Mapping[int, int]) -> None:
        """Allocate the outputs, now that all extents are known."""
        extents = {**others, self._rank: self._extents[self._rank]}
        ranks = sorted(extents)
        self._make_room(sum(extents.values()))
        assert self._outputs is not None
        views = [
            parts_along(output.detach(), dim, [extents[rank] for rank in ranks])
            for output, dim in zip(self._outputs, self._dims, strict=True)
        ]
        self._parts = {rank: [parts[i] for parts in views] for i, rank in enumerate(ranks)}

    def _make_room(self, total: int) -> None:
        shapes = [[*shape[:dim], total, *shape[dim + 1 :]] for shape, dim in zip(self._shapes, self._dims, strict=True)]
        outputs = self._outputs
        if outputs is None:
            outputs = self._outputs = self._given = [
                empty(like, shape) for like, shape in zip(self._like, shapes, strict=True)
            ]
        for output, shape in zip(outputs, shapes, strict=True):
            found = list(output.shape)
            fits = found == shape
            if self._spare and output.dim():
                fits = found[1:] == shape[1:] and found[0] >= total
            if not fits:
                at_least = " at least" if self._spare else ""
                raise PayloadError(f"output must have{at_least} shape {tuple(shape)} for all parts, got {tuple(found)}")

    def extents(self) -> list[int]:
        """The extent of each rank's part, when all parts have arrived."""
        return [extent for _, extent in sorted(self._extents.items())]

    def outputs(self) -> Sequence[Tensor]:
        """The complete tensors, when all parts have arrived."""
        if not self._parts:  # all payloads were empty
            self._make_room(sum(self._extents.values()))
        assert self._given is not None
        return self._given


def _shaped_parcel(tensor: Tensor) -> Parcel:
    return Parcel(json.dumps([str(tensor.dtype), *tensor.shape]).encode(), (tensor.detach(),))


@final
class _WithShapes:
    """Received tensors, each with its dtype and shape.

    Args:
        outputs: the tensors to fill, in the order of ``sources``; None: new tensors.
        sources: the sending ranks.
        single: whether the result is the only tensor instead of a list of it.
    """

    def __init__(
        self, group: CommInfo, outputs: Sequence[Tensor] | None, sources: Sequence[int], *, single: bool = False
    ) -> None:
        self._group = group
        self._given = outputs
        self._outputs = None if outputs is None else dict(zip(sources, outputs, strict=True))  # or their stand-ins
        self._sources = sources
        self._single = single
        self._tensors: dict[int, Tensor] = {}  # by source

    def call(self, op: Parcels, inputs: Sequence[Tensor], *, own: int | None = None, expected: int = 0) -> Call:
        """The call that sends ``inputs``; number ``own`` is for this rank itself."""
        parcels = tuple([_shaped_parcel(tensor) for tensor in inputs])
        begin = partial(self.begin, own)
        return Call(op, (), tuple(self._given or ()), self, _WithShapes.result, parcels, self.place, expected, begin)

    def begin(self, own: int | None, parcels: Sequence[Parcel], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copy this rank's own tensor, when the operation takes effect."""
        if outputs:
            self._outputs = dict(zip(self._sources, outputs, strict=True))
        if own is None:
            return ()
        (mine,) = parcels[own].tensors
        rank = self._group.rank
        target = empty(mine, mine.shape) if self._outputs is None else self._outputs[rank]
        put(target, mine)
        self._tensors[rank] = target
        return (target,) if self._outputs is None else ()

    def place(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        try:
            name, *shape = json.loads(head)
            dtype, numel = BY_NAME[name], torch.Size(shape).numel()
        except (ValueError, TypeError, KeyError, RuntimeError, RecursionError) as exc:
            raise PayloadError(f"rank {source} sent no description of a tensor: {head[:100]!r}") from exc
        if numel * dtype.itemsize != lengths[source] or min([0, *shape]) < 0:
            raise PayloadError(f"rank {source} sent {lengths[source]} bytes for {dtype} of shape {shape}")
        if self._outputs is None:
            tensor = torch.empty(shape, dtype=dtype, device=self._group.device)
        else:
            tensor = self._outputs[source]
            if tensor.dtype != dtype or tensor.numel() != numel:
                raise PayloadError(
                    f"rank {source} sent {dtype} of shape {tuple(shape)}, which does not fit into {tensor.dtype} of "
                    f"shape {tuple(tensor.shape)}"
                )
        self._tensors[source] = tensor
        return (tensor,)

    def result(self) -> Any:
        """The caller's outputs, or the new tensors in rank order."""
        tensors = [self._tensors[source] for source in self._sources] if self._given is None else self._given
        return tensors[0] if self._single else tensors
