"""Child processes that end when their parent does, each the leader of a group of its own.

Guarantees: the kernel kills a child when this process dies, in whatever way (PR_SET_PDEATHSIG; the signal is bound to
the thread that forks, so spawn from the main thread). Signals from the terminal do not reach the children, because each
has a session of its own. Processes that a child leaves behind in its group are killed GROUP_SECONDS after its end.

Spawn before starting threads: code runs between fork and exec.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO, final

PR_SET_PDEATHSIG = 1
GROUP_SECONDS = 2.0  # for a dead child's helpers to clean up: multiprocessing's tracker unlinks shared memory
GROUP_POLL_SECONDS = 0.01

_libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork, because the child must not load libraries


@final
class Child:
    """One child process. ``exited`` holds its exit code, negative for a signal, once ``poll`` has detected its end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid: int = process.pid
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def stdout(self) -> IO[bytes] | None:
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        return self._process.stderr

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def poll(self) -> None:
        """Check whether the child has ended; call at each SIGCHLD."""
        code = self._process.poll()
        if code is not None and not self.exited.done():
            self.exited.set_result(code)

    def send(self, number: signal.Signals, *, group: bool) -> None:
        """Signal the child, or its whole group as a terminal does; does nothing if the child has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # ended, or the pid was reused
                (os.killpg if group else os.kill)(self.pid, number)

    def tell(self, line: bytes) -> None:
        """Write ``line``, a short one, to the child's stdin, if still open."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line)

    def kill(self) -> None:
        """Kill the child and its group, if the child has not ended."""
        self.send(signal.SIGKILL, group=True)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def clear_group(self) -> None:
        """Kill the rest of the child's group after at most GROUP_SECONDS. Call after the child has ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GROUP_SECONDS
        while group_exists(self.pid) and loop.time() < deadline:  # noqa: ASYNC110 - the kernel sends no event
            await asyncio.sleep(GROUP_POLL_SECONDS)
        kill_group(self.pid)


def group_exists(group: int) -> bool:
    """Whether ``group`` has any process that this user may signal; True also for unreaped zombies."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_group(group: int) -> None:
    """SIGKILL all processes of ``group``, if any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int | None = subprocess.DEVNULL,
    cpus: frozenset[int] = frozenset(),
    keep: Sequence[int] = (),
    die_with_parent: bool = True,
) -> Child:
    """Start ``command`` with pipes for its output.

    Args:
        stdin: as for subprocess; None: the launcher's own.
        cpus: the CPUs to run on; empty: all.
        keep: descriptors that the child inherits.
        die_with_parent: False for the process that cleans up after this one.

    Raises: OSError, SubprocessError.
    """
    return Child(
        subprocess.Popen(
            command,
            env=dict(environment),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=keep,
            start_new_session=True,
            preexec_fn=_in_child(os.getpid(), cpus, die_with_parent),
        )
    )


def _in_child(parent: int, cpus: frozenset[int], die_with_parent: bool) -> Callable[[], None]:
    def prepare() -> None:
        if die_with_parent:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # the parent died before the prctl
                os.kill(os.getpid(), signal.SIGKILL)
        if cpus:
            os.sched_setaffinity(0, cpus)

    return prepare
