"""The list of checks, and their runner."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from inspect import getmembers, iscoroutinefunction
from types import ModuleType

from asynccomm.comm.comm import Comm
from asynccomm.testing.conformance import (
    aliasing,
    batches,
    coalesced,
    collectives,
    concurrency,
    dicts,
    dims,
    dtypes_and_views,
    experts,
    failures,
    groups,
    inplace,
    memory,
    objects,
    queues,
    scopes,
    uneven,
    windows,
    works,
)

__all__ = ["CHECKS", "Check", "check_backend"]

Check = Callable[[Comm], Awaitable[None]]


def _checks(module: ModuleType) -> list[Check]:
    return [
        function
        for name, function in getmembers(module, iscoroutinefunction)
        if not name.startswith("_") and function.__module__ == module.__name__
    ]


_TENSORS = (collectives, works, dims, uneven, coalesced, inplace, aliasing, dtypes_and_views, batches, experts)
_OTHERS = (objects, dicts, groups, concurrency, scopes, windows, memory, queues)
_HARMLESS = [check for module in (*_TENSORS, *_OTHERS) for check in _checks(module)]
_BREAKING = _checks(failures)
CHECKS: dict[str, Check] = {check.__name__: check for check in [*_HARMLESS, *_BREAKING]}


async def check_backend(
    make: Callable[[str], AbstractAsyncContextManager[Comm]], *, only: Sequence[str] | None = None
) -> None:
    """Run the suite on this rank; all other ranks must do the same at the same time.

    Args:
        make: opens a comm of all ranks under the given name, each time a new one.
        only: names of checks to run (see ``CHECKS``); None: all.

    Raises: AssertionError, or an exception of the backend, with a note that names the check.
    """
    chosen = list(CHECKS) if only is None else list(only)
    for name in chosen:
        if name not in CHECKS:
            raise ValueError(f"only: there is no check {name!r}; choose from {', '.join(CHECKS)}")
    async with make("conformance") as comm:
        for check in _HARMLESS:
            if check.__name__ in chosen:
                await _run(check, comm)
    for check in _BREAKING:
        if check.__name__ in chosen:
            async with make(f"conformance-{check.__name__}") as comm:
                await _run(check, comm)


async def _run(check: Check, comm: Comm) -> None:
    try:
        # the default device of new tensors; a check may name another
        with contextlib.nullcontext() if comm.device.type == "cpu" else comm.device:
            await check(comm)
    except Exception as exc:
        exc.add_note(f"in check {check.__name__!r} on rank {comm.rank} of {comm.size}, {comm.backend}")
        raise
