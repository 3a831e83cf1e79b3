"""Collectives on tensors of sizes that all ranks know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import SupportsIndex

from torch import Tensor

from asynccomm import ops
from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.methods.direct import direct
from asynccomm.core.work import Work
from asynccomm.ops import dims, variable
from asynccomm.ops.reduce_op import ReduceOp, ReduceOpLike

# a bound method is a new object wherever it is looked up, and the fast path knows calls by such objects
_ALL_REDUCE, _BROADCAST, _REDUCE = ops.AllReduce.of, ops.Broadcast.of, ops.Reduce.of
_ALL_GATHER, _REDUCE_SCATTER = ops.AllGather.of, ops.ReduceScatter.of
_SCATTER, _GATHER = ops.Scatter.of, ops.Gather.of
_ALL_TO_ALL, _ALL_TO_ALL_SINGLE, _BARRIER = ops.AllToAll.of, ops.AllToAllSingle.of, ops.Barrier.of


class Collectives(CommBase):
    """Collectives on tensors of sizes that all ranks know."""

    @direct(_ALL_REDUCE, "tensor", "op", "out")
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Combine all ranks' ``tensor`` elementwise on all ranks, in place; bitwise the same everywhere.

        Args:
            tensor: any shape; the same number of elements and dtype on all ranks.
            op: a ReduceOp, ours or ``torch.distributed``'s.
            out: a tensor of as many elements that gets the result instead; ``tensor`` is then not changed.

        Returns: Work of ``tensor``, or of ``out``.
        """
        return self._call(timeout, hints, tag, _ALL_REDUCE, tensor, op, out)

    @direct(_BROADCAST, "tensor", "root")
    def broadcast(
        self,
        tensor: Tensor,
        root: SupportsIndex,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Copy ``tensor`` of rank ``root`` into the ``tensor`` of all ranks, in place.

        Returns: Work of ``tensor``.
        """
        return self._call(timeout, hints, tag, _BROADCAST, tensor, root)

    @direct(_REDUCE, "tensor", "root", "op", "out")
    def reduce(
        self,
        tensor: Tensor,
        root: SupportsIndex,
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor | None]:
        """Combine all ranks' ``tensor`` in place on rank ``root``; the tensors of other ranks are not changed.

        Args:
            out: on the root, a tensor of as many elements that gets the result instead; ``tensor`` is then not changed.
                On other ranks only its size is checked.

        Returns: Work of ``tensor``, or of ``out``, on the root; of None elsewhere.
        """
        return self._call(timeout, hints, tag, _REDUCE, tensor, root, op, out)

    @direct(_ALL_GATHER, "tensor_list", "tensor")
    def all_gather(
        self,
        tensor_list: Sequence[Tensor] | None,
        tensor: Tensor,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Tensor]]:
        """Collect every rank's ``tensor`` on all ranks, in one output per rank.

        Args:
            tensor_list: ``size`` tensors; ``tensor_list[r]`` has as many elements as ``tensor`` of rank r, on all
                ranks. None: new tensors of the shape of ``tensor``, which must then be the same on all ranks.
            tensor: as many elements as ``tensor_list[rank]``; may be ``tensor_list[rank]``. One dtype on all ranks.

        Returns: Work of ``tensor_list``, in rank order.
        """
        return self._call(timeout, hints, tag, _ALL_GATHER, tensor_list, tensor)

    @direct(dims.all_gather_single, "output", "input", "dim")
    def all_gather_single(
        self,
        output: Tensor | None,
        input: Tensor,
        dim: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Collect every rank's ``input`` on all ranks, in one output.

        Args:
            output: the inputs concatenated along ``dim``; with dim 0 any shape of ``size`` times the elements of
                ``input``, such as stacked ``(size, n, ...)``. None: a new tensor, concatenated.
            input: the same shape and dtype on all ranks. In place: chunk ``rank`` of ``output``.
            dim: counted from the end if negative.

        Returns: Work of ``output``.
        """
        return self._call(timeout, hints, tag, dims.all_gather_single, output, input, dim)

    @direct(_REDUCE_SCATTER, "output", "input_list", "op")
    def reduce_scatter(
        self,
        output: Tensor | None,
        input_list: Sequence[Tensor],
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Combine the ranks' ``input_list[r]`` for each r, and give rank r that result.

        Args:
            output: as many elements as ``input_list[rank]``; None: a new tensor of its shape.
            input_list: ``size`` tensors, ``input_list[r]`` of the same number of elements on all ranks; not changed.

        Returns: Work of ``output``.
        """
        return self._call(timeout, hints, tag, _REDUCE_SCATTER, output, input_list, op)

    @direct(dims.reduce_scatter_single, "output", "input", "op", "dim")
    def reduce_scatter_single(
        self,
        output: Tensor | None,
        input: Tensor,
        op: ReduceOpLike = ReduceOp.SUM,
        dim: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Combine the ranks' ``input``, and give each rank r chunk r of the result.

        Args:
            output: the shape of a chunk, ``dim`` divided by ``size``; with dim 0 any shape of as many elements. None: a
                new tensor. In place: any chunk of ``input``, usually the first.
            input: the same shape and dtype on all ranks; not changed, unless ``output`` is a part of it.
            dim: counted from the end if negative.

        Returns: Work of ``output``.
        """
        return self._call(timeout, hints, tag, dims.reduce_scatter_single, output, input, op, dim)

    @direct(_SCATTER, "output", "input_list", "root")
    def scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor] | None,
        root: SupportsIndex,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Give each rank r the root's ``input_list[r]``.

        Args:
            output: the tensor that gets it.
            input_list: on the root ``size`` tensors of as many elements as ``output``; elsewhere None or empty.

        Returns: Work of ``output``.
        """
        return self._call(timeout, hints, tag, _SCATTER, output, input_list, root)

    @direct(_GATHER, "output_list", "input", "root")
    def gather(
        self,
        output_list: Sequence[Tensor] | None,
        input: Tensor,
        root: SupportsIndex,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Tensor] | None]:
        """Collect every rank's ``input`` on the root.

        Args:
            output_list: on the root ``size`` tensors of as many elements as ``input``, or None for new tensors;
                elsewhere None or empty.

        Returns: Work of ``output_list`` on the root, of None elsewhere.
        """
        return self._call(timeout, hints, tag, _GATHER, output_list, input, root)

    @direct(dims.gather_single, "output", "input", "root", "dim")
    def gather_single(
        self,
        output: Tensor | None,
        input: Tensor,
        root: SupportsIndex,
        dim: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor | None]:
        """Collect every rank's ``input`` on the root, concatenated along ``dim``.

        Args:
            output: on the root a tensor with ``size`` times the extent of ``input`` along ``dim``, or None for a new
                tensor; elsewhere None.
            input: the same shape and dtype on all ranks. In place: on the root its chunk of ``output``.

        Returns: Work of ``output`` on the root, of None elsewhere.
        """
        return self._call(timeout, hints, tag, dims.gather_single, output, input, root, dim)

    @direct(dims.scatter_single, "output", "input", "root", "dim")
    def scatter_single(
        self,
        output: Tensor | None,
        input: Tensor | None,
        root: SupportsIndex,
        dim: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Give each rank its chunk along ``dim`` of the root's ``input``.

        Args:
            output: the tensor that gets the chunk; on the root None means a new tensor. In place: on the root its chunk
                of ``input``.
            input: on the root a tensor with a multiple of ``size`` as its extent along ``dim``; elsewhere None.

        Returns: Work of ``output``.
        """
        return self._call(timeout, hints, tag, dims.scatter_single, output, input, root, dim)

    def all_to_all(
        self,
        output_list: Sequence[Tensor] | None,
        input_list: Sequence[Tensor],
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Tensor]]:
        """Send ``input_list[r]`` to each rank r; ``output_list[s]`` comes from rank s.

        Args:
            output_list: ``size`` tensors, ``output_list[s]`` of as many elements as rank s sends here, all of one
                dtype; None, on all ranks or none: new tensors, of the shapes and dtypes that arrive.
            input_list: ``size`` tensors of any shapes; not changed.

        Returns: Work of ``output_list``.
        """
        if output_list is None:
            return self._submit(variable.all_to_all(self._group, input_list), timeout, hints, tag)
        return self._call(timeout, hints, tag, _ALL_TO_ALL, output_list, input_list)

    @direct(_ALL_TO_ALL_SINGLE, "output", "input")
    def all_to_all_single(
        self,
        output: Tensor | None,
        input: Tensor,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Send chunk r of ``input`` to each rank r; chunk s of ``output`` comes from rank s.

        Args:
            output: as many elements as ``input``; None: a new tensor of its shape. May be ``input`` itself.
            input: a multiple of ``size`` elements, the same number on all ranks.

        Returns: Work of ``output``.
        """
        return self._call(timeout, hints, tag, _ALL_TO_ALL_SINGLE, output, input)

    @direct(_BARRIER)
    def barrier(
        self,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[None]:
        """Wait until every rank has called it. Moves no tensor."""
        return self._call(timeout, hints, tag, _BARRIER)
