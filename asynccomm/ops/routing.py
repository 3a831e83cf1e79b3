"""The way of tokens to experts: which rank holds which expert, and which token goes to which rank.

A token goes once to each rank that holds at least one of its experts, also where there are several. Its experts'
ids travel with it, so the receiving rank repeats the token for each of its experts by itself.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, SupportsIndex, final

import torch
from torch import Tensor

from asynccomm.ops.dtypes import FLOATS
from asynccomm.ops.validation import CommInfo, as_index, check_sizes, check_tensor

_IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts of each token, as a router has chosen them. ``dispatch`` reads it at the call.

    Args:
        experts: ids of experts, integers of shape ``(tokens, k)``, in ``[0, num_experts)``; -1: no expert. A token
            without experts goes nowhere, and its result is zero.
        num_experts: the number of experts of all ranks together.
        weights: factors of the experts' results in their sum, floating-point, of the shape of ``experts``; None: 1.
        placement: the rank of each expert, in the order of the ids; None: consecutive ids on each rank, in numbers that
            differ by one at most, larger ones first.

    ``num_experts`` and ``placement``, and k and the dtypes of the tensors, are the same on all ranks.
    """

    experts: Tensor
    num_experts: SupportsIndex
    weights: Tensor | None = None
    placement: Sequence[SupportsIndex] | None = None


@final
class ExpertPlacement(NamedTuple):
    """Which rank holds which expert, checked. ``ExpertPlacement.of`` gives the same object for equal arguments."""

    checksum: int  #: of the ranks of all experts, for comparing the ranks' placements
    experts: tuple[int, ...]  #: the ids of this rank's experts, ascending
    #: by id: the rank of the expert, and its number among this rank's experts or -1. The last entries are those of id
    #: -1: one more than the last rank, and -1
    ranks: Tensor
    numbers: Tensor

    @classmethod
    def of(
        cls,
        group: CommInfo,
        num_experts: SupportsIndex,
        placement: Sequence[SupportsIndex] | None,
        device: torch.device,
    ) -> ExpertPlacement:
        """Raises: TypeError, ValueError naming ``num_experts`` or ``placement``."""
        count = as_index(num_experts)
        if count is None:
            raise TypeError(f"num_experts must be an integer, got {num_experts!r}")
        if count < 1:
            raise ValueError(f"num_experts must be at least 1, got {count}")
        if placement is None:
            return _placed(group.rank, group.size, count, None, device)
        if isinstance(placement, Sequence) and len(placement) != count:
            raise ValueError(f"placement must have a rank for each of the {count} experts, got {len(placement)}")
        ranks = tuple(check_sizes("placement", placement, count))
        if max(ranks) >= group.size:
            expert = next(i for i, rank in enumerate(ranks) if rank >= group.size)
            raise ValueError(f"placement[{expert}] must be a rank in [0, {group.size}), got {ranks[expert]}")
        return _placed(group.rank, group.size, count, ranks, device)


@lru_cache(maxsize=64)
def _placed(rank: int, size: int, count: int, ranks: tuple[int, ...] | None, device: torch.device) -> ExpertPlacement:
    if ranks is None:
        each, more = divmod(count, size)
        ranks = tuple([r for r in range(size) for _ in range(each + (r < more))])
    mine = tuple([expert for expert, holder in enumerate(ranks) if holder == rank])
    numbers = [-1] * (count + 1)
    for number, expert in enumerate(mine):
        numbers[expert] = number
    with torch.inference_mode(False):  # later calls may be outside of it
        return ExpertPlacement(
            zlib.crc32(array("Q", ranks).tobytes()),
            mine,
            torch.tensor([*ranks, size], device=device),
            torch.tensor(numbers, device=device),
        )


@final
class Route(NamedTuple):
    """The rows that this rank sends: row i is token ``tokens[i]``; the first ``sends[0]`` rows go to rank 0, etc."""

    placement: ExpertPlacement
    tokens: Tensor
    sends: list[int]

    @classmethod
    def of(cls, group: CommInfo, routing: object, tokens: int) -> Route:
        """The route of ``tokens`` tokens. Raises: TypeError, ValueError naming the argument."""
        if not isinstance(routing, Routing):
            raise TypeError(f"routing must be an asynccomm.Routing or None, got {routing!r} ({type(routing).__name__})")
        experts = routing.experts
        check_tensor(group, "routing.experts", experts)
        if experts.dtype not in _IDS:
            raise TypeError(f"routing.experts must be integers, got {experts.dtype}")
        if experts.dim() != 2 or experts.shape[0] != tokens:
            raise ValueError(
                f"routing.experts must have shape ({tokens}, k), a row for each token, got {tuple(experts.shape)}"
            )
        _check_weights(group, routing)
        placement = ExpertPlacement.of(group, routing.num_experts, routing.placement, experts.device)
        ids = experts.detach().long()
        _check_range(ids, len(placement.ranks) - 1)
        there = torch.zeros(tokens, group.size + 1, dtype=torch.bool, device=ids.device)
        there.scatter_(1, placement.ranks[ids], True)
        ranks, rows = there[:, : group.size].t().nonzero(as_tuple=True)
        return cls(placement, rows, torch.bincount(ranks, minlength=group.size).tolist())


@final
class Arrangement(NamedTuple):
    """The received tokens, repeated for each of this rank's experts and sorted by expert."""

    rows: Tensor  #: the number of the received token
    slots: Tensor  #: the place of the expert among the token's experts
    counts: list[int]  #: the number of rows of each of this rank's experts

    @classmethod
    def of(cls, placement: ExpertPlacement, experts: Tensor) -> Arrangement:
        """The arrangement of tokens with these ``experts``, of shape ``(received tokens, k)``."""
        numbers = placement.numbers[experts.long()]
        rows, slots = (numbers >= 0).nonzero(as_tuple=True)
        mine = numbers[rows, slots]
        order = mine.argsort(stable=True)
        return cls(rows[order], slots[order], torch.bincount(mine, minlength=len(placement.experts)).tolist())


def _check_weights(group: CommInfo, routing: Routing) -> None:
    weights, experts = routing.weights, routing.experts
    if weights is None:
        return
    check_tensor(group, "routing.weights", weights)
    if weights.dtype not in FLOATS:
        raise TypeError(f"routing.weights must be floating-point, of a dtype that SUM takes, got {weights.dtype}")
    if weights.shape != experts.shape:
        raise ValueError(
            f"routing.weights must have the shape of routing.experts, {tuple(experts.shape)}, got "
            f"{tuple(weights.shape)}"
        )


def _check_range(ids: Tensor, count: int) -> None:
    wrong = (ids < -1) | (ids >= count)
    if wrong.any():
        token, slot = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"routing.experts[{token}, {slot}] must be in [0, {count}), or -1 for no expert, got {ids[token, slot]}"
        )
