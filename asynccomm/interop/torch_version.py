"""What differs between the versions of torch.distributed, 2.11 to 2.15; found out by trying, here and nowhere else.

- torch 2.15 takes backends that are written in Python: a group of torch's own calls them through its dispatcher, so
  that hooks, dispatch modes and the profiler see what is called. Before, a Python group must be a ``ProcessGroup``
  itself, which nothing stands in front of.
- A ``ProcessGroup`` of a Python class can be made with its store in 2.15, and only without before.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from torch._C import _distributed_c10d as c10d

__all__ = ["PYTHON_BACKENDS", "checked_limit", "group_arguments", "time_limit"]


def _takes_backends() -> bool:
    class Trial(c10d.Backend):
        pass

    try:
        Trial(0, 1)
    except TypeError:
        return False
    return True


PYTHON_BACKENDS: Final = _takes_backends()  #: whether a Python class can be a backend of a group of torch's


def group_arguments(store: Any, rank: int, size: int) -> tuple[Any, ...]:
    """What a Python ``ProcessGroup`` is made from."""
    return (store, rank, size) if PYTHON_BACKENDS and store is not None else (rank, size)


def time_limit(options: Any) -> timedelta | None:
    """The time limit that options of one call carry; None: none, which torch writes as a negative one."""
    timeout: timedelta | None = getattr(options, "timeout", None)
    return None if timeout is None else checked_limit(timeout)


def checked_limit(timeout: timedelta) -> timedelta | None:
    """The same for one that is given by itself. Zero, which is as good as over, is as short as one can be."""
    return max(timeout, timedelta(microseconds=1)) if timeout >= timedelta(0) else None
