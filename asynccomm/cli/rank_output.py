"""The output of one rank: to the terminal behind its prefix, to its log file, and its tail for the report."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import IO, final

from asynccomm.cli.output import OutputSink, PipeReader, Prefixer, Tail
from asynccomm.cli.tracebacks import SeenTracebacks, TracebackFolder

FOLD_SECONDS = 0.1  # for a chain to follow a traceback
STACK_SECONDS = 2.0  # for the next line inside a traceback: Python searches all folders for the source of each frame


@final
class Terminal:
    """The launcher's stdout and stderr. If both are one file, they share one queue, so lines stay whole."""

    def __init__(self) -> None:
        self.tracebacks = SeenTracebacks()
        self.failed = False  #: whether output was lost, other than by a reader that has closed
        self.out: OutputSink = OutputSink(1, self._on_error)
        try:
            same = os.path.samestat(os.fstat(1), os.fstat(2))
        except OSError:  # one of them is closed
            same = False
        self.err: OutputSink = self.out if same else OutputSink(2, self._on_error)

    def _on_error(self, reason: str) -> None:
        self.report_loss(f"cannot write the output: {reason}")

    def report_loss(self, text: str) -> None:
        """Print a message for the user about output that is lost."""
        self.failed = True
        self.say(text)

    def say(self, text: str) -> None:
        """Print a message for the user on stderr."""
        self.err.write(f"asynccomm: {text}\n".encode(errors="replace"))

    async def drain(self) -> None:
        """Wait until all output is written. Cancelling is safe."""
        await self.out.drain()
        await self.err.drain()


@final
class LogFile:
    """A rank's log file, written at each line. The ranks go on when the disk is full; the loss is reported.

    Raises: OSError when the file cannot be created.
    """

    def __init__(self, path: Path, terminal: Terminal) -> None:
        self._path = path
        self._terminal = terminal
        self._file: IO[bytes] | None = path.open("wb", buffering=0)

    def write(self, lines: list[bytes]) -> None:
        if self._file is not None:
            try:
                data = memoryview(b"".join(lines))
                while data:  # an unbuffered write takes as many bytes as there is room for
                    data = data[self._file.write(data) :]
            except OSError as exc:
                self._terminal.report_loss(f"{self._path} is not written any more: {exc.strerror}")
                self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@final
class RankOutput:
    """Passes on both pipes of a process, line by line.

    Args:
        rank: of several ranks with the same traceback, one shows it.
        prefix: put before each line on the terminal.
        log: a file that also receives the lines, if any.
        shown: whether lines go to the terminal.
        prompts: whether the start of an unfinished line shows.
    """

    def __init__(
        self,
        terminal: Terminal,
        rank: int,
        prefix: bytes,
        log: LogFile | None = None,
        shown: bool = True,
        prompts: bool = False,
    ) -> None:
        self.tail: Tail = Tail()  #: of stderr
        self._terminal = terminal
        self._log = log
        self._shown = shown
        self._prompts = prompts
        self._out_prefix = Prefixer(prefix)
        self._err_prefix = Prefixer(prefix)
        self._readers: list[PipeReader] = []
        self._folder = TracebackFolder(rank, terminal.tracebacks)
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        """Start reading these pipes."""
        assert stdout is not None, "the process was spawned without pipes"
        assert stderr is not None, "the process was spawned without pipes"
        on_starts = (self._on_stdout_start, self._on_stderr_start) if self._prompts else (None, None)
        self._readers = [
            PipeReader(stdout, self._on_stdout, self._terminal.out, on_starts[0]),
            PipeReader(stderr, self._on_stderr, self._terminal.err, on_starts[1]),
        ]

    def close(self) -> None:
        """Pass on all received bytes, and end, without waiting for other holders of the pipes."""
        for reader in self._readers:
            reader.close()
        self._flush()
        if self._log is not None:
            self._log.close()

    def _on_stdout(self, lines: list[bytes]) -> None:
        self._keep(lines)
        self._show(lines, self._out_prefix, self._terminal.out)

    def _on_stderr(self, lines: list[bytes]) -> None:
        self.tail.add(lines)
        self._keep(lines)
        self._show(self._folder.feed(lines), self._err_prefix, self._terminal.err)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._folder.holds:
            seconds = FOLD_SECONDS if self._folder.complete else STACK_SECONDS
            self._timer = asyncio.get_running_loop().call_later(seconds, self._flush)

    def _on_stdout_start(self, start: bytes) -> None:
        self._show([start], self._out_prefix, self._terminal.out)

    def _on_stderr_start(self, start: bytes) -> None:
        self._flush()
        self._show([start], self._err_prefix, self._terminal.err)

    def _flush(self) -> None:
        self._show(self._folder.flush(), self._err_prefix, self._terminal.err)

    def _keep(self, lines: list[bytes]) -> None:
        if self._log is not None:
            self._log.write(lines)

    def _show(self, lines: list[bytes], prefix: Prefixer, sink: OutputSink) -> None:
        if self._shown and lines:
            sink.write(prefix.join(lines, continues=sink.continues(prefix)), prefix)
