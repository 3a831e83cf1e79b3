"""The context of a backend that connects without its peer."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from asynccomm import MemoryStore
from asynccomm.backends.base import BackendContext, RankInfo
from asynccomm.core.mailbox import Mailbox
from asynccomm.ops.validation import CommInfo


def rank_0_of_2(**arguments: Any) -> BackendContext:
    """A context of rank 0 of two ranks on one host, on the running loop; ``arguments`` replace its fields."""
    return BackendContext(
        **{
            "group": CommInfo("t", 0, 2, torch.device("cpu")),
            "members": (RankInfo(0, "host", 1), RankInfo(1, "host", 2)),
            "store": MemoryStore(),
            "mailbox": Mailbox(asyncio.get_running_loop()),
            "timeout": 3600.0,
            "on_error": lambda error: None,
        }
        | arguments
    )
