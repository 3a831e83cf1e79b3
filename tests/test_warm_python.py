"""A fork of the server is what a new interpreter would be."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm_python

SHOW = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "first": sys.path[0], "directory": os.getcwd(), "variable": os.environ.get("OURS"),
    "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "torch": "torch" in sys.modules,
    "main": sys.modules["__main__"].__dict__ is globals(), "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
}))
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_program_sees_what_it_was_given(tmp_path: Path, kind: str) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    command = {"-c": ["-c", SHOW], "-m": ["-m", "show"], "script": ["show.py"]}[kind]
    environment = {**os.environ, "OURS": "yes", "RANK": "0"}  # a rank starts no Python
    shown = []
    for popen in (subprocess.Popen, warm_python._real_popen):
        process = popen([sys.executable, *command, "a", "-b"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
        shown.append(json.loads(process.communicate()[0]))
        assert process.returncode == 0
    warm, real = shown
    assert (warm.pop("torch"), real.pop("torch")) == (True, False)
    assert warm["parent"] == os.getpid()
    assert warm == real


def test_a_new_process_leads_its_session_when_the_call_returns() -> None:
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as process:
            os.killpg(process.pid, signal.SIGKILL)  # ProcessLookupError: the group does not exist yet
        assert process.returncode == -signal.SIGKILL


def test_a_new_process_has_its_group() -> None:
    code = "import os; print(os.getpgid(0) - os.getpid(), os.getsid(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, process_group=0)
    assert done.stdout.split() == ["0", str(os.getsid(0))]


def python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; assert 'torch' in sys.modules\n" + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'end', file=sys.stderr)", 0, "end\n"),
        ("import threading as t; t.Timer(0.01, print, ['late'], {'file': sys.stderr}).start()", 0, "late\n"),
    ],
)
def test_the_end(code: str, status: int, error: str) -> None:
    done = python(code)
    assert (done.returncode, done.stderr) == (status, error)


def test_an_error_is_shown_without_our_frames() -> None:
    done = python("raise ValueError('x')")
    assert done.returncode == 1
    assert done.stderr == 'Traceback (most recent call last):\n  File "<string>", line 2, in <module>\nValueError: x\n'


def test_ctrl_c_ends_it_as_a_signal_does() -> None:
    done = python("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize(
    ("number", "disposition"),
    [
        (signal.SIGHUP, signal.SIG_IGN),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGINT, signal.SIG_IGN),
        (signal.SIGINT, signal.default_int_handler),
    ],
)
def test_a_signal_is_ignored_where_the_caller_ignores_it(number: signal.Signals, disposition: Any) -> None:
    before = signal.signal(number, disposition)
    try:
        ended = python(f"import signal; print(signal.getsignal({number}))")
    finally:
        signal.signal(number, before)
    assert ended.stdout == f"{disposition}\n", ended.stderr


def test_input_sessions_and_descriptors() -> None:
    theirs, ours = os.pipe()
    code = f"import os; os.write({ours}, b'here'); print(sys.stdin.read(), os.getsid(0) == os.getpid())"
    done = python(code, input="said", start_new_session=True, pass_fds=[ours])
    assert (done.returncode, done.stdout, os.read(theirs, 10)) == (0, "said True\n", b"here")
    os.close(theirs)
    os.close(ours)


def test_multiprocessing_starts_forks_too() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_pid, args=(theirs,))
    process.start()
    assert ours.recv() == (process.pid, True)
    process.join()
    assert process.exitcode == 0


def _send_pid(pipe: multiprocessing.connection.Connection) -> None:
    pipe.send((os.getpid(), "pytest_timeout" in sys.modules))


@pytest.mark.real_end
def test_an_end_with_finalization() -> None:
    code = "class Kept:\n    def __del__(self): print('deleted')\nkept = Kept()"
    assert python(code).stdout == "deleted\n"


@pytest.mark.parametrize(("options", "variables"), [(["-X", "dev"], {}), ([], {"PYTHONHASHSEED": "1"})])
def test_only_a_real_interpreter_obeys(options: list[str], variables: dict[str, str]) -> None:
    command = [sys.executable, *options, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.check_output(command, env={**os.environ, **variables}) == b"False\n"


STARTS_TWICE = """
import subprocess
from tests import warm_python
assert warm_python._server is not None, "it has imported torch already"
show = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
subprocess.run(show)
with warm_python.installed():
    subprocess.run(show)
"""


def test_a_worker_of_xdist_starts_interpreters_and_forks() -> None:
    with warm_python.installed(workers=True):
        done = python(STARTS_TWICE, cwd=warm_python.ROOT)
    assert (done.stderr, done.stdout) == ("", "False\nTrue\n")
