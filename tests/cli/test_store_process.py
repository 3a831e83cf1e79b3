import io
import os
import signal
import socket
import subprocess
import sys

import pytest

from asynccomm.cli import store_process
from asynccomm.cli.store_process import main

pytestmark = pytest.mark.real_python


def test_what_cannot_be_served_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        monkeypatch.setattr(sys, "argv", ["store", str(os.dup(other.fileno()))])
        assert main() == 1
    assert capsys.readouterr().err.startswith("asynccomm: cannot host the store at 127.0.0.1:")


def test_groups_that_are_gone_are_left_alone_and_others_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_process, "GROUP_SECONDS", 0.1)
    gone, left = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        arguments = [os.dup(listening.fileno()), gone.pid, left.pid]
        monkeypatch.setattr(sys, "argv", ["store", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{gone.pid}\n"))
        assert main() == 0
    assert left.wait(10) == -signal.SIGKILL
    assert gone.poll() is None
    gone.kill()
    gone.wait()
