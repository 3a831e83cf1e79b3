"""Expert parallelism: tokens to the ranks of their experts, and the results back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import SupportsIndex

from torch import Tensor

from asynccomm.comm.methods.base import CommBase
from asynccomm.core.work import Work
from asynccomm.ops import experts
from asynccomm.ops.experts import Dispatched
from asynccomm.ops.routing import Routing


class ExpertCollectives(CommBase):
    """Tokens to the ranks of their experts, and the results back.

    ``asynccomm.experts`` has the same two calls with gradients.
    """

    def dispatch(
        self,
        hidden: Tensor,
        routing: Routing | None = None,
        extras: Sequence[Tensor] = (),
        sizes: Sequence[SupportsIndex] | None = None,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Dispatched]:
        """Send each token to the ranks of its experts, or without a routing to all ranks.

        Args:
            hidden: a row (of dim 0) for each token; any number of tokens on each rank, any further dimensions.
            routing: the experts of each token; None, on all ranks or none: each rank gets the tokens of all ranks.
            extras: tensors of any dtypes with a row for each token, such as scales or the router's logits.
            sizes: every rank's number of tokens, where all ranks have these numbers; None: they are exchanged. Only
                without a routing.

        Returns: Work of a ``Dispatched``, the rows of this rank's experts. Tokens travel once to each rank, however
            many of their experts it holds.
        Raises: from awaiting: PayloadError, if ranks differ in dtypes, in dimensions or in the routing's form;
            with ``sizes`` CollectiveMismatchError.
        """
        return self._submit(experts.dispatch(self._group, hidden, routing, extras, sizes), timeout, hints, tag)

    def combine(
        self,
        rows: Tensor,
        sent: Dispatched,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Tensor]:
        """The inverse of :meth:`dispatch`: for each token of this rank, the sum of its rows over all ranks.

        With weights in the routing, each row counts with its weight. Sums of halves and float8 are computed in
        float32.

        Args:
            rows: a row for each of ``sent.hidden``, in its order; of a floating-point or complex dtype that SUM takes,
                any further dimensions.
            sent: the result of this comm's ``dispatch``. May be used several times.

        Returns: Work of a new tensor, a row for each token that this rank has dispatched, in their order.
        """
        return self._submit(experts.combine(self._group, rows, sent), timeout, hints, tag)
