"""A program of all ranks, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from torch import Tensor, nn

from asynccomm import Comm
from asynccomm.testing import loopback_world

R = TypeVar("R")


async def on_ranks(size: int, program: Callable[[Comm], Awaitable[R]], ordering: str = "program") -> list[R]:
    """The results of ``program`` on each rank."""
    async with loopback_world(size, ordering=ordering) as comms:
        return await asyncio.gather(*(program(comm) for comm in comms))


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    """Copies of the gradients as they are now."""
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]
