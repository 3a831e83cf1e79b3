"""Methods that torch.compile leaves alone: it ends its graph before a call of one, and goes on after it.

It cannot trace into what connects, blocks and waits for other threads, and looks at attributes of torch's own classes
only where it knows them: without this, a compiled function that calls a collective of ours fails. What is set here are
the marks that ``torch.compiler.disable`` leaves, without its wrappers around each call, and without the compiler, which
takes seconds to import.
"""

from __future__ import annotations

from types import FunctionType
from typing import Final, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

T = TypeVar("T")
SKIP: Final = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # it, and what it calls


def uncompiled(cls: type[T]) -> type[T]:
    """A decorator for classes: of the methods that ``cls`` itself defines."""
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            method._torchdynamo_disable = True  # type: ignore[attr-defined]
            set_code_exec_strategy(method.__code__, SKIP)
    return cls
