"""Differences between the versions of torch.distributed, 2.11 to 2.15, detected by trial, in this module only.

- torch 2.14 accepts backends written in Python: a torch group calls them through torch's dispatcher, so hooks, dispatch
  modes and the profiler see the calls. Before, a Python group must itself be a ``ProcessGroup``, without a dispatcher.
- A Python ``ProcessGroup`` is created with its store where Python backends are accepted, and without a store before.
- The ``supports_*`` properties of a Python backend recurse until the stack overflows, unless the Python class has
  attributes of the same names. The set of properties differs by version, and a Python group that is its own backend has
  none of them.
- torch.compile must leave alone the methods that it cannot trace: see :func:`uncompiled`.
"""

from __future__ import annotations

from datetime import timedelta
from types import FunctionType
from typing import Any, Final, TypeVar

from torch._C import _distributed_c10d as c10d
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

T = TypeVar("T")
SKIP: Final = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # for a method, and for its callees


def _takes_backends() -> bool:
    class Trial(c10d.Backend):
        pass

    try:
        Trial(0, 1)
    except TypeError:
        return False
    return True


PYTHON_BACKENDS: Final = _takes_backends()  #: whether a Python class can be a backend of a torch group


def as_backend(cls: type[T]) -> type[T]:
    """A decorator: complete ``cls`` with all attributes of a backend that torch uses and ``cls`` does not define.

    Added ``supports_*`` attributes are False. Added methods and properties without an implementation in torch raise
    RuntimeError.
    """
    ours = [base for base in cls.__mro__ if base not in (c10d.Backend, c10d.ProcessGroup)]
    for name, member in vars(c10d.Backend).items():
        if name.startswith("__") or any(name in vars(base) for base in ours):
            continue
        if isinstance(member, property) and "supports" in name:
            setattr(cls, name, False)
        elif not hasattr(cls, name):
            setattr(cls, name, member if isinstance(member, type) else _unsupported(name, member))
    return cls


def _unsupported(name: str, member: Any) -> Any:
    def refuse(self: Any, *_: Any, **__: Any) -> bool:
        if name.startswith("supports"):
            return False
        raise RuntimeError(f"Backend {self.name()} does not support {name}")

    return property(refuse) if isinstance(member, property) else refuse


def uncompiled(cls: type[T]) -> type[T]:
    """A decorator: make torch.compile leave alone the methods that ``cls`` itself defines.

    torch.compile ends its graph before a call of such a method, and starts a new one after it. It cannot trace methods
    that connect, block or wait for other threads, and it reads attributes only of the classes of torch that it has
    rules for: without this decorator, a compiled function that calls one of our collectives fails. The decorator sets
    the marks that ``torch.compiler.disable`` leaves, without a wrapper around each call, and without importing the
    compiler, which takes seconds.
    """
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            method._torchdynamo_disable = True  # type: ignore[attr-defined]
            set_code_exec_strategy(method.__code__, SKIP)
    return cls


def group_arguments(store: Any, rank: int, size: int) -> tuple[Any, ...]:
    """Arguments for the constructor of a Python ``ProcessGroup``."""
    return (store, rank, size) if PYTHON_BACKENDS and store is not None else (rank, size)


def time_limit(options: Any) -> timedelta | None:
    """The timeout in the options of one call; None for no timeout, which torch writes as a negative one."""
    timeout: timedelta | None = getattr(options, "timeout", None)
    return None if timeout is None else checked_limit(timeout)


def checked_limit(timeout: timedelta) -> timedelta | None:
    """Convert torch's timeout: negative becomes None, and zero the shortest possible timeout."""
    return max(timeout, timedelta(microseconds=1)) if timeout >= timedelta(0) else None
