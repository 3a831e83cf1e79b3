"""Options of torchcomms, with its defaults and setters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from torch import distributed as dist

from asynccomm.options import DEFAULT_TIMEOUT
from asynccomm.store.base import Store


@dataclass(slots=True)
class CommOptions:
    """Options for making a comm; ``TorchComm.get_options()`` gives a copy of a comm's."""

    abort_process_on_timeout_or_error: bool = False
    timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT)  #: for connecting, and of an operation
    store: dist.Store | Store | str | None = None
    hints: dict[str, str] = field(default_factory=dict)
    high_priority_stream: bool = False


@dataclass(slots=True)
class BatchP2POptions:
    """Options of one batch of messages."""

    hints: Mapping[str, str] | None = None
    timeout: timedelta | None = None  #: None: that of the comm
