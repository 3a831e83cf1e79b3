"""Settings of CUDA in the environment that decide whether operations can wait for each other for ever.

By default CUDA loads a kernel at its first use, and may wait there for all running kernels, see
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#lazy-loading ("Concurrent Execution"). Kernels of NCCL run until
the other rank's kernels run. So two ranks that exchange data can wait for each other for ever, in torch or in a step of
this backend, and only the deadline ends that.

The streams of a process share CUDA_DEVICE_MAX_CONNECTIONS hardware queues: 8 by default, 2 for a client of MPS. Work
that waits, as the second kernel of a stream does, holds up the streams that share its queue. NCCL adds a stream of its
own to each communicator. So with few queues, kernels that wait for other ranks can hold up each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MODULE_LOADING: Final = "CUDA_MODULE_LOADING"
MAX_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_CONNECTIONS: Final = 32  # the most that CUDA allows
LOADING_ADVICE: Final = (
    "CUDA loads a kernel at its first use, and may wait there for all running kernels: two ranks that exchange data "
    f"can wait for each other for ever; {MODULE_LOADING}=EAGER loads all kernels at the start"
)
CONNECTIONS_ADVICE: Final = (
    "streams that share a hardware queue hold up each other: ranks that exchange data can wait for ever, and "
    f"{MAX_CONNECTIONS}={MOST_CONNECTIONS} allows as many queues (less under MPS, whose clients share 96)"
)


def module_loading(environ: Mapping[str, str]) -> str:
    """The mode of a process with these environment variables: LAZY, which is the default, or EAGER."""
    return environ.get(MODULE_LOADING, "LAZY").upper()


def max_connections(environ: Mapping[str, str]) -> str:
    """The number of hardware queues of a process with these environment variables, as they say it; by default 8."""
    return environ.get(MAX_CONNECTIONS, "8")


def advice(environ: Mapping[str, str]) -> list[str]:
    """Advice on the settings that can make operations wait for ever. A number of queues that someone chose is left."""
    texts = []
    if module_loading(environ) != "EAGER":
        texts.append(LOADING_ADVICE)
    if MAX_CONNECTIONS not in environ:
        texts.append(CONNECTIONS_ADVICE)
    return texts
