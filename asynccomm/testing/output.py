"""The output of rank processes: kept for the test's report, or shown at once behind the rank's number."""

from __future__ import annotations

import os
import select
import sys
import tempfile
import threading
from typing import Protocol, final

from asynccomm.cli.output import LineSplitter, Prefixer

__all__ = ["CapturedOutput", "LiveOutput", "ProcessOutput"]

END_SECONDS = 1.0  # for the end of the pipe, which other processes that the rank has started may hold open


class ProcessOutput(Protocol):
    """The output of one process."""

    rank: int  #: the number of the process in the test that runs

    def fileno(self) -> int:
        """The descriptor for the process to write to."""

    def started(self) -> None:
        """The process has been started."""

    def take(self) -> str:
        """The output since the last call, apart from output that was shown already."""

    def close(self) -> None:
        """Free everything; the process has ended."""


@final
class CapturedOutput:
    """Output in a file, for the report of the test."""

    def __init__(self) -> None:
        self.rank = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._seen = 0

    def fileno(self) -> int:
        return self._file.fileno()

    def started(self) -> None:
        pass

    def take(self) -> str:
        data = b""
        # not read(): the process shares this file position, and read() would move the place of its next write
        while chunk := os.pread(self._file.fileno(), 1 << 20, self._seen):
            data += chunk
            self._seen += len(chunk)
        return data.decode(errors="replace")

    def close(self) -> None:
        self._file.close()


@final
class LiveOutput:
    """Output in a pipe, from which a thread writes whole lines to this process's stdout."""

    _writing = threading.Lock()  # one line at a time, of all ranks

    def __init__(self) -> None:
        self.rank = 0
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._reading = threading.Lock()
        self._splitter = LineSplitter()
        self._ended = False
        self._thread = threading.Thread(target=self._follow, name="asynccomm rank output", daemon=True)

    def fileno(self) -> int:
        return self._write

    def started(self) -> None:
        os.close(self._write)
        self._thread.start()

    def _follow(self) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while not self._pass_on():
            poll.poll()

    def _pass_on(self) -> bool:
        """Write all output that has come; whether the output has ended."""
        with self._reading:
            while not self._ended:
                try:
                    data = os.read(self._read, 1 << 16)
                except BlockingIOError:
                    return False
                self._show(self._splitter.feed(data) if data else self._splitter.finish())
                if not data:
                    os.close(self._read)
                    self._ended = True
            return True

    def _show(self, lines: list[bytes]) -> None:
        if lines:
            with self._writing:
                sys.stdout.write(Prefixer(f"[rank {self.rank}] ".encode()).join(lines).decode(errors="replace"))
                sys.stdout.flush()

    def take(self) -> str:
        self._pass_on()
        return ""

    def close(self) -> None:
        self._thread.join(END_SECONDS)
