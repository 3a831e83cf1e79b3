"""What the ranks tell each other when they close.

gloo fails an operation whose connection is closed, even if all of its data have arrived, where its thread had no time
to look. So a rank that is done does not close its connections before the others are done as well.
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
    """Tell all ranks that this one is done, and block until all have said so, at most ``seconds``.

    Ranks that closed earlier, or died, are not waited for. A rank that takes longer finds the group broken, as it
    would without the wait.

    Args:
        gloo: a group whose ``GOODBYE_TAG`` nothing else uses; broken by a rank that takes too long.
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
