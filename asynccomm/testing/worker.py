"""A rank process of the pytest plugin: imports everything once, then runs one test after another.

``python -m asynccomm.testing.worker FD``, where FD is the process's end of a socket pair. The main thread runs tests;
another thread reads messages, so that a hanging test can still report its stacks. The process ends with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
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
from traceback import walk_tb
from types import TracebackType

import pytest
from _pytest.assertion import util as assertion_util
from _pytest.config import Config, _prepareconfig, apply_warning_filters
from _pytest.pathlib import ImportMode, import_path

from asynccomm.comm.new_comm import new_comm
from asynccomm.core.stacks import format_stacks
from asynccomm.core.work import Work
from asynccomm.errors import AbortedError
from asynccomm.testing.protocol import DumpStacks, Failed, Passed, RankTask, Setup, Skipped, StackDump

PR_SET_PDEATHSIG = 1
OWN_SECONDS = 0.05  # before a failed rank aborts: other ranks may fail in the same place, with reports of their own
PACKAGE = str(Path(__file__).parent.parent) + os.sep

__all__ = ["main"]


class Worker:
    """One rank process: its channel, and the tests to run."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._jobs: queue.SimpleQueue[RankTask] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_thread = threading.get_ident()
        self._sending = threading.Lock()
        self._config = self._set_up(channel.recv())
        gc.collect()
        gc.freeze()  # imported modules stay for ever; later collections skip frozen objects

    def _set_up(self, setup: Setup) -> Config:
        os.chdir(setup.cwd)
        sys.path[:] = setup.sys_path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pytest warns that this package is already imported and so not rewritten
            config = _prepareconfig(setup.pytest_args)  # installs the import hook for rewriting assertions

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
                os._exit(0)  # the parent is dead: no process needs a report
            if isinstance(message, DumpStacks):
                self._send(StackDump(format_stacks(self._main_thread, self._loop, __file__)))
            else:
                self._jobs.put(message)

    def _run(self, job: RankTask) -> Passed | Skipped | Failed:
        start = time.monotonic()
        os.environ.update(job.env)
        try:
            with warnings.catch_warnings():
                apply_warning_filters(job.filters.ini, job.filters.command_line)
                apply_warning_filters(job.filters.markers, [])
                function = self._find(job)
                with asyncio.Runner() as runner:
                    self._loop = runner.get_loop()
                    runner.run(self._call(function, job))
        except pytest.skip.Exception as exc:
            return Skipped(str(exc))
        except BaseException as exc:  # a test may raise anything: CancelledError, SystemExit, pytest.fail
            return self._failed(exc, job)
        finally:
            self._loop = None
            for name in job.env:
                os.environ.pop(name, None)
        return Passed(time.monotonic() - start)

    def _find(self, job: RankTask) -> Callable[..., Awaitable[object]]:
        config, path = self._config, Path(job.path)
        mode = ImportMode(config.getoption("importmode"))
        namespaces = config.getini("consider_namespace_packages")
        # conftest modules may define the classes of the test's arguments, or explain its assertions
        config.pluginmanager._loadconftestmodules(path, mode, config.rootpath, consider_namespace_packages=namespaces)
        module = import_path(path, mode=mode, root=config.rootpath, consider_namespace_packages=namespaces)
        *classes, name = job.qualname.split(".")
        owner = reduce(getattr, classes, module)
        if inspect.isclass(owner):
            owner = owner()
        return getattr(owner, name)  # type: ignore[no-any-return]

    async def _call(self, function: Callable[..., Awaitable[object]], job: RankTask) -> None:
        arguments = pickle.loads(job.arguments)
        async with AsyncExitStack() as stack:
            if job.wants_comm:
                world = job.world
                arguments["comm"] = await stack.enter_async_context(
                    new_comm(world.backend, world.device, name="test", hints=world.hints, timeout=world.timeout)
                )
            try:
                await function(**arguments)
            except BaseException:
                await asyncio.sleep(OWN_SECONDS)
                raise

    def _failed(self, exc: BaseException, job: RankTask) -> Failed:
        info = pytest.ExceptionInfo.from_exception(exc)
        theirs = info.traceback.cut(path=job.path).filter(lambda entry: not _is_ours(str(entry.path)))
        info.traceback = theirs if len(theirs) else info.traceback
        by_peer = isinstance(exc, AbortedError) and exc.rank != job.rank
        text = str(info.getrepr(style="short" if by_peer else "long", chain=not by_peer))
        aborted_by = exc.rank if isinstance(exc, AbortedError) and by_peer else None
        return Failed(info.exconly(tryshort=True), text, aborted_by, _awaited(exc.__traceback__))


def _awaited(traceback: TracebackType | None) -> str | None:
    """The operation whose Work raised the exception."""
    work = None
    for frame, _ in walk_tb(traceback):
        owner = frame.f_locals.get("self")
        if isinstance(owner, Work):
            work = owner
    return None if work is None else f"#{work.seq} {work.op}"


def _is_ours(path: str) -> bool:
    return path.startswith(PACKAGE)


def main() -> None:
    """Run a worker on the descriptor given on the command line."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()  # prints stacks on crashes, and on the pool's SIGABRT to an unresponsive process
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # a child that outlives this process would keep the channel open
    worker = Worker(Connection(descriptor))
    worker.serve()


if __name__ == "__main__":
    main()
