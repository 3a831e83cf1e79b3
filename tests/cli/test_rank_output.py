import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from asynccomm.cli.rank_output import LogFile, RankOutput, Terminal
from tests.waiting import until


def test_terminal_that_is_one_file_is_one_queue(launcher) -> None:
    launcher.script(
        """
        import asyncio, os
        from asynccomm.cli.rank_output import Terminal
        async def main():
            apart = Terminal()
            os.dup2(1, 2)
            print(apart.out is apart.err, Terminal().out is Terminal().err, end=" ")
            together = Terminal()
            print(together.out is together.err)
        asyncio.run(main())
        """
    )
    assert launcher.run("run", "-n", "1", "script.py")[1] == "[0] False False True\n"


async def test_both_pipes_go_to_the_log_and_only_stderr_to_the_tail(tmp_path: Path) -> None:
    terminal = Terminal()
    output = RankOutput(terminal, 0, b"[0] ", LogFile(tmp_path / "log", terminal), shown=False)
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    output.attach(os.fdopen(out_read, "rb", buffering=0), os.fdopen(err_read, "rb", buffering=0))
    os.write(out_write, b"said\n")
    os.write(err_write, b"cried\n")
    output.close()
    assert sorted((tmp_path / "log").read_bytes().split()) == [b"cried", b"said"]
    assert output.tail.lines() == [b"cried"]
    os.close(out_write)
    os.close(err_write)


async def test_a_full_disk_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    log = LogFile(Path("/dev/full"), terminal)
    log.write([b"line\n"])
    log.write([b"line\n"])
    await asyncio.wait_for(terminal.drain(), 10)
    assert capfd.readouterr().err == "asynccomm: /dev/full is not written any more: No space left on device\n"
    assert terminal.failed


async def test_a_line_that_finds_room_for_its_start_only_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    path = tmp_path / "log"
    log = LogFile(path, terminal)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        log.write([b"x" * (1 << 16), b"more\n"])
        await asyncio.wait_for(terminal.drain(), 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == 1 << 16
    assert capfd.readouterr().err == f"asynccomm: {path} is not written any more: File too large\n"
    assert terminal.failed


async def test_a_traceback_with_a_pause_inside_is_still_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynccomm.cli.rank_output.FOLD_SECONDS", 0.0)
    monkeypatch.setattr("asynccomm.cli.rank_output.STACK_SECONDS", 60.0)
    terminal = Terminal()
    terminal.tracebacks.interrupted = True
    output = RankOutput(terminal, 0, b"[0] ")
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    output.attach(os.fdopen(out_read, "rb", buffering=0), os.fdopen(err_read, "rb", buffering=0))
    for number, piece in enumerate((b"Traceback (most recent call last):\n", b"  File\n", b"KeyboardInterrupt\n")):
        os.write(err_write, piece)
        await until(lambda passed=number + 1: len(output.tail.lines()) == passed)
        for _ in range(5):  # a timer of 0 s would have ended
            await asyncio.sleep(0)
    await asyncio.wait_for(terminal.drain(), 10)
    output.close()
    await asyncio.wait_for(terminal.drain(), 10)
    assert capfd.readouterr().err == "[0] KeyboardInterrupt\n"
    os.close(out_write)
    os.close(err_write)


# -- as seen from outside


def test_output_that_cannot_be_written_fails_the_run(launcher) -> None:
    launcher.script("import sys; print('lost'); sys.exit(int(sys.argv[1]))")
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", "2", "script.py"]
    for code, shown in ((0, 1), (3, 3)):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*command, str(code)],
                cwd=launcher.directory,
                stdin=subprocess.DEVNULL,
                stdout=full,
                stderr=subprocess.PIPE,
                timeout=60,
            )
        assert done.returncode == shown
        assert done.stderr.count(b"asynccomm: cannot write the output: No space left on device\n") == 1, done.stderr


def test_lines_arrive_at_once_behind_their_rank(launcher) -> None:
    script = launcher.script(
        """
        import os, sys
        if os.environ["RANK"] == "0":
            print("out")
            print("err", file=sys.stderr)
            assert sys.stdin.readline() == 'go on\\n'
        """
    )
    started = launcher.start("run", "-n", "2", script)
    started.sees("[0] out\n")  # the rank runs still
    started.process.stdin.write(b"go on\n")
    assert started.finish() == 0
    assert started.err == b"[0] err\n"


def test_no_prefix(launcher) -> None:
    assert launcher.run("run", "-n", "1", "--no-prefix", launcher.script("print('plain')"))[1] == "plain\n"


def test_lines_stay_whole_between_many_ranks(launcher) -> None:
    script = launcher.script(
        """
        import os
        for i in range(200):
            line = b"%d" % i + os.environ["RANK"].encode() * 3000 + b"\\n"
            for start in range(0, len(line), 1000):
                os.write(1, line[start:start + 1000])
        """
    )
    started = launcher.start("run", "-n", "8", script)
    assert started.finish() == 0
    lines = bytes(started.out).splitlines()
    expected = [b"[%d] %d" % (rank, i) + b"%d" % rank * 3000 for rank in range(8) for i in range(200)]
    assert sorted(lines) == sorted(expected)


def test_progress_bars_move(launcher) -> None:
    script = launcher.script(
        """
        import sys
        sys.stdout.write("10%\\r"); sys.stdout.flush()
        sys.stdin.readline()
        sys.stdout.write("20%\\r100%\\n")
        """
    )
    started = launcher.start("run", "-n", "1", script)
    started.sees("[0] 10%\r")
    started.process.stdin.write(b"\n")
    started.finish()
    assert started.out == b"[0] 10%\r[0] 20%\r[0] 100%\n"


def test_a_prompt_shows_where_stdin_is_a_terminal(launcher) -> None:
    script = launcher.script(
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            print("hello", input("your name? "))
            print("password? ", end="", file=sys.stderr, flush=True)
            input()
        else:
            while not os.path.exists("go on"):
                time.sleep(0.01)
            print("another rank")
        """
    )
    terminal, stdin = os.openpty()
    try:
        started = launcher.start("run", "-n", "2", "--log-dir", "logs", "--tee", script, stdin=stdin)
        started.sees("[0] your name? ")
        (launcher.directory / "go on").touch()
        started.sees("[0] your name? \n[1] another rank\n")
        os.write(terminal, b"bob\n")
        started.sees_error("[0] password? ")
        os.write(terminal, b"\n")
        assert started.finish() == 0
    finally:
        os.close(terminal)
        os.close(stdin)
    assert started.out == b"[0] your name? \n[1] another rank\n[0] hello bob\n"
    assert started.err == b"[0] password? \n"
    assert (launcher.directory / "logs/rank0.log").read_bytes() == b"your name? hello bob\npassword? \n"


def test_lines_of_ranks_stay_whole_where_stdin_is_no_terminal(launcher) -> None:
    script = launcher.script(
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            print("one ", end="", flush=True)
            time.sleep(0.3)  # longer than the pause
            open("go on", "w").close()
            sys.stdin.readline()
            print("line")
        else:
            while not os.path.exists("go on"):
                time.sleep(0.01)
            print("another rank")
        """
    )
    started = launcher.start("run", "-n", "2", script)
    started.sees("[1] another rank\n")
    started.process.stdin.write(b"\n")
    assert started.finish() == 0
    assert started.out == b"[1] another rank\n[0] one line\n"


def test_bytes_that_are_no_text_pass(launcher) -> None:
    script = launcher.script("import os; os.write(1, bytes(set(range(256)) - {10, 13}) + b'end')")
    started = launcher.start("run", "-n", "1", script)
    assert started.finish() == 0
    assert started.out == b"[0] " + bytes(sorted(set(range(256)) - {10, 13})) + b"end\n"


@pytest.mark.real_python  # a fork has the memory of its parent
def test_a_line_of_50_megabytes_is_not_held(launcher) -> None:
    script = launcher.script(
        """
        import os
        for _ in range(800):
            os.write(1, b"x" * 65536)
        peak = [line for line in open(f"/proc/{os.getppid()}/status") if line.startswith("VmHWM")][0].split()[1]
        os.write(1, b"\\npeak " + peak.encode() + b"\\n")
        """
    )
    started = launcher.start("run", "-n", "1", script)
    assert started.finish() == 0
    assert started.out.count(b"x") == 800 * 65536
    assert started.words_after("peak")[0] < 48 * 1024  # KiB


def test_a_reader_that_went_away_does_not_stop_the_run(launcher) -> None:
    script = launcher.script(
        """
        for _ in range(2000):  # many times what a pipe holds
            print("to somebody or nobody" * 10)
        open("finished", "w")
        """
    )
    source = f"""
        import subprocess, sys
        command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", "1", "{script}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
            launcher.stdout.readline()
            launcher.stdout.close()
        print("code", launcher.returncode)
    """
    started = launcher.start("run", "-n", "1", launcher.script(source, "head.py"))
    assert started.finish() == 0
    assert started.words_after("code") == [0]
    assert started.err == b""
    assert (launcher.directory / "finished").exists()


def test_a_rank_may_close_its_output(launcher) -> None:
    script = launcher.script("import os; os.close(1); os.close(2); open('finished', 'w'); os._exit(5)")
    assert launcher.run("run", "-n", "1", script)[0] == 5
    assert (launcher.directory / "finished").exists()


def test_log_files_instead_of_output(launcher) -> None:
    script = launcher.script("import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)")
    code, out, err = launcher.run("run", "-n", "2", "--log-dir", "some/logs", script)
    assert (code, out, err) == (0, "", "")
    logs = {path.name: sorted(path.read_text().splitlines()) for path in (launcher.directory / "some/logs").iterdir()}
    assert logs == {"rank0.log": ["err", "out 0"], "rank1.log": ["err", "out 1"]}


def test_a_log_that_cannot_be_written_fails_the_run(launcher) -> None:
    (launcher.directory / "rank0.log").symlink_to("/dev/full")
    code, _, err = launcher.run("run", "-n", "1", "--log-dir", ".", launcher.script("print('lost')"))
    assert (code, err) == (1, "asynccomm: rank0.log is not written any more: No space left on device\n")


def test_log_files_and_output(launcher) -> None:
    code, out, _ = launcher.run("run", "-n", "1", "--log-dir", "logs", "--tee", launcher.script("print('both')"))
    assert (code, out) == (0, "[0] both\n")
    assert (launcher.directory / "logs/rank0.log").read_text() == "both\n"
