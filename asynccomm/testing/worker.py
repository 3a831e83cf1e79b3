"""A rank process of the pytest plugin: imports everything once, then runs one test after another.

``python -m asynccomm.testing.worker FD``, where FD is the process's end of a socket pair. The main thread runs tests;
another thread reads messages, so that a hanging test can still report its stacks. The process ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import queue
import signal
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import dropwhile
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

import pytest
from _pytest._code import Traceback, TracebackEntry, filter_traceback
from _pytest.assertion import util as assertion_util
from _pytest.config import Config, _prepareconfig, apply_warning_filters

from asynccomm.core.stacks import format_stacks
from asynccomm.core.work import Work
from asynccomm.errors import AbortedError
from asynccomm.testing import steps
from asynccomm.testing.calls import CallWatch
from asynccomm.testing.debugging import RankDebugger
from asynccomm.testing.isolation import (
    ImportedFiles,
    ProcessState,
    enter,
    left_behind,
    open_streams,
    resource_limits,
    seed_all,
)
from asynccomm.testing.measuring import RankCoverage
from asynccomm.testing.project import ProjectModules
from asynccomm.testing.protocol import (
    DebuggerInput,
    DumpStacks,
    Exited,
    Failed,
    Filters,
    Passed,
    Preparation,
    RankTask,
    Setup,
    Skipped,
    StackDump,
    Stale,
    Surroundings,
)

PR_SET_PDEATHSIG = 1
OWN_VARIABLES = ("OMP_NUM_THREADS",)  # of this process, where pytest's process does not set them
PLUGIN = str(Path(__file__).parent) + os.sep
PACKAGE = str(Path(__file__).parent.parent) + os.sep
STDLIB = sysconfig.get_path("stdlib") + os.sep
INSTALLED = STDLIB + "site-packages" + os.sep

__all__ = ["main"]


class Worker:
    """One rank process: its channel, and the tests to run."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._jobs: queue.SimpleQueue[RankTask | Preparation] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_thread = threading.get_ident()
        self._sending = threading.Lock()
        setup: Setup = channel.recv()
        files = ImportedFiles()  # before pytest imports conftest.py files
        self._modules = ProjectModules(self._set_up(setup), files)
        self._loaded: set[Path] = set()  # files of tests
        self._streams = open_streams()
        self._limits = resource_limits()
        self._not_restored = 0  # number of jobs after which the state of the process could not be set back
        self._debugger = RankDebugger(self._send)
        self._own_variables = {name: os.environ[name] for name in OWN_VARIABLES if name in os.environ}
        gc.collect()
        gc.freeze()  # imported modules stay for ever; later collections skip frozen objects
        self._coverage = RankCoverage(setup.coverage)

    def _set_up(self, setup: Setup) -> Config:
        os.chdir(setup.cwd)
        sys.path[:] = setup.sys_path
        seed_all(setup.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pytest warns that this package is already imported and so not rewritten
            config = _prepareconfig(setup.pytest_args)  # installs the import hook for rewriting assertions

        def explain(op: str, left: object, right: object) -> str | None:
            for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
                if lines:
                    return "\n~".join(line.replace("\n", "\\n") for line in lines)
            return None

        assertion_util._reprcompare = explain
        if config.getoption("runxfail"):
            pytest.xfail = _no_xfail  # type: ignore[assignment]  # as pytest does in its own process
        return config

    def serve(self) -> None:
        """Run jobs for ever."""
        threading.Thread(target=self._listen, name="asynccomm-worker-messages", daemon=True).start()
        self._send("ready")
        while True:
            job = self._jobs.get()
            reply = self._prepare(job) if isinstance(job, Preparation) else self._run(job)
            self._coverage.save()
            for stream in sys.stdout, sys.stderr:
                # the test has closed the stream or its descriptor, or the rank has no such stream
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            self._send(reply)

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
                self._send(StackDump(format_stacks(self._main_thread, self._loop, steps.__file__)))
            elif isinstance(message, DebuggerInput):
                self._debugger.feed(message)
            else:
                self._jobs.put(message)

    @contextlib.contextmanager
    def _state_of(self, surroundings: Surroundings, filters: Filters, env: dict[str, str]) -> Iterator[None]:
        """The process in the state that a test sees; afterwards everything is set back."""
        self._not_restored += 1
        state = ProcessState()
        try:
            with warnings.catch_warnings():
                apply_warning_filters(filters.ini, filters.command_line)
                apply_warning_filters(filters.markers, [])
                enter(surroundings, {**self._own_variables, **surroundings.environ, **env})
                yield
        finally:
            state.restore()
            self._not_restored -= 1
            self._modules.update()

    def _prepare(self, job: Preparation) -> str | Stale:
        """Import the test's file, unless that must be left to a new process."""
        path = Path(job.path)
        reason = "the state before an earlier test could not be set back" if self._not_restored else left_behind()
        if reason is None and open_streams() != self._streams:
            reason = "a test has closed or replaced one of the descriptors 0 to 2"
        if reason is None and resource_limits() != self._limits:
            reason = "a test has lowered a hard resource limit, which this process may not raise"
        reason = reason or self._modules.stale(path, job.surroundings.sys_path or sys.path)
        if reason is not None:
            return Stale(reason)
        if path not in self._loaded:
            # an error of the import is for the test to report, which imports again
            with contextlib.suppress(BaseException), self._state_of(job.surroundings, job.filters, {}):
                self._modules.load(path, job.seed)
                self._loaded.add(path)
                gc.collect()
                gc.freeze()  # as in the constructor: each test ends with a collection
        return "ready"

    def _run(self, job: RankTask) -> Passed | Skipped | Exited | Failed:
        start = time.monotonic()
        self._debugger.rank = job.rank
        watch = CallWatch()
        unretrieved: list[str] = []
        try:
            with self._state_of(job.surroundings, job.filters, dict(job.env)):
                seed_all(job.seed)
                test = steps.RankSteps(job, self._modules, self._debugger)
                with asyncio.Runner() as runner:
                    self._loop = runner.get_loop()
                    error = runner.run(test.run())
                if error is not None:
                    try:
                        raise error
                    finally:
                        del error  # its traceback has this frame: a cycle
                unretrieved = test.unretrieved
        except steps.NO_ERRORS as exc:
            return Skipped(str(exc), xfail=isinstance(exc, pytest.xfail.Exception))
        except pytest.exit.Exception as exc:
            return Exited(str(exc), exc.returncode)
        except BaseException as exc:  # a test may raise anything: CancelledError, SystemExit, pytest.fail
            return self._failed(exc, job)._replace(calls=watch.calls())
        finally:
            self._loop = None
            watch.stop()
        return Passed(time.monotonic() - start, watch.calls(), unretrieved)

    def _failed(self, exc: BaseException, job: RankTask) -> Failed:
        info = pytest.ExceptionInfo.from_exception(exc)
        theirs = _after_the_plugin(info.traceback)
        info.traceback = theirs or info.traceback[-1:]
        awaited = _awaited(exc.__traceback__)
        exc.__traceback__ = _linked(info.traceback)  # pytest prints this one of exception groups, not the one of info
        by_peer = isinstance(exc, AbortedError) and exc.rank != job.rank
        text = str(info.getrepr(style="long" if theirs and not by_peer else "short", chain=not by_peer))
        aborted_by = exc.rank if isinstance(exc, AbortedError) and by_peer else None
        return Failed(info.exconly(tryshort=True), text, aborted_by, awaited, kinds=_pickled_kinds(type(exc)))


def _no_xfail(reason: str = "") -> None:
    pass


_no_xfail.Exception = pytest.xfail.Exception  # type: ignore[attr-defined]


def _awaited(traceback: TracebackType | None) -> str | None:
    """The operation whose Work raised the exception."""
    work = None
    for frame, _ in walk_tb(traceback):
        owner = frame.f_locals.get("self")
        if isinstance(owner, Work):
            work = owner
    return None if work is None else f"#{work.seq} {work.op}"


def _pickled_kinds(kind: type[BaseException]) -> bytes:
    """The classes of an exception, as far as they can be pickled: not those of a function."""
    kinds = []
    for each in kind.__mro__:
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            pickle.dumps(each)
            kinds.append(each)
    return pickle.dumps(kinds)


def _after_the_plugin(traceback: Traceback) -> Traceback:
    """The frames of a test or a fixture and of its callees, without this package's; empty if it has none."""
    called = Traceback(dropwhile(_calls_tests, traceback))
    if called and _is_ours(called[0]):  # the comm of the test failed to open or close
        return Traceback([])
    return called.filter(lambda entry: not _is_ours(entry))


def _linked(traceback: Traceback) -> TracebackType | None:
    """The frames as a traceback of Python."""
    first = None
    for entry in reversed(traceback):
        raw = entry._rawentry
        first = TracebackType(first, raw.tb_frame, raw.tb_lasti, raw.tb_lineno)
    return first


def _calls_tests(entry: TracebackEntry) -> bool:
    """Whether the code of a frame is the plugin's, pytest's or Python's own."""
    path = str(entry.path)
    standard = path.startswith(STDLIB) and not path.startswith(INSTALLED)
    return standard or path.startswith(PLUGIN) or not filter_traceback(entry)


def _is_ours(entry: TracebackEntry) -> bool:
    return str(entry.path).startswith(PACKAGE)


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
