"""Collectives on tensors that differ in size between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import SupportsIndex

from torch import Tensor

from asynccomm.comm.methods.base import CommBase
from asynccomm.comm.methods.direct import direct
from asynccomm.core.work import Work
from asynccomm.ops import dims, variable
from asynccomm.ops.reduce_op import ReduceOp, ReduceOpLike


class VariableCollectives(CommBase):
    """Collectives on tensors that differ in size between ranks.

    Sizes that all ranks know are given, and cost nothing. Sizes that are not given travel with the data, in one round;
    all ranks or none leave them out. Data that does not fit the given output raises PayloadError, and the comm goes on.
    """

    def all_gather_v(
        self,
        output: Tensor | None,
        input: Tensor,
        sizes: Sequence[SupportsIndex] | None = None,
        dim: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Concatenate the ranks' ``input`` along ``dim``; each rank has its own extent along ``dim``.

        Args:
            output: ``sum(sizes)`` along ``dim``; None: a new tensor.
            input: one dtype, and the same extents in all other dimensions, on all ranks.
            sizes: every rank's extent along ``dim``; None: they are exchanged.

        Returns: Work of ``output``.
        """
        if sizes is None:
            return self._submit(variable.all_gather_v(self._group, output, input, dim), timeout, hints, tag)
        return self._call(timeout, hints, tag, dims.all_gather_v, output, input, sizes, dim)

    @direct(dims.reduce_scatter_v, "output", "input", "sizes", "op", "dim")
    def reduce_scatter_v(
        self,
        output: Tensor | None,
        input: Tensor,
        sizes: Sequence[SupportsIndex] | None = None,
        op: ReduceOpLike = ReduceOp.SUM,
        dim: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Combine the ranks' ``input``; rank r gets the next ``sizes[r]`` indices along ``dim`` of the result.

        The inverse of :meth:`all_gather_v`.

        Args:
            output: ``sizes[rank]`` along ``dim``; None: a new tensor.
            input: ``sum(sizes)`` along ``dim``, the same shape on all ranks; not changed.
            sizes: every rank's share; None: equal shares.

        Returns: Work of ``output``.
        """
        return self._call(timeout, hints, tag, dims.reduce_scatter_v, output, input, sizes, op, dim)

    def all_to_all_v_single(
        self,
        output: Tensor | None,
        input: Tensor,
        output_split_sizes: Sequence[SupportsIndex] | None = None,
        input_split_sizes: Sequence[SupportsIndex] | None = None,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Send the next ``input_split_sizes[r]`` rows of ``input`` to each rank r; rows come in rank order.

        Args:
            output: at least ``sum(output_split_sizes)`` rows; received rows fill the first of them. None: a new tensor
                of exactly ``sum(output_split_sizes)`` rows.
            input: at least ``sum(input_split_sizes)`` rows; not changed.
            output_split_sizes: rows (of dim 0) from each rank; None, on all ranks or none: they are exchanged.
            input_split_sizes: rows for each rank; None: equal numbers.

        Returns: Work of ``output``.
        """
        if output_split_sizes is None:
            call = variable.all_to_all_v_single(self._group, output, input, input_split_sizes)
            return self._submit(call, timeout, hints, tag)
        splits = output_split_sizes, input_split_sizes
        return self._call(timeout, hints, tag, dims.all_to_all_v_single, output, input, *splits)

    def gather_v(
        self,
        output_list: Sequence[Tensor] | None,
        input: Tensor,
        root: SupportsIndex,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Tensor] | None]:
        """Collect the ranks' ``input`` on the root; each input has its own shape and dtype.

        Args:
            output_list: on the root ``size`` tensors of as many elements as the inputs, or None for new tensors of
                their shapes; elsewhere None or empty.

        Returns: Work of ``output_list`` on the root, of None elsewhere.
        """
        return self._submit(variable.gather_v(self._group, output_list, input, root), timeout, hints, tag)

    def scatter_v(
        self,
        output: Tensor | None,
        input_list: Sequence[Tensor] | None,
        root: SupportsIndex,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Give each rank r the root's ``input_list[r]``; each input has its own shape and dtype.

        Args:
            output: as many elements as the root's tensor for this rank; None: a new tensor of that shape.
            input_list: on the root ``size`` tensors; elsewhere None or empty.

        Returns: Work of ``output``.
        """
        return self._submit(variable.scatter_v(self._group, output, input_list, root), timeout, hints, tag)
