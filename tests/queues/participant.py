"""A process that attaches to a queue and may be killed at any time: ``participant.py read|write|large HANDLE``."""

from __future__ import annotations

import asyncio
import sys
from itertools import count

import asynccomm


async def main(part: str, handle: str) -> None:
    async with await asynccomm.attach_queue(handle) as queue:
        if part == "read":
            print("attached", flush=True)
            async for item in queue:
                print(item, flush=True)
            print("end", flush=True)
        elif part == "large":
            print("attached", flush=True)
            await queue.put(b"short")
            await queue.put(bytes(1 << 30))  # it never gets so far
        else:
            for number in count():
                await queue.put(number)
                print(number, flush=True)  # acknowledged


asyncio.run(main(*sys.argv[1:]))
