"""How CUDA loads kernels, and why that matters here.

By default CUDA loads a kernel at its first use, and may wait there for all running kernels, see
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#lazy-loading ("Concurrent Execution"). Kernels of NCCL run until
the other rank's kernels run. So two ranks that exchange data can wait for each other for ever, in torch or in a step of
this backend, and only the deadline ends that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VARIABLE: Final = "CUDA_MODULE_LOADING"
ADVICE: Final = (
    "CUDA loads a kernel at its first use, and may wait there for all running kernels: two ranks that exchange data "
    f"can wait for each other for ever; {VARIABLE}=EAGER loads all kernels at the start"
)


def mode(environ: Mapping[str, str]) -> str:
    """The mode of a process with these environment variables: LAZY, which is the default, or EAGER."""
    return environ.get(VARIABLE, "LAZY").upper()


def advice(environ: Mapping[str, str]) -> str:
    """ADVICE, unless all kernels are loaded at the start."""
    return "" if mode(environ) == "EAGER" else ADVICE
