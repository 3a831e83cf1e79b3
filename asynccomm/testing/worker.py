"""A rank process of the pytest plugin: imports everything once, then runs one test after another.

``python -m asynccomm.testing.worker FD`` with FD its end of a socket pair. The main thread runs tests; another reads
messages, so that a hanging test can still be asked where it is. The process ends with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import util as assertion_util
from _pytest.config import Config, _prepareconfig, apply_warning_filters
from _pytest.pathlib import ImportMode, import_path

from asynccomm.connect import new_comm
from asynccomm.errors import AbortedError
from asynccomm.testing.messages import Failed, Job, Passed, Setup, ShowStacks, Skipped, Stacks
from asynccomm.testing.stacks import describe

PR_SET_PDEATHSIG = 1
PACKAGE = str(Path(__file__).parent.parent) + os.sep

__all__ = ["main"]


class Worker:
    """One rank process."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_thread = threading.get_ident()
        self._sending = threading.Lock()
        self._config = self._set_up(channel.recv())

    def _set_up(self, setup: Setup) -> Config:
        os.chdir(setup.cwd)
        sys.path[:] = setup.sys_path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this package is imported already, and need not be rewritten
            config = _prepareconfig(setup.pytest_args)  # installs the import hook that rewrites assertions

        def explain(op: str, left: object, right: object) -> str | None:
            for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
                if lines:
                    return "\n~".join(line.replace("\n", "\\n") for line in lines)
            return None

        assertion_util._reprcompare = explain
        return config

    def serve(self) -> None:
        """Run jobs for ever."""
        threading.Thread(target=self._listen, name="asynccomm-worker-messages", daemon=True).start()
        self._send("ready")
        while True:
            job = self._jobs.get()
            report = self._run(job)
            sys.stdout.flush()
            sys.stderr.flush()
            self._send(report)

    def _send(self, message: object) -> None:
        with self._sending:
            self._channel.send(message)

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.recv()
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone, and with it whoever could be interested
            if isinstance(message, ShowStacks):
                self._send(Stacks(describe(self._main_thread, self._loop)))
            else:
                self._jobs.put(message)

    def _run(self, job: Job) -> Passed | Skipped | Failed:
        os.environ.update(job.env)
        start = time.monotonic()
        try:
            with warnings.catch_warnings():
                apply_warning_filters(job.warning_filters, [])
                function = self._find(job)
                with asyncio.Runner() as runner:
                    self._loop = runner.get_loop()
                    runner.run(self._call(function, job))
        except pytest.skip.Exception as exc:
            return Skipped(str(exc))
        except (KeyboardInterrupt, Exception, pytest.fail.Exception, SystemExit) as exc:
            return self._failed(exc, job)
        finally:
            self._loop = None
            for name in job.env:
                os.environ.pop(name, None)
        return Passed(time.monotonic() - start)

    def _find(self, job: Job) -> Callable[..., Awaitable[object]]:
        config = self._config
        module = import_path(
            Path(job.path),
            mode=ImportMode(config.getoption("importmode")),
            root=config.rootpath,
            consider_namespace_packages=config.getini("consider_namespace_packages"),
        )
        *classes, name = job.qualname.split(".")
        owner = reduce(getattr, classes, module)
        if inspect.isclass(owner):
            owner = owner()
        return getattr(owner, name)  # type: ignore[no-any-return]

    async def _call(self, function: Callable[..., Awaitable[object]], job: Job) -> None:
        arguments = pickle.loads(job.arguments)
        async with AsyncExitStack() as stack:
            if job.wants_comm:
                world = job.world
                arguments["comm"] = await stack.enter_async_context(
                    new_comm(world.backend, world.device, name="test", hints=world.hints, timeout=world.timeout)
                )
            await function(**arguments)

    def _failed(self, exc: BaseException, job: Job) -> Failed:
        info = pytest.ExceptionInfo.from_exception(exc)
        theirs = info.traceback.cut(path=job.path).filter(lambda entry: not _is_ours(str(entry.path)))
        info.traceback = theirs if len(theirs) else info.traceback
        by_peer = isinstance(exc, AbortedError) and exc.rank != job.rank
        text = str(info.getrepr(style="short" if by_peer else "long", chain=not by_peer))
        return Failed(info.exconly(tryshort=True), text, exc.rank if isinstance(exc, AbortedError) and by_peer else None)


def _is_ours(path: str) -> bool:
    return path.startswith(PACKAGE)


def main() -> None:
    """Serve the descriptor given on the command line."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    worker = Worker(Connection(int(sys.argv[1])))
    worker.serve()


if __name__ == "__main__":
    main()
