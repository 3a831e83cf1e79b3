"""Sending and receiving the buckets of one attempt, over a fan: a comm of a trainer, rank 0, and some servers.

Each bucket is a broadcast. The receivers post some broadcasts ahead, so a receiver with a busy event loop does not hold
the transport up; packing and unpacking overlap with the transport. A sender that stops aborts the fan.

Each side holds AHEAD messages at most, beside the tensors. Copies on the CPU run in threads, so that the event loop
goes on; copies on a GPU are started by the loop's thread, in the order of its stream.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.core.tasks import to_the_end
from asynccomm.core.work import Work
from asynccomm.weights.buckets import Bucket, direct, largest, pack, unpack
from asynccomm.weights.layout import Layout

ROOT: Final = 0  # the trainer's rank in a fan
AHEAD: Final = 4  # buckets in flight
INLINE: Final = 64 << 10  # bytes; a copy takes less time than a thread's turn


async def aside(function: Callable[[], object], nbytes: int, device: torch.device) -> None:
    """Run ``function``, which copies ``nbytes``, in a thread. A cancellation waits for its end: it uses memory."""
    if device.type != "cpu" or nbytes <= INLINE:
        function()
        return
    await to_the_end(asyncio.to_thread(function))


async def send(fan: Comm, buckets: Sequence[Bucket], tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Send ``buckets``. After a cancellation or an error the fan must be aborted.

    Raises: BrokenError of the fan.
    """
    straight = [direct(bucket, tensors, layout, sending=True) for bucket in buckets]
    buffers = _buffers(buckets, straight, fan.device)
    flying: deque[Work[Tensor]] = deque()
    for number, (bucket, message) in enumerate(zip(buckets, straight, strict=True)):
        if len(flying) == AHEAD:
            await flying.popleft()
        if message is None:
            message = buffers[number % AHEAD][: bucket.nbytes]  # its last user was AHEAD buckets ago
            await aside(partial(pack, bucket, tensors, layout, message), bucket.nbytes, fan.device)
        flying.append(fan.broadcast(message, ROOT))
    while flying:
        await flying.popleft()


async def receive(fan: Comm, buckets: Sequence[Bucket], tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Receive ``buckets`` into ``tensors``; the trainer may take any time.

    After a cancellation or an error the fan must be aborted.

    Raises: BrokenError of the fan.
    """
    straight = [direct(bucket, tensors, layout, sending=False) for bucket in buckets]
    buffers = _buffers(buckets, straight, fan.device)
    posted: deque[Work[Tensor]] = deque()
    unpacking: dict[int, asyncio.Task[None]] = {}

    async def post(number: int) -> None:
        if number >= len(buckets):
            return
        if (last := unpacking.pop(number - AHEAD, None)) is not None:
            await last
        message = straight[number]
        if message is None:
            message = buffers[number % AHEAD][: buckets[number].nbytes]
        posted.append(fan.broadcast(message, ROOT, timeout=math.inf))

    try:
        for number in range(AHEAD):
            await post(number)
        for number, bucket in enumerate(buckets):
            message = await posted.popleft()
            if straight[number] is None:
                copying = partial(unpack, bucket, tensors, layout, message)
                unpacking[number] = asyncio.create_task(aside(copying, bucket.nbytes, fan.device))
            await post(number + AHEAD)
    finally:
        for task in unpacking.values():
            await to_the_end(task)


def _buffers(buckets: Sequence[Bucket], straight: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
    """Memory for the buckets that must be copied."""
    size = largest(buckets, [message is None for message in straight])
    with torch.inference_mode(False):  # threads write it, too
        return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(AHEAD if size else 0)]
