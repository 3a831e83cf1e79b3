"""The messages that the ranks exchange when they close.

gloo fails an operation whose connection is closed, even if all its data has arrived, unless its thread has processed
the data. A rank that is done therefore keeps its connections open until the other ranks are done as well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

from asynccomm.backends.gloo.torch_gloo import GOODBYE_TAG, GlooGroup


def say_goodbye(
    gloo: GlooGroup, rank: int, size: int, seconds: float, *, clock: Callable[[], float] = time.monotonic
) -> None:
    """Send a goodbye to all ranks, and block until all goodbyes have arrived, at most ``seconds``.

    Ranks that closed earlier, or died, are not waited for. A rank that closes later than that finds the group broken,
    as it would without the wait.

    Args:
        gloo: a group on which no other message uses ``GOODBYE_TAG``; broken if a rank takes too long.
    """
    end = clock() + seconds
    requests = []
    for peer in range(size):
        if peer != rank:
            with contextlib.suppress(RuntimeError):
                for transfer in (gloo.send, gloo.recv):
                    requests.append(transfer(torch.zeros(1, dtype=torch.uint8, device="cpu"), peer, GOODBYE_TAG))
    for request in requests:
        with contextlib.suppress(RuntimeError):
            request.wait(max(end - clock(), 0.001))
