"""Real shortages, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import some

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import os, tempfile
from asynccomm.backends.shm import segment
from asynccomm.errors import BackendError
from tests.faults.resource_limits import full_disks, own_disk, small_files

def create():
    try:
        fd = segment.create(1 << 20)
    except BackendError as exc:
        return str(exc)
    found = os.readlink(f"/proc/self/fd/{fd}").split("/#")[0].split("/asynccomm-")[0]
    os.close(fd)
    return found

before = tempfile.gettempdir()
"""


def run(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # with a second thread there is no new namespace
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_small_files() -> None:
    inside, after = run("with small_files(): print(create())\nprint(create())")
    assert "memfd: File too large; /dev/shm: File too large" in inside
    assert "memfd:asynccomm" in after


@pytest.mark.parametrize(("only", "real"), some([(False, False), (True, False), (False, True), (True, True)], 2))
def test_full_disks(only: bool, real: bool) -> None:
    mounted, empty, full, after, temporary = run(
        f"mounted = {real} and own_disk(only={only})\n"
        "vars(os).pop('memfd_create', None)\nprint(mounted)\nprint(create())\n"
        f"with full_disks(mounted=mounted, only={only}): print(create())\n"
        "print(create())\nprint(before)"
    )
    if real and mounted == "False":
        pytest.skip("users may not have namespaces here")
    assert empty == after == "/dev/shm"
    if only:
        assert "memfd: this Python has no memfd_create; /dev/shm: No space left on device" in full
    else:
        assert full == temporary
    assert not any(name.startswith("asynccomm-") for name in os.listdir("/dev/shm"))
