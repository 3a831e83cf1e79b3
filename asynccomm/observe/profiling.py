"""Events for torch's profiler, with the tensors' shapes.

A comm's calls are events such as ``asynccomm::all_reduce``. The calls of torch's groups are, as from all backends of
torch, events such as ``asynccomm:all_reduce`` around these.

An event spans the call, which starts the operation. Without these events, a profile on torch before 2.14 does not show
a Python group at all: torch's dispatcher then records calls (``c10d::allreduce_``) only for torch's own groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Final, ParamSpec, TypeVar

from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

P = ParamSpec("P")
T = TypeVar("T")


_named: Final = ContextVar("asynccomm.observe.profiling.named", default="")


@contextlib.contextmanager
def record_comm(name: str) -> Iterator[None]:
    """Name the events of this task's calls inside the block ``name``, in place of the names of their operations.

    Raises: TypeError.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r}")
    token = _named.set(name)
    try:
        yield
    finally:
        _named.reset(token)


def is_profiling() -> bool:
    """Whether torch's profiler is running in this process."""
    return profiler._is_profiler_enabled


def recorded(name: str, values: Iterable[Any], call: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``call`` in an event with the shapes of the tensors among ``values``.

    Args:
        name: of the event, outside of :func:`record_comm`.
    """
    name = _named.get() or name

    def call_recorded(*arguments: P.args, **options: P.kwargs) -> T:
        with _RecordFunctionFast(name, list(_tensors(values))):
            return call(*arguments, **options)

    return call_recorded


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
