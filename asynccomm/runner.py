"""The program's entry point: ``asyncio.run`` on uvloop, if installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None, use_uvloop: bool | None = None) -> T:
    """Run ``main`` on a new event loop and return its result, like ``asyncio.run``.

    Args:
        main: a coroutine.
        debug: asyncio's debug mode.
        use_uvloop: whether to use uvloop; None: if installed.
    """
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("run() cannot be called from a running event loop: use `await` there")
    if use_uvloop is None:
        use_uvloop = find_spec("uvloop") is not None
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if use_uvloop:
        factory = import_module("uvloop").new_event_loop
    with asyncio.Runner(debug=debug, loop_factory=factory) as runner:
        return runner.run(main)
