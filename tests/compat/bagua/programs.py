"""Programs of Bagua's kind, on ranks without a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from asynccomm import Comm
from asynccomm.compat import bagua


async def without_a_loop(comm: Comm, program: Callable[[], Any], **options: Any) -> None:
    """Run ``program`` on a thread, with a default group over ``comm``'s backend."""

    def whole() -> None:
        bagua.init_process_group(backend=comm.backend, timeout=timedelta(seconds=40), **options)
        try:
            program()
        finally:
            bagua.destroy_process_group()

    await asyncio.to_thread(whole)
