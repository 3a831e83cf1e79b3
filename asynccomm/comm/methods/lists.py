"""Collectives on lists of tensors: each is one operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import SupportsIndex

from torch import Tensor

from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.methods.direct import direct
from asynccomm.core.work import Work
from asynccomm.ops import lists, variable
from asynccomm.ops.reduce_op import ReduceOp, ReduceOpLike


class CoalescedCollectives(CommBase):
    """Collectives on lists of tensors: one Work, and about the time of one tensor of the same total size.

    The lists have the same lengths, shapes and dtypes on all ranks; a list may mix dtypes.
    """

    @direct(lists.all_reduce, "tensors", "op")
    def all_reduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Tensor]]:
        """:meth:`all_reduce` each of ``tensors``, at least one, in place.

        Returns: Work of ``tensors``.
        """
        return self._call(timeout, hints, tag, lists.all_reduce, tensors, op)

    @direct(lists.broadcast, "tensors", "root")
    def broadcast_coalesced(
        self,
        tensors: Sequence[Tensor],
        root: SupportsIndex,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Tensor]]:
        """:meth:`broadcast` each of ``tensors``, at least one, in place.

        Returns: Work of ``tensors``.
        """
        return self._call(timeout, hints, tag, lists.broadcast, tensors, root)

    @direct(lists.all_gather, "output_lists", "tensors")
    def all_gather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]] | None,
        tensors: Sequence[Tensor],
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[list[Tensor]]]:
        """Collect each of the ranks' ``tensors``, at least one, on all ranks.

        Args:
            output_lists: ``output_lists[r][i]`` gets ``tensors[i]`` of rank r; None: new tensors.

        Returns: Work of ``output_lists``.
        """
        return self._call(timeout, hints, tag, lists.all_gather, output_lists, tensors)

    def reduce_scatter_coalesced(
        self,
        outputs: Sequence[Tensor] | None,
        inputs: Sequence[Tensor],
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Tensor]]:
        """:meth:`reduce_scatter_single` each of ``inputs``, at least one.

        Args:
            outputs: ``outputs[i]`` with ``1 / size`` of the elements of ``inputs[i]``; None: new tensors, with dim 0
                divided by ``size``.
            inputs: not changed.

        Returns: Work of ``outputs``.
        """
        calls, result = lists.reduce_scatter(self._group, outputs, inputs, op)
        return self._submit_together(calls, result, timeout, hints, tag)

    def all_gather_v_coalesced(
        self,
        outputs: Sequence[Tensor] | None,
        inputs: Sequence[Tensor],
        sizes: Sequence[SupportsIndex] | None = None,
        dim: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Tensor]]:
        """:meth:`all_gather_v` each of ``inputs``, at least one, as for sending tokens to the experts of a model.

        Args:
            outputs: ``sum(sizes)`` along ``dim``; None: new tensors.
            inputs: all with this rank's extent along ``dim``.
            sizes: every rank's extent; None, on all ranks or none: they are exchanged.

        Returns: Work of ``outputs``.
        """
        if sizes is None:
            return self._submit(variable.all_gather_v_coalesced(self._group, outputs, inputs, dim), timeout, hints, tag)
        return self._call(timeout, hints, tag, lists.all_gather_v, outputs, inputs, sizes, dim)

    def reduce_scatter_v_coalesced(
        self,
        outputs: Sequence[Tensor] | None,
        inputs: Sequence[Tensor],
        sizes: Sequence[SupportsIndex],
        op: ReduceOpLike = ReduceOp.SUM,
        dim: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Tensor]]:
        """:meth:`reduce_scatter_v` each of ``inputs``, at least one.

        Args:
            outputs: ``sizes[rank]`` along ``dim``; None: new tensors.
            inputs: all ``sum(sizes)`` along ``dim``; not changed.

        Returns: Work of ``outputs``.
        """
        calls, result = lists.reduce_scatter_v(self._group, outputs, inputs, sizes, op, dim)
        return self._submit_together(calls, result, timeout, hints, tag)
