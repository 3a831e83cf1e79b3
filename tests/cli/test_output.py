import asyncio
import os

import pytest

from asynccomm.cli.output import (
    LINE_BYTES,
    QUEUE_BYTES,
    TAIL_LINES,
    LineSplitter,
    OutputSink,
    PipeReader,
    Prefixer,
    Tail,
)


def taken(fd: int) -> bytes:
    """What is in the pipe now."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_survive_any_cut(size: int) -> None:
    data = b"one\ntwo\r\n\nthree\rfour\r\r\xff\xfe\nend"
    splitter, lines = LineSplitter(), []
    for start in range(0, len(data), size):
        lines += splitter.feed(data[start : start + size])
    lines += splitter.finish()
    assert b"".join(lines) == data + b"\n"
    assert [line.strip() for line in lines if line.strip()] == [b"one", b"two", b"three", b"four", b"\xff\xfe", b"end"]


def test_a_line_is_handed_on_at_its_end_whichever() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"a\nb\rc") == [b"a\n", b"b\r"]
    assert splitter.feed(b"\n") == [b"c\n"]
    assert splitter.finish() == []


def test_a_line_without_end_is_broken() -> None:
    splitter = LineSplitter()
    pieces = [line for _ in range(64) for line in splitter.feed(b"x" * (LINE_BYTES // 16))]
    assert len(pieces) == 4
    assert b"".join(pieces).replace(b"\n", b"") == b"x" * 4 * LINE_BYTES


def test_prefix_comes_once_per_line() -> None:
    prefixer = Prefixer(b"[3] ")
    assert prefixer.join([b"a\n", b"\n", b"\r", b"50%\r"]) == b"[3] a\n[3] \n\r[3] 50%\r"
    assert prefixer.join([b"\n", b"\n"]) == b"\n[3] \n"  # the first one ends the line that 50% was on


def test_tail_keeps_the_last_lines() -> None:
    tail = Tail()
    for i in range(TAIL_LINES + 5):
        tail.add([b"%d\r\n" % i])
    assert tail.lines() == [b"%d" % i for i in range(5, TAIL_LINES + 5)]
    tail.add([b"x" * 1_000_000])
    assert len(tail.lines()[-1]) < 10_000


async def test_sink_never_blocks_and_loses_nothing() -> None:
    read, write = os.pipe()
    sink = OutputSink(write)
    data = os.urandom(QUEUE_BYTES + 200_000)  # far more than a pipe holds
    sink.write(data)
    assert sink.full
    received = bytearray()
    while len(received) < len(data):
        received += taken(read)
        await asyncio.sleep(0)
    await asyncio.wait_for(sink.drain(), 10)
    assert received == data
    assert not sink.full
    os.close(read)
    os.close(write)


async def test_sink_outlives_its_reader() -> None:
    read, write = os.pipe()
    sink = OutputSink(write)
    sink.write(b"x" * 200_000)
    os.close(read)
    await asyncio.wait_for(sink.drain(), 10)
    sink.write(b"more")
    assert not sink.full
    os.close(write)


async def test_pipe_rests_while_the_sink_is_full() -> None:
    source_read, source_write = os.pipe()
    sink_read, sink_write = os.pipe()
    sink = OutputSink(sink_write)
    got: list[bytes] = []
    first, done = asyncio.Event(), asyncio.Event()

    def on_lines(lines: list[bytes]) -> None:
        got.extend(lines)
        first.set()
        if b"last\n" in lines:
            done.set()

    sink.write(b"x" * (QUEUE_BYTES + 200_000))
    reader = PipeReader(os.fdopen(source_read, "rb", buffering=0), on_lines, sink)
    os.write(source_write, b"first\n")
    await first.wait()
    os.write(source_write, b"last\n")
    for _ in range(100):
        await asyncio.sleep(0)
    assert got == [b"first\n"]
    while not done.is_set():
        taken(sink_read)
        await asyncio.sleep(0)
    reader.close()
    for fd in (source_write, sink_read, sink_write):
        os.close(fd)


async def test_close_takes_what_is_there_and_waits_for_nobody() -> None:
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    got: list[bytes] = []
    reader = PipeReader(os.fdopen(read, "rb", buffering=0), got.extend, OutputSink(null))
    os.write(write, b"a\nb")
    reader.close()  # the write end is open still
    reader.close()
    assert got == [b"a\n", b"b\n"]
    os.close(write)
    os.close(null)
