"""Registration of hooks: functions that a TorchComm calls before and after each operation, and when it is aborted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol, final

from asynccomm.comm.comm import Comm
from asynccomm.compat.torchcomms.work import TorchWork

_numbers: Final = itertools.count()  # of the operations of this process


@final
@dataclass(frozen=True, slots=True)
class OpArguments:
    """The arguments of one operation, as hooks get them."""

    arguments: tuple[Any, ...]  #: tensors, root and reduction, in the order of the method's parameters
    async_op: bool
    hints: Mapping[str, str] | None
    timeout: timedelta | None
    work: TorchWork | None = None  #: for post hooks


@final
class RemovableHandle:
    """A registered hook; :meth:`remove` ends its registration."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        """Remove the hook. Idempotent."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


@final
class Hooks:
    """The hooks of one comm."""

    def __init__(self) -> None:
        self.before: list[Callable[[str, int, OpArguments], object]] = []
        self.after: list[Callable[[int, OpArguments], object]] = []
        self.on_abort: list[Callable[[], object]] = []
        self.on_split: list[Callable[[str, Sequence[int], Any], object]] = []  # name, ranks, and the TorchComm or None

    def around(self, name: str, given: OpArguments, call: Callable[[], TorchWork]) -> TorchWork:
        """Run ``call`` between the hooks. An exception of a hook that runs before prevents the call."""
        number = next(_numbers)
        for before in list(self.before):
            before(name, number, given)
        work = call()
        if self.after:
            done = OpArguments(given.arguments, given.async_op, given.hints, given.timeout, work)
            for after in list(self.after):
                after(number, done)
        return work

    @staticmethod
    def register(hooks: list[Any], hook: Any) -> RemovableHandle:
        """Add ``hook``. Raises: TypeError if it cannot be called."""
        if not callable(hook):
            raise TypeError(f"hook must be a function, got {hook!r}")
        registered = partial(hook)  # differs from another registration of the same function
        hooks.append(registered)
        return RemovableHandle(hooks, registered)


class HookedComm(Protocol):
    """The part of a TorchComm that ready-made hooks use."""

    @property
    def _comm(self) -> Comm: ...

    @property
    def _hooks(self) -> Hooks: ...

    def get_name(self) -> str: ...

    def get_rank(self) -> int: ...

    def get_size(self) -> int: ...

    def register_pre_hook(self, hook: Callable[[str, int, OpArguments], object]) -> RemovableHandle: ...

    def register_post_hook(self, hook: Callable[[int, OpArguments], object]) -> RemovableHandle: ...
