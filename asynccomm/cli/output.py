"""From the pipes of many processes to one terminal: whole lines, at once, in bounded memory.

A line ends with a line feed or with a carriage return, so that progress bars work; the ending is passed on unchanged.
Bytes are never decoded. A line longer than ``LINE_BYTES`` is broken: holding the line would need unbounded memory, and
passing its pieces on unbroken would mix them with lines of other processes.

The start of a line may show after a pause, as a prompt has to. Lines of other processes then begin on a new line, and
after these so does the rest of the unfinished line, behind the prefix again.

The event loop never blocks: bytes that the terminal does not take yet are queued, and above ``QUEUE_BYTES`` the pipes
are not read until the queue is written. The processes then wait, as they would in front of a slow terminal of their
own.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
from collections import deque
from collections.abc import Callable
from typing import IO, final

LINE_BYTES = 1 << 20  # bytes; longer lines are broken. Up to two of these are held per rank
QUEUE_BYTES = 1 << 20  # bytes waiting for one output above which its pipes are not read
READ_BYTES = 1 << 16  # bytes per read: a pipe's capacity
PAUSE_SECONDS = 0.1  # for an unfinished line to end, before its start is passed on
WRITE_BYTES = 4096  # bytes per write: PIPE_BUF, which a writable pipe takes without blocking
TAIL_LINES = 200  # lines of stderr kept for the report; chained tracebacks are long
TAIL_LINE_BYTES = 2048  # bytes kept of each line

_END = re.compile(rb"\r\n|\r|\n")


@final
class LineSplitter:
    """Cuts a stream of bytes into lines that keep their endings."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes."""
        lines: list[bytes] = []
        start = 0
        for end in _END.finditer(data):
            lines.append(bytes(self._partial) + data[start : end.end()])
            self._partial.clear()
            start = end.end()
        self._partial += data[start:]
        if len(self._partial) >= LINE_BYTES:
            lines += self.finish()
        return lines

    @property
    def partial(self) -> bytes:
        """The unfinished last line."""
        return bytes(self._partial)

    def finish(self) -> list[bytes]:
        """The unfinished last line, with an ending; or an empty list."""
        rest = bytes(self._partial)
        self._partial.clear()
        return [rest + b"\n"] if rest else []


@final
class Prefixer:
    """Puts a prefix before each line of a stream."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._after_return = False
        self._begun = b""  # the start of the next line, which ``join`` has returned already

    def join(self, lines: list[bytes], *, continues: bool = True) -> bytes:
        """``lines`` as one piece. A line feed that follows a carriage return belongs to the line before it.

        Args:
            lines: of these the last may be unfinished; the next call begins with the same line, which is longer then.
            continues: whether the output still ends in the unfinished line of the last call, if there is one.
        """
        pieces: list[bytes] = []
        for line in lines:
            rest = line.removeprefix(self._begun)
            if not self._begun:
                bare = line == b"\r" or (line == b"\n" and self._after_return)
            elif continues:
                bare = True
            else:  # the start of the line has a line of its own
                rest = rest if rest.strip(b"\r\n") else b""
                bare = not rest
            pieces.append(rest if bare else self._prefix + rest)
            self._after_return = line.endswith(b"\r")
            self._begun = b"" if line.endswith((b"\r", b"\n")) else line
        return b"".join(pieces)


@final
class Tail:
    """The last lines of a stream."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)

    def add(self, lines: list[bytes]) -> None:
        self._lines.extend(line[:TAIL_LINE_BYTES].rstrip(b"\r\n") for line in lines)

    def lines(self) -> list[bytes]:
        return list(self._lines)


@final
class OutputSink:
    """One of the launcher's own outputs: accepts all bytes at once, writes as many as the reader takes.

    A reader that has closed costs its output, not the run. The descriptor's flags stay unchanged: the shell and all
    other processes on the terminal share them.

    Args:
        on_error: called once if the output cannot be written, with the reason; not if its reader has closed.
    """

    def __init__(self, fd: int, on_error: Callable[[str], object]) -> None:
        self._fd = fd
        self._on_error = on_error
        self._queue = bytearray()
        self._open = True
        self._unfinished: object = None  # the source of the line that the output ends in
        self._waiting = False
        self._drained = asyncio.Event()
        self._drained.set()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def full(self) -> bool:
        return len(self._queue) > QUEUE_BYTES

    def write(self, data: bytes, source: object = None) -> None:
        """Write ``data`` after all earlier data, an unfinished line of another source ended; never blocks or raises.

        Args:
            source: of an unfinished line at the end of ``data``, which the same source may continue.
        """
        if self._open and data:
            if self._unfinished is not None and not self.continues(source):
                self._queue += b"\n"
            self._queue += data
            self._unfinished = None if data.endswith((b"\r", b"\n")) else source
            if not self._waiting:
                self._flush()

    def continues(self, source: object) -> bool:
        """Whether the output ends in an unfinished line of ``source``."""
        return self._unfinished is source

    async def drain(self) -> None:
        """Wait until everything is written. Cancelling is safe."""
        await self._drained.wait()

    def _flush(self) -> None:
        try:
            while self._queue and self._poll.poll(0):
                del self._queue[: os.write(self._fd, self._queue[:WRITE_BYTES])]
        except BlockingIOError:  # another process has changed the flags of the shared descriptor
            pass
        except OSError as exc:
            self._open = False
            self._queue.clear()
            if not isinstance(exc, BrokenPipeError):
                self._on_error(str(exc.strerror))
        if bool(self._queue) != self._waiting:
            self._wait(bool(self._queue))

    def _wait(self, waiting: bool) -> None:
        self._waiting = waiting
        loop = asyncio.get_running_loop()
        if waiting:
            self._drained.clear()
            loop.add_writer(self._fd, self._flush)
        else:
            loop.remove_writer(self._fd)
            self._drained.set()


@final
class PipeReader:
    """Reads one pipe of a process and passes its lines on, until the pipe ends or ``close``.

    Args:
        pipe: the read end, unbuffered; closed at the end.
        on_lines: receives complete lines, at least one.
        sink: the lines' output; while it is full the pipe is not read.
        on_start: receives the start of a line that does not end within PAUSE_SECONDS, and again if the start grows.
    """

    def __init__(
        self,
        pipe: IO[bytes],
        on_lines: Callable[[list[bytes]], None],
        sink: OutputSink,
        on_start: Callable[[bytes], None] | None = None,
    ) -> None:
        self._pipe = pipe
        self._fd = pipe.fileno()
        os.set_blocking(self._fd, False)
        self._on_lines = on_lines
        self._on_start = on_start
        self._pause: asyncio.TimerHandle | None = None
        self._sink = sink
        self._splitter = LineSplitter()
        self._resume: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        """Pass on the pipe's content, including an unfinished line. Other holders of the pipe cause no wait."""
        reads = 0
        while reads < 2 * LINE_BYTES // READ_BYTES and self._read():  # bounded: another process may still be writing
            reads += 1
        self._end()

    def _readable(self) -> None:
        self._read()
        if self._fd >= 0 and self._sink.full:
            self._loop.remove_reader(self._fd)
            self._resume = self._loop.create_task(self._rest())

    async def _rest(self) -> None:
        await self._sink.drain()
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._readable)

    def _read(self) -> bool:
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        self._hand_on(self._splitter.feed(data))
        if self._on_start is not None and self._pause is None and self._splitter.partial:
            self._pause = self._loop.call_later(PAUSE_SECONDS, self._hand_on_start, self._on_start)
        return True

    def _hand_on(self, lines: list[bytes]) -> None:
        if lines:
            self._cancel_pause()
            self._on_lines(lines)

    def _hand_on_start(self, on_start: Callable[[bytes], None]) -> None:
        self._pause = None
        on_start(self._splitter.partial)

    def _cancel_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _end(self) -> None:
        if self._fd >= 0:
            self._cancel_pause()
            self._hand_on(self._splitter.finish())
            self._loop.remove_reader(self._fd)
            self._pipe.close()
            self._fd = -1
