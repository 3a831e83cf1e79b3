import asyncio
import os
from pathlib import Path

import pytest

from asynccomm.cli.rank_output import LogFile, RankOutput, Terminal


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
    output = RankOutput(terminal, b"[0] ", LogFile(tmp_path / "log", terminal), shown=False)
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    output.attach(os.fdopen(out_read, "rb", buffering=0), os.fdopen(err_read, "rb", buffering=0))
    os.write(out_write, b"said\n")
    os.write(err_write, b"cried\n")
    output.close()
    assert sorted((tmp_path / "log").read_bytes().split()) == [b"cried", b"said"]
    assert output.tail.lines() == [b"cried"]
    os.close(out_write)
    os.close(err_write)


async def test_full_disk_costs_the_log_only(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    log = LogFile(Path("/dev/full"), terminal)
    log.write([b"line\n"])
    log.write([b"line\n"])
    await asyncio.wait_for(terminal.drain(), 10)
    assert capfd.readouterr().err == "asynccomm: /dev/full is not written any more: No space left on device\n"
