"""Output of processes, kept and shown."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asynccomm.testing.output import CapturedOutput, LiveOutput, ProcessOutput


def run_in(output: ProcessOutput, code: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=output.fileno())
    output.started()
    assert process.wait(60) == 0


def test_kept_output_is_taken_once() -> None:
    output = CapturedOutput()
    run_in(output, "print('first')")
    assert output.take() == "first\n"
    assert output.take() == ""
    os.write(output.fileno(), b"second \xff")
    assert output.take() == "second \ufffd"
    output.close()


def test_shown_output_has_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    output = LiveOutput()
    output.rank = 3
    run_in(output, r"print('one\ntwo'); print('unfinished', end='')")
    assert output.take() == ""
    output.close()
    assert capsys.readouterr().out == "[rank 3] one\n[rank 3] two\n[rank 3] unfinished\n"


def test_what_was_written_before_is_shown_after_take(capsys: pytest.CaptureFixture[str]) -> None:
    output = LiveOutput()
    end = os.dup(output.fileno())
    output.started()
    for number in range(100):
        os.write(end, f"{number}\n".encode())
        output.take()
        assert capsys.readouterr().out == f"[rank 0] {number}\n"
    os.close(end)
    output.close()
