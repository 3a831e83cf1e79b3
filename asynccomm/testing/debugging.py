"""The Python debugger in a rank, on the terminal of pytest: one end of the conversation for each process.

A rank has no terminal. Its debugger asks pytest's process for one; that process serves one rank at a time, from each
stop of the debugger to its next step, so that ranks can be stepped through an operation in turn.
"""

from __future__ import annotations

import bdb
import pdb
import queue
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, final

import pytest

from asynccomm.errors import describe_exception
from asynccomm.testing.protocol import DebuggerInput, DebuggerOutput, DebuggerPrompt, DebuggerStart, DebuggerStop

__all__ = ["DebuggerTerminal", "RankDebugger", "leave_to_ranks"]


@final
class _Console:
    """The file that a rank's debugger reads and writes."""

    def __init__(self, send: Callable[[object], object], lines: queue.SimpleQueue[str]) -> None:
        self._send = send
        self._lines = lines

    def write(self, text: str) -> int:
        self._send(DebuggerOutput(text))
        return len(text)

    def flush(self) -> None:
        pass

    def readline(self) -> str:
        self._send(DebuggerPrompt())
        return self._lines.get()


class _RankPdb(pdb.Pdb):
    """A debugger in which every stop is a conversation of its own."""

    def __init__(self, console: Any, send: Callable[[object], object], rank: int) -> None:
        super().__init__(stdin=console, stdout=console, nosigint=True)
        self.use_rawinput = False
        self.prompt = f"(Pdb rank {rank}) "
        self._send = send
        self.title = f"rank {rank} stopped"

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        self._send(DebuggerStart(self.title))
        try:
            super().interaction(frame, traceback)
        finally:
            self._send(DebuggerStop(bool(self.quitting)))


@final
class RankDebugger:
    """The debugger of a rank process, for ``breakpoint()``, ``pdb.set_trace()`` and exceptions.

    Args:
        send: sends a message to pytest's process.
    """

    def __init__(self, send: Callable[[object], object]) -> None:
        self.rank = 0  #: of the test that runs
        self._send = send
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        sys.breakpointhook = self._stop_caller
        pdb.set_trace = self._stop_caller

    def feed(self, message: DebuggerInput) -> None:
        """A line of the terminal's input. From any thread."""
        self._lines.put(message.line)

    def _new(self) -> _RankPdb:
        return _RankPdb(_Console(self._send, self._lines), self._send, self.rank)

    def _stop_caller(self, *_: object, **__: object) -> None:
        self._new().set_trace(sys._getframe(1))

    def post_mortem(self, exc: BaseException) -> None:
        """Debug ``exc``. Blocks until the user is done."""
        traceback = exc.__traceback__
        if isinstance(exc, bdb.BdbQuit) or traceback is None:
            return
        debugger = self._new()
        debugger.title = f"rank {self.rank} failed: {describe_exception(exc)}"
        debugger.reset()
        debugger.interaction(None, traceback)


@final
class DebuggerTerminal:
    """The terminal of pytest's process, for the debugger of one rank at a time."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def start(self, title: str) -> None:
        """Give the terminal to a rank."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend(in_=True)
        self._config.hook.pytest_enter_pdb(config=self._config, pdb=None)  # pytest-timeout stops counting
        writer = self._config.get_terminal_writer()
        writer.line()
        writer.sep(">", title)

    def write(self, text: str) -> None:
        """Print ``text``."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def read(self) -> str:
        """A line of input; empty at its end."""
        return sys.stdin.readline()

    def stop(self, message: DebuggerStop) -> None:
        """Take the terminal back. Raises: pytest.exit.Exception if the user has ended the debugger."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.resume()
        self._config.hook.pytest_leave_pdb(config=self._config, pdb=None)
        if message.quit:
            pytest.exit("Quitting debugger")


@final
class _OutsideOfRanks:
    """pytest's own debugger of exceptions, for tests that do not run on ranks."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
        if not isinstance(node, pytest.Item) or node.get_closest_marker("ranks") is None or report.when != "call":
            self._own.pytest_exception_interact(node, call, report)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._own.pytest_internalerror(excinfo)


def leave_to_ranks(config: pytest.Config) -> None:
    """Have pytest not debug the failure reports of ranks, which were debugged in the ranks."""
    own = config.pluginmanager.get_plugin("pdbinvoke")
    if own is not None:
        config.pluginmanager.unregister(own)
        config.pluginmanager.register(_OutsideOfRanks(own), "pdbinvoke")
