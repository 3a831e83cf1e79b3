"""Programs of vLLM's kind, on ranks without a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from asynccomm import Comm
from asynccomm.compat import vllm


async def without_a_loop(comm: Comm, program: Callable[[], Any], **options: Any) -> None:
    """Run ``program`` on a thread, in an environment over ``comm``'s backend."""

    def whole() -> None:
        vllm.init_distributed_environment(backend=comm.backend, timeout=timedelta(seconds=40), **options)
        try:
            program()
        finally:
            vllm.destroy_distributed_environment()

    await asyncio.to_thread(whole)


def group_of(lists: list[list[int]], name: str | None = None, queue: bool = False) -> vllm.GroupCoordinator:
    return vllm.GroupCoordinator(lists, 0, "gloo", True, queue, name)
