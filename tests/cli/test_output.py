import asyncio
import os
import select

import pytest

from asynccomm.cli import output
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


def test_the_rest_of_a_line_comes_without_a_second_prefix() -> None:
    prefixer = Prefixer(b"[0] ")
    assert prefixer.join([b"a\n", b"na"]) == b"[0] a\n[0] na"
    assert prefixer.join([b"name? "]) == b"me? "
    assert prefixer.join([b"name? bob\n", b"b\n"]) == b"bob\n[0] b\n"


def test_the_rest_of_a_line_that_was_ended_has_a_prefix() -> None:
    prefixer = Prefixer(b"[0] ")
    for rest, shown in ((b"bob\n", b"[0] bob\n"), (b"\n", b""), (b"\r", b"")):
        assert prefixer.join([b"name? "]) == b"[0] name? "
        assert prefixer.join([b"name? " + rest, b"b\n"], continues=False) == shown + b"[0] b\n"
    assert prefixer.join([b"na"]) == b"[0] na"
    assert prefixer.join([b"name? "], continues=False) == b"[0] me? "
    assert prefixer.join([b"name? bob\n"]) == b"bob\n"
    assert prefixer.join([b"na"]) == b"[0] na"
    assert prefixer.join([b"another line\n"]) == b"another line\n", "no byte is lost"


async def test_an_unfinished_line_of_another_source_is_ended() -> None:
    read, write = os.pipe()
    sink = OutputSink(write, pytest.fail)
    sink.write(b"na", "first")
    sink.write(b"me? ", "first")
    assert sink.continues("first")
    assert not sink.continues("second")
    sink.write(b"", "second")
    sink.write(b"10%\r", "second")
    assert not sink.continues("first")
    sink.write(b"bob\n", "first")
    sink.write(b"name? ", "first")
    sink.write(b"a message\n")
    assert taken(read) == b"name? \n10%\rbob\nname? \na message\n"
    os.close(read)
    os.close(write)


async def test_the_start_of_a_line_is_passed_on_if_the_line_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PAUSE_SECONDS", 0.001)
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    got: list[bytes] = []
    starts: asyncio.Queue[bytes] = asyncio.Queue()
    sink = OutputSink(null, pytest.fail)
    reader = PipeReader(os.fdopen(read, "rb", buffering=0), got.extend, sink, starts.put_nowait)
    os.write(write, b"a\nna")
    assert await starts.get() == b"na"
    os.write(write, b"me? ")
    assert await starts.get() == b"name? "
    os.write(write, b"bob\nb")
    assert await starts.get() == b"b"
    os.write(write, b"\nc")
    reader.close()
    assert got == [b"a\n", b"name? bob\n", b"b\n", b"c\n"], "lines are whole"
    await asyncio.sleep(0.01)
    assert starts.empty()
    os.close(write)
    os.close(null)


def test_tail_keeps_the_last_lines() -> None:
    tail = Tail()
    for i in range(TAIL_LINES + 5):
        tail.add([b"%d\r\n" % i])
    assert tail.lines() == [b"%d" % i for i in range(5, TAIL_LINES + 5)]
    tail.add([b"x" * 1_000_000])
    assert len(tail.lines()[-1]) < 10_000


async def test_sink_never_blocks_and_loses_nothing() -> None:
    read, write = os.pipe()
    sink = OutputSink(write, pytest.fail)
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
    sink = OutputSink(write, pytest.fail)
    sink.write(b"x" * 200_000)
    os.close(read)
    await asyncio.wait_for(sink.drain(), 10)
    sink.write(b"more")
    assert not sink.full
    os.close(write)


async def test_a_sink_that_cannot_be_written_says_so_once() -> None:
    errors: list[str] = []
    with open("/dev/full", "wb", buffering=0) as full:
        sink = OutputSink(full.fileno(), errors.append)
        sink.write(b"lost\n")
        sink.write(b"lost, too\n")
        await sink.drain()
    assert errors == ["No space left on device"]


async def test_a_descriptor_that_does_not_block_loses_nothing() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    sink = OutputSink(write, pytest.fail)
    sink._poll = always = select.poll()  # as for a terminal that takes less than a whole write
    null = os.open(os.devnull, os.O_RDWR)
    always.register(null, select.POLLOUT)
    sink.write(b"x" * 200_000)
    received = bytearray()
    while len(received) < 200_000:
        received += taken(read)
        await asyncio.sleep(0)
    await sink.drain()
    for fd in (read, write, null):
        os.close(fd)


async def test_pipe_rests_while_the_sink_is_full() -> None:
    source_read, source_write = os.pipe()
    sink_read, sink_write = os.pipe()
    sink = OutputSink(sink_write, pytest.fail)
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
    reader = PipeReader(os.fdopen(read, "rb", buffering=0), got.extend, OutputSink(null, pytest.fail))
    os.write(write, b"a\nb")
    reader.close()  # the write end is open still
    reader.close()
    assert got == [b"a\n", b"b\n"]
    os.close(write)
    os.close(null)
