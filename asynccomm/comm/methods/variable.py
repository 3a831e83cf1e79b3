"""Collectives on tensors that differ in size between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import SupportsIndex

from torch import Tensor

from asynccomm.comm.methods.base import CommBase
from asynccomm.core.work import Work
from asynccomm.ops import dims, variable
from asynccomm.ops.reduce_op import ReduceOp


class VariableCollectives(CommBase):
    """Collectives on tensors that differ in size between ranks.

    Sizes that all ranks know are given, and cost nothing. Where they are not given they travel with the data, in one
    round; then they may be left out on all ranks or on none. What comes and does not fit into what was given for it
    raises PayloadError, and the comm goes on.
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
        """Concatenate the ranks' ``input`` along ``dim``, of which each rank has an extent of its own.

        Args:
            output: ``sum(sizes)`` along ``dim``; None: a new one.
            input: of one dtype, and equal in all other dimensions.
            sizes: every rank's extent along ``dim``; None: they are exchanged.

        Returns: Work of ``output``.
        """
        if sizes is None:
            return self._submit(variable.all_gather_v(self._group, output, input, dim), timeout, hints, tag)
        return self._submit(dims.all_gather_v(self._group, output, input, sizes, dim), timeout, hints, tag)

    def reduce_scatter_v(
        self,
        output: Tensor | None,
        input: Tensor,
        sizes: Sequence[SupportsIndex] | None = None,
        op: object = ReduceOp.SUM,
        dim: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """Combine the ranks' ``input``; rank r gets the next ``sizes[r]`` indices along ``dim`` of the result.

        The inverse of :meth:`all_gather_v`.

        Args:
            output: ``sizes[rank]`` along ``dim``; None: a new one.
            input: ``sum(sizes)`` along ``dim``, the same shape on all ranks; not changed.
            sizes: every rank's share; None: equal ones.

        Returns: Work of ``output``.
        """
        return self._submit(dims.reduce_scatter_v(self._group, output, input, sizes, op, dim), timeout, hints, tag)

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
            output: at least ``sum(output_split_sizes)`` rows, which come first; None: a new one of just these.
            input: at least ``sum(input_split_sizes)`` rows; not changed.
            output_split_sizes: rows (of dim 0) from each rank; None, on all ranks or none: they are exchanged.
            input_split_sizes: rows for each rank; None: equally many.

        Returns: Work of ``output``.
        """
        if output_split_sizes is None:
            call = variable.all_to_all_v_single(self._group, output, input, input_split_sizes)
        else:
            call = dims.all_to_all_v_single(self._group, output, input, output_split_sizes, input_split_sizes)
        return self._submit(call, timeout, hints, tag)

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
        """Collect the ranks' ``input`` on the root, each of a shape and dtype of its own.

        Args:
            output_list: on the root ``size`` tensors of as many elements as the inputs, or None for new ones of their
                shapes; elsewhere None or empty.

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
        """Give each rank r the root's ``input_list[r]``, each of a shape and dtype of its own.

        Args:
            output: as many elements as the tensor that comes; None: a new one of its shape.
            input_list: on the root ``size`` tensors; elsewhere None or empty.

        Returns: Work of ``output``.
        """
        return self._submit(variable.scatter_v(self._group, output, input_list, root), timeout, hints, tag)
