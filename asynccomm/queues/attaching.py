"""Attaching to a queue from a process that is no rank of its comm."""

from __future__ import annotations

from datetime import timedelta
from typing import Unpack

from asynccomm.errors import BackendError
from asynccomm.options import DEFAULT_TIMEOUT, seconds
from asynccomm.queues.meeting import attach
from asynccomm.queues.options import QueueArguments, QueueHandle, QueueOptions
from asynccomm.queues.queue import MessageQueue
from asynccomm.store.base import within


async def attach_queue(
    handle: str, *, timeout: float | timedelta | None = None, **arguments: Unpack[QueueArguments]
) -> MessageQueue:
    """Attach to a queue by the ``handle`` of one of its ends, from any process of the host, or over the network.

    ::

        async with await asynccomm.attach_queue(handle) as queue:
            async for item in queue:
                ...

    A queue with one writer gets one more reader, which gets the items from now on. A queue with one reader gets one
    more writer. ``capacity`` and ``overflow`` are those of the queue.

    Args:
        timeout: seconds to attach.
        arguments: as for ``Comm.queue``.

    Raises: TypeError, ValueError naming the argument; BackendError if the queue cannot be reached, or refuses.
    """
    found, options = QueueHandle.parse(handle), QueueOptions(**arguments)
    limit = seconds("timeout", timeout, DEFAULT_TIMEOUT)
    try:
        async with within(limit):
            return await attach(found, options)
    except TimeoutError as exc:
        raise BackendError(f"did not attach to the queue of {found.label} within {limit:g} s") from exc
