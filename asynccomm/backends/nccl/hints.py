"""The hints of the NCCL backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from asynccomm.backends.base import BackendContext
from asynccomm.backends.nccl.api import Config
from asynccomm.backends.registry import load_backend
from asynccomm.options import whole_number

_CPU: Final = torch.device("cpu")
_NUMBERS: Final = ("min_ctas", "max_ctas", "cga_cluster_size", "traffic_class")
HINTS: Final[Mapping[str, str]] = {
    "blocking": "1 (default): a call of NCCL launches; 0: a thread of NCCL's does, which abort() can stop at any time",
    "connect": "when to connect NCCL: eager (default: with the comm) or lazy (with the first collective)",
    "side": "backend of the channel on the host: auto (default), shm or gloo",
    "min_ctas": "blocks of the GPU that an NCCL kernel takes at least",
    "max_ctas": "blocks of the GPU that an NCCL kernel takes at most",
    "cga_cluster_size": "size of the clusters that these blocks form, 0 to 8",
    "traffic_class": "traffic class for network operations",
    "net_name": "network that NCCL is to use, such as IB or Socket",
}


def check(hints: Mapping[str, str]) -> None:
    """Raise ``ValueError`` naming a hint with an invalid value."""
    for key in _NUMBERS:
        if key in hints and whole_number(hints[key]) is None:
            raise ValueError(f"hint {key!r} must be a number, got {hints[key]!r}")
    if hints.get("blocking", "1") not in ("0", "1"):
        raise ValueError(f"hint 'blocking' must be 0 or 1, got {hints['blocking']!r}")
    if hints.get("connect", "eager") not in ("eager", "lazy"):
        raise ValueError(f"hint 'connect' must be eager or lazy, got {hints['connect']!r}")
    if hints.get("side", "auto") != "auto":
        try:
            load_backend(hints["side"], _CPU)
        except ValueError as exc:
            raise ValueError(f"hint 'side' must name a backend for the CPU: {exc}") from exc


def config_of(context: BackendContext) -> Config:
    """The configuration of NCCL's communicators, from the hints."""
    hints = context.hints
    numbers: dict[str, Any] = {key: int(hints[key]) for key in _NUMBERS if key in hints}
    return Config(
        name=context.group.name, net_name=hints.get("net_name"), blocking=hints.get("blocking") != "0", **numbers
    )
