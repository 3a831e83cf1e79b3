import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asynccomm.cli.processes import Child, group_exists, spawn

pytestmark = pytest.mark.real_python


async def ended(child: Child) -> int:
    while not child.exited.done():
        child.poll()
        await asyncio.sleep(0.01)
    for pipe in (child.stdout, child.stderr):
        assert pipe is not None
        pipe.close()
    return await child.exited


async def test_child_has_a_session_of_its_own_and_its_exit_code() -> None:
    child = spawn(
        [sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid(), flush=True); os._exit(7)"], os.environ
    )
    assert child.stdout is not None
    assert child.stdout.read() == b"True\n"
    assert await ended(child) == 7
    child.send(signal.SIGTERM, group=True)  # gone: nothing happens


@pytest.mark.parametrize("cpu", sorted(os.sched_getaffinity(0))[-1:])
async def test_cpus(cpu: int) -> None:
    source = "import os; print(os.sched_getaffinity(0))"
    child = spawn([sys.executable, "-c", source], os.environ, cpus=frozenset({cpu}))
    assert child.stdout is not None
    assert child.stdout.read() == b"{%d}\n" % cpu
    await ended(child)


async def test_kill_takes_the_group(until, is_running) -> None:
    source = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    child = spawn([sys.executable, "-c", source], os.environ)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    child.kill()
    assert await ended(child) == -signal.SIGKILL
    until(lambda: not is_running(grandchild), "the end of the grandchild")


async def test_clear_group_lets_helpers_finish_first(tmp_path: Path) -> None:
    helper = f"import sys; sys.stdin.read(); open({str(tmp_path / 'clean')!r}, 'w')"  # like multiprocessing's tracker
    source = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {helper!r}], stdin=subprocess.PIPE)"
    child = spawn([sys.executable, "-c", source + "; import os; os._exit(0)"], os.environ)
    await ended(child)
    await child.clear_group()
    assert (tmp_path / "clean").exists()


def test_group_exists() -> None:
    assert group_exists(os.getpgid(0))
    assert not group_exists(2**22 - 1)


def test_missing_program_is_an_os_error() -> None:
    async def main() -> None:
        with pytest.raises(FileNotFoundError):
            spawn(["/nonexistent/program"], os.environ)

    asyncio.run(main())


def test_a_child_dies_with_its_parent(until, is_running) -> None:
    source = """if True:
        import asyncio, os, signal
        from asynccomm.cli.processes import spawn
        async def main():
            print(spawn(["sleep", "60"], os.environ).pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    parent = subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=30)
    assert parent.returncode == -signal.SIGKILL
    until(lambda: not is_running(int(parent.stdout)), "the end of the child")
