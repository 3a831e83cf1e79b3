"""The state of a rank process: saved, set for a test, restored; its forked children; and the modules that only a new
process can import.

A rank keeps the modules that tests import, since importing takes long. A rank with a module that it would now import
from another file, or in another version, counts as stale; the pool replaces stale processes.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # unlike signal, it does not format handlers: their repr may raise
import contextlib
import gc
import importlib.machinery
import logging
import os
import random
import resource
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, final

import torch
import torch.distributed as dist

from asynccomm.testing.protocol import Surroundings

__all__ = ["ForkedChildren", "ImportedFiles", "ProcessState", "enter", "is_importable_as", "left_behind", "seed_all"]

_INSTALLED: Final = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_SIGNALS: Final = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_LIMITS: Final = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_TIMERS: Final = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF


@final
class ProcessState:
    """The state of this process that a test may change, as it is now."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._cwd = os.getcwd()
        self._sys_path, self._argv = list(sys.path), list(sys.argv)
        self._streams = sys.stdin, sys.stdout, sys.stderr
        self._modules = dict(sys.modules)
        self._umask = _umask()
        self._handlers = {number: _signal.getsignal(number) for number in _SIGNALS}
        self._gc, self._recursion_limit = gc.isenabled(), sys.getrecursionlimit()
        self._socket_timeout, self._logging_disabled = socket.getdefaulttimeout(), logging.root.manager.disable
        self._limits = resource_limits()
        self._torch = _torch_state()

    def restore(self) -> None:
        """Set everything back. Modules that were imported since then stay."""
        for timer in _TIMERS:  # before the handlers, without which an alarm ends the process
            signal.setitimer(timer, 0)
        self._restore_limits()
        _set_environ(self._environ)
        time.tzset()
        os.chdir(self._cwd)
        os.umask(self._umask)
        sys.path[:], sys.argv[:] = self._sys_path, self._argv
        sys.stdin, sys.stdout, sys.stderr = self._streams
        sys.modules.update(self._modules)
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) is not handler and handler is not None:  # None: a handler of a module in C
                _signal.signal(number, handler)
        (gc.enable if self._gc else gc.disable)()
        sys.setrecursionlimit(self._recursion_limit)
        socket.setdefaulttimeout(self._socket_timeout)
        logging.disable(self._logging_disabled)
        _set_torch(self._torch)

    def _restore_limits(self) -> None:
        now = resource_limits()
        for number, limits in self._limits.items():
            if now[number] != limits:
                # a process that may not raise a lowered hard limit is replaced; the test has no error
                with contextlib.suppress(ValueError, OSError):
                    resource.setrlimit(number, limits)


@final
class ForkedChildren:
    """Ends each child that the body of ``with`` has forked, where the child leaves the body, with its exit code.

    The event loop, the rest of the fixtures and the report are its parent's.
    """

    def __enter__(self) -> None:
        self._process = os.getpid()

    def __exit__(self, kind: object, exc: BaseException | None, _: TracebackType | None) -> None:
        if os.getpid() != self._process:
            os._exit(_exit_code(exc))


def _exit_code(exc: BaseException | None) -> int:
    """The exit code of a program that ends by ``exc``. Prints an error."""
    if exc is None:
        return 0
    if isinstance(exc, SystemExit) and (exc.code is None or isinstance(exc.code, int)):
        return exc.code or 0
    traceback.print_exception(exc)
    return 1


def enter(surroundings: Surroundings, more: Mapping[str, str]) -> None:
    """Take on the state of pytest's process; ``more``: environment variables beside its own."""
    _set_environ({**surroundings.environ, **more})
    os.chdir(surroundings.cwd)
    if surroundings.sys_path is not None:
        sys.path[:] = surroundings.sys_path
    torch.set_default_dtype(getattr(torch, surroundings.dtype.removeprefix("torch.")))
    if surroundings.device is not None:
        torch.set_default_device(surroundings.device)


def seed_all(seed: int) -> None:
    """Seed all random number generators of the process."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)  # the largest seed that it takes
    torch.manual_seed(seed)


def open_streams() -> list[tuple[int, int] | None]:
    """The files behind the descriptors 0 to 2; None: closed."""
    found: list[tuple[int, int] | None] = []
    for descriptor in range(3):
        try:
            there = os.fstat(descriptor)
        except OSError:
            found.append(None)
        else:
            found.append((there.st_dev, there.st_ino))
    return found


def resource_limits() -> dict[int, tuple[int, int]]:
    """The soft and the hard limit of each resource of this process."""
    return {number: resource.getrlimit(number) for number in _LIMITS}


def left_behind() -> str | None:
    """The state that no part of this process can set back; None: there is none."""
    if dist.is_available() and dist.is_initialized():
        return "torch's default process group is still initialized"
    for name in "stdin", "stdout", "stderr":
        if getattr(getattr(sys, name), "closed", False):  # None where the rank has no such stream
            return f"sys.{name} is closed"
    return None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _set_environ(wanted: Mapping[str, str]) -> None:
    now = dict(os.environ)  # each access to os.environ itself encodes a name and decodes a value
    for name in now.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if now.get(name) != value:
            os.environ[name] = value


def _torch_state() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "precision": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
    }


def _set_torch(wanted: Mapping[str, Any]) -> None:
    now = _torch_state()
    changed = {name for name, value in wanted.items() if now[name] != value}
    if "dtype" in changed:
        torch.set_default_dtype(wanted["dtype"])
    if "device" in changed:
        torch.set_default_device(None if wanted["device"].type == "cpu" else wanted["device"])
    if "threads" in changed:
        torch.set_num_threads(wanted["threads"])
    if "grad" in changed:
        torch.set_grad_enabled(wanted["grad"])
    if "deterministic" in changed:
        on, warn_only = wanted["deterministic"]
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
    if "precision" in changed:
        torch.set_float32_matmul_precision(wanted["precision"])
    if "anomaly" in changed:
        torch.autograd.set_detect_anomaly(wanted["anomaly"])


@final
class ImportedFiles:
    """The files of the modules that were imported after this object was made, apart from installed packages."""

    def __init__(self) -> None:
        self._known = set(sys.modules)
        self._files: dict[str, tuple[str, tuple[int, int] | None]] = {}  # by module: file, and its version

    def update(self) -> None:
        """Note the modules that were imported since the last call."""
        for name in sys.modules.keys() - self._known:
            self._known.add(name)
            file = _source(sys.modules[name])
            if file is not None:
                self._files[name] = file, _version(file)

    def stale(self, path: Sequence[str]) -> str | None:
        """Why a new process with ``sys.path`` as ``path`` would import other code; None: it would not."""
        for name, (file, version) in self._files.items():
            now = _version(file)
            if now is not None and now != version:
                return f"{file} has changed since it was imported"
            # pytest itself keeps several modules named conftest apart
            if "." not in name and name != "conftest" and not is_importable_as(name, file, path):
                return f"module {name!r} was imported from {file}, and another file of that name comes first now"
        return None


def is_importable_as(name: str, file: str, path: Sequence[str]) -> bool:
    """Whether an import of the top-level module ``name`` gives ``file``, or nothing, with ``sys.path`` as ``path``."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.machinery.PathFinder.find_spec(name, list(path))
        if spec is not None and spec.origin is not None and spec.has_location:
            return spec.origin == file or Path(spec.origin).resolve() == Path(file).resolve()
    return True


def _source(module: ModuleType | Any) -> str | None:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or file.startswith(_INSTALLED):
        return None
    return file


def _version(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:  # deleted: nothing else can be imported in its place
        return None
    return status.st_mtime_ns, status.st_size
