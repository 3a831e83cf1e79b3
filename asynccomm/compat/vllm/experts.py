"""Tokens to the ranks of the experts, and results back, within a GroupCoordinator's group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from torch import Tensor, nn

from asynccomm.compat.either import at_once, outcome
from asynccomm.compat.vllm.collectives import GroupCollectives
from asynccomm.ops.experts import Dispatched
from asynccomm.ops.renamed import Renamed
from asynccomm.ops.validation import check_is_tensor
from asynccomm.options import check_bool

# by group and kind: the tokens of each rank in the latest dispatch of this task or thread; empty until it has ended
_latest: Final[ContextVar[Mapping[tuple[str, bool], list[int]]]] = ContextVar("latest dispatch")
_HIDDEN: Final = Renamed({"input": "hidden_states"})


class GroupExperts(GroupCollectives):
    """Expert parallelism: every rank gets the tokens of all ranks, computes its experts' part, and parts are added."""

    #: for calls without sequence parallelism: the group with one process of each replica; None: this group
    data_parallel_group: GroupExperts | None = None
    _use_device_communicator: bool

    def dispatch(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[Tensor] | None = None,
    ) -> Any:
        """Give all ranks the tokens of all ranks, in rank order; the ranks may have different numbers of tokens.

        Args:
            hidden_states, router_logits: a row for each token of this rank.
            is_sequence_parallel: whether all processes of this group have different tokens. If not, the tokens go to
                ``data_parallel_group``.
            extra_tensors: further tensors with a row for each token.

        Returns: both tensors, as a tuple; with ``extra_tensors``, a list of these is its third item. In a group of one
            rank, and without a device communicator, the tensors themselves.

        Raises: TypeError, ValueError naming the argument, before anything is sent; PayloadError from waiting, if ranks
            differ in dtypes or in dimensions.
        """
        group = self._of_experts(is_sequence_parallel)
        if group is None:
            return at_once(_results([hidden_states, router_logits, *(extra_tensors or [])], extra_tensors))
        sizes: list[int] = []
        comm = group._on_device()
        extras = [router_logits, *(extra_tensors or [])]
        names = {f"extras[{place}]": f"extra_tensors[{place - 1}]" for place in range(1, len(extras))}
        with Renamed({"hidden": "hidden_states", "extras[0]": "router_logits", **names}):
            work = comm.call(comm.comm.dispatch, hidden_states, extras=extras)
        _latest.set({**_latest.get({}), (group.unique_name, is_sequence_parallel): sizes})

        def finish(sent: Dispatched) -> Any:
            sizes[:] = sent.rank_counts
            return _results([sent.hidden, *sent.extras], extra_tensors)

        return outcome(work, finish)

    dispatch_router_logits = dispatch

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Any:
        """The inverse of the latest :meth:`dispatch` of this task, or thread: the ranks' sum for this rank's tokens.

        Args:
            hidden_states: a row for each token of all ranks, in the order of ``dispatch``.
            is_sequence_parallel: as in that call.

        Raises: RuntimeError without an earlier dispatch that has ended; ValueError for a wrong number of rows.
        """
        group = self._of_experts(is_sequence_parallel)
        if group is None:
            return at_once(hidden_states)
        sizes = _latest.get({}).get((group.unique_name, is_sequence_parallel))
        if not sizes:
            raise RuntimeError(
                f"combine(..., is_sequence_parallel={is_sequence_parallel}) is the inverse of such a dispatch(), of "
                f"which none has ended in this task or thread, in group {group.unique_name!r}"
            )
        check_is_tensor("hidden_states", hidden_states)
        if not hidden_states.dim() or len(hidden_states) != sum(sizes):
            raise ValueError(
                f"hidden_states must have one row for each of the {sum(sizes)} tokens of the latest dispatch(), got "
                f"{tuple(hidden_states.shape)}"
            )
        method = group._on_device().comm.reduce_scatter_v
        return group._start(_HIDDEN, method, None, hidden_states, sizes, dim=0)

    def prepare_communication_buffer_for_model(self, model: nn.Module) -> None:
        """Does nothing: operations allocate their results, and no buffers are to be made for ``model``."""

    def _of_experts(self, is_sequence_parallel: bool) -> GroupExperts | None:
        """The group that exchanges tokens; None: there is no exchange."""
        check_bool("is_sequence_parallel", is_sequence_parallel)
        group = self if is_sequence_parallel or self.data_parallel_group is None else self.data_parallel_group
        return group if self._use_device_communicator and group.world_size > 1 else None


def _results(tensors: list[Tensor], extra_tensors: Sequence[Tensor] | None) -> tuple[Any, ...]:
    hidden, logits, *extras = tensors
    return (hidden, logits) if extra_tensors is None else (hidden, logits, extras)
