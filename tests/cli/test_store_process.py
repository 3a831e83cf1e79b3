"""What the launcher's tests do not see of it."""

import os
import socket
import subprocess
import sys


def test_what_cannot_be_served_is_an_error_in_words() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        command = [sys.executable, "-m", "asynccomm.cli.store_process", str(other.fileno())]
        ended = subprocess.run(command, pass_fds=[other.fileno()], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith("asynccomm: cannot host the store at 127.0.0.1:0")


def test_groups_that_are_gone_are_left_alone_and_others_killed() -> None:
    gone, left = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-m", "asynccomm.cli.store_process", *map(str, (listening.fileno(), gone.pid, left.pid))]
        subprocess.run(command, pass_fds=[listening.fileno()], input=b"%d\n" % gone.pid, timeout=60, check=True)
    assert left.wait(10) == -9
    assert gone.poll() is None
    os.killpg(gone.pid, 9)
    gone.wait()
