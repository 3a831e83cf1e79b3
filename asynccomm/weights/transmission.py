"""Sending and receiving the buckets of one attempt: packing and unpacking overlap with the transport.

Each bucket is a header, GO or STOP, and its elements. The receiver posts the receives of some buckets ahead, so a
receiver with a busy event loop does not hold the transport up. A sender that stops sends STOP and zeros for as many
buckets as the receiver has posted; then no receive is left over.

Each side holds AHEAD messages at most, beside the tensors. Copies on the CPU run in threads, so that the event loop
goes on; copies on a GPU are started by the loop's thread, in the order of its stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from asynccomm.core.tasks import detach
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError
from asynccomm.weights.buckets import Bucket, direct, largest, pack, unpack
from asynccomm.weights.conversation import GO, STOP, Route
from asynccomm.weights.layout import Layout

AHEAD: Final = 4  # buckets in flight; the same on both sides
STOP_SECONDS: Final = 5.0  # for the bucket on its way to arrive, once a push is stopped
INLINE: Final = 64 << 10  # bytes; their copy takes less time than a thread's turn


async def aside(function: Callable[[], object], nbytes: int, device: torch.device) -> None:
    """Run ``function``, which copies ``nbytes``, in a thread. A cancellation waits for its end: it uses memory."""
    if device.type != "cpu" or nbytes <= INLINE:
        function()
        return
    running = detach(asyncio.ensure_future(asyncio.to_thread(function)))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as exc:
            cancelled = exc
    running.result()
    if cancelled is not None:
        raise cancelled


async def send(route: Route, buckets: Sequence[Bucket], tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Send ``buckets``. After a cancellation or an error, no operation reads ``tensors`` any more.

    Raises: BrokenError of the route's comm.
    """
    device = route.comm.device
    straight = [direct(bucket, tensors, layout, sending=True) for bucket in buckets]
    buffers = _buffers(buckets, straight, device)
    go, flying, sent = route.header(GO), deque[list[Work[Tensor]]](), 0
    try:
        for number, (bucket, message) in enumerate(zip(buckets, straight, strict=True)):
            while len(flying) >= AHEAD:
                await _all(flying[0])
                flying.popleft()
            if message is None:
                message = buffers[number % AHEAD][: bucket.nbytes]  # its last user was AHEAD buckets ago
                await aside(partial(pack, bucket, tensors, layout, message), bucket.nbytes, device)
            sent += 1
            flying.append([route.send(go), route.send(message)])
        while flying:
            await _all(flying[0])
            flying.popleft()
    except BaseException:
        with suppress(AsyncCommError):
            for bucket in buckets[sent : sent + AHEAD]:
                zeros = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=device)
                flying.append([route.send(route.header(STOP)), route.send(zeros)])
        await _settled([work for works in flying for work in works], route)
        raise


async def receive(route: Route, buckets: Sequence[Bucket], tensors: Mapping[str, Tensor], layout: Layout) -> bool:
    """Receive ``buckets`` into ``tensors``. Returns whether all have come; else the trainer has stopped.

    Raises: BrokenError of the route's comm.
    """
    device = route.comm.device
    straight = [direct(bucket, tensors, layout, sending=False) for bucket in buckets]
    buffers = _buffers(buckets, straight, device)
    posted: deque[tuple[Work[Tensor], Work[Tensor]]] = deque()
    unpacking: dict[int, asyncio.Task[None]] = {}

    async def post(number: int) -> None:
        if number >= len(buckets):
            return
        if (last := unpacking.pop(number - AHEAD, None)) is not None:
            await last
        message = straight[number]
        if message is None:
            message = buffers[number % AHEAD][: buckets[number].nbytes]
        posted.append((route.receive(route.header(STOP)), route.receive(message)))

    try:
        for number in range(AHEAD):
            await post(number)
        for number, bucket in enumerate(buckets):
            header, data = posted.popleft()
            going = int((await header).item()) == GO
            message = await data
            if not going:
                await _all([work for works in posted for work in works])
                return False
            if straight[number] is None:
                copying = partial(unpack, bucket, tensors, layout, message)
                unpacking[number] = asyncio.create_task(aside(copying, bucket.nbytes, device))
            await post(number + AHEAD)
        return True
    finally:
        for task in unpacking.values():
            await _finished(task)


def _buffers(buckets: Sequence[Bucket], straight: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
    """Memory for the buckets that must be copied."""
    size = largest(buckets, [message is None for message in straight])
    return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(AHEAD if size else 0)]


async def _all(works: Sequence[Work[Any]]) -> None:
    for work in works:
        await work


async def _settled(works: Sequence[Work[Any]], route: Route) -> None:
    """Wait for the end of ``works``, also while this task is cancelled again; a receiver that is stuck is given up."""
    reason = f"a bucket did not arrive within {STOP_SECONDS:g} s after the push was stopped"
    giving_up = asyncio.get_running_loop().call_later(STOP_SECONDS, route.comm.abort, reason)
    try:
        for work in works:
            with suppress(AsyncCommError):
                while not work.done():
                    with suppress(asyncio.CancelledError):
                        await work
                work.exception()
    finally:
        giving_up.cancel()


async def _finished(task: asyncio.Task[None]) -> None:
    """Wait for the end of ``task``, which no cancellation shortens. Raises: its error."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    task.result()
    if cancelled is not None:
        raise cancelled
