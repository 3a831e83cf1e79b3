"""The ranks compare their models and settings, before any gradient travels.

Buckets carry no names: ranks with different models would add gradients of unlike parameters, or call operations of
unlike sizes. The root therefore sends the description of its model, each rank compares it with its own, and all ranks
get the first difference that any of them has found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from asynccomm.comm.comm import Comm
from asynccomm.gradients.planning import GradientLayout


def describe_model(model: nn.Module) -> list[str]:
    """A line for each parameter and buffer, equal on ranks with gradients that can be reduced together."""
    lines = []
    for name, parameter in model.named_parameters():
        line = f"parameter {name!r}: {_form(parameter)}"
        if not parameter.requires_grad:
            line += ", without gradient"
        elif not parameter.is_contiguous():
            line += f", gradient with strides {GradientLayout.of(parameter).strides}"
        lines.append(line)
    return [*lines, *(f"buffer {name!r}: {_form(buffer)}" for name, buffer in model.named_buffers())]


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def first_difference(mine: Sequence[str], theirs: Sequence[str], rank: int, root: int) -> str | None:
    """The first line in which rank ``rank`` differs from ``root``; None: all are equal."""
    for place in range(max(len(mine), len(theirs))):
        here, there = (lines[place] if place < len(lines) else "nothing more" for lines in (mine, theirs))
        if here != there:
            return f"rank {rank} has {here}; rank {root} has {there}"
    return None


async def agree(comm: Comm, root: int, lines: Sequence[str], plan: Any) -> Any:
    """Compare ``lines`` over all ranks, and take over the root's ``plan``, a value of plain types.

    Returns: the root's plan.
    Raises: ValueError on all ranks if any rank has other lines than the root.
    """
    theirs: Any = await comm.broadcast_object([list(lines), plan] if comm.rank == root else None, root)
    their_lines, their_plan = theirs
    found: list[Any] = await comm.all_gather_object(first_difference(lines, their_lines, comm.rank, root))
    for difference in found:
        if difference is not None:
            raise ValueError(f"model or settings differ between ranks: {difference}")
    return their_plan
