"""What differs between the versions of torch.distributed, 2.11 to 2.15; found out by trying, here and nowhere else.

- torch 2.14 takes backends that are written in Python: a group of torch's own calls them through its dispatcher, so
  that hooks, dispatch modes and the profiler see what is called. Before, a Python group must be a ``ProcessGroup``
  itself, which nothing stands in front of.
- A ``ProcessGroup`` of a Python class can be made with its store where backends can, and only without before.
- The properties of a Python backend that say whether it supports something call themselves until the stack is full,
  unless the Python class has attributes of their names. Which there are differs, and a Python group that is its own
  backend has none of them.
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


PYTHON_BACKENDS: Final = _takes_backends()  #: whether a Python class can be a backend of a group of torch's


def as_backend(cls: type[T]) -> type[T]:
    """A decorator: have ``cls`` answer all that torch asks a backend, also where it defines nothing itself.

    It supports nothing that it does not define: questions for that are answered by False, and calls that torch itself
    does not answer raise RuntimeError.
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
    """What a Python ``ProcessGroup`` is made from."""
    return (store, rank, size) if PYTHON_BACKENDS and store is not None else (rank, size)


def time_limit(options: Any) -> timedelta | None:
    """The time limit that options of one call carry; None: none, which torch writes as a negative one."""
    timeout: timedelta | None = getattr(options, "timeout", None)
    return None if timeout is None else checked_limit(timeout)


def checked_limit(timeout: timedelta) -> timedelta | None:
    """The same for one that is given by itself. Zero, which is as good as over, is as short as one can be."""
    return max(timeout, timedelta(microseconds=1)) if timeout >= timedelta(0) else None
