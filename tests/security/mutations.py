"""Bytes that are almost what somebody would write."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager

HUGE = [-1, -(2**63), 2**63 - 1, 2**31, 2**31 - 1, 2**32 - 1, 2**40, 2**60, 0]


def mutated(data: bytes, choose: random.Random) -> bytes:
    """``data`` with one to four things wrong in it."""
    work = bytearray(data)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(len(work) + 1)
        match choose.randrange(7):
            case 0 if work:  # a bit
                work[at % len(work)] ^= 1 << choose.randrange(8)
            case 1 if work:  # a byte
                work[at % len(work)] = choose.choice([0, 1, 127, 128, 255, choose.randrange(256)])
            case 2:  # the rest is missing
                del work[at:]
            case 3:  # a part is missing
                del work[at : at + choose.choice([1, 2, 4, 8, 16])]
            case 4:  # a part comes twice
                work[at:at] = work[at : at + choose.choice([1, 4, 8, 32, len(work)])]
            case 5:  # something else comes in between
                work[at:at] = choose.randbytes(choose.choice([1, 4, 8, 30]))
            case _:  # a number is huge, or negative
                number = choose.choice(HUGE)
                size = choose.choice([4, 8])
                packed = struct.pack("<Q", number % (1 << 64))[:size]
                start = at - at % size if choose.random() < 0.5 else at
                work[start : start + size] = packed
    return bytes(work)


@contextmanager
def little_memory(nbytes: int = 256 << 20) -> Iterator[None]:
    """What is done in here must not raise the most memory that the process ever had by more than this."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    yield
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert after - before < nbytes, f"{(after - before) >> 20} MiB more than before"
