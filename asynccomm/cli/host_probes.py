"""Probes of the host: Python, shared memory, limits, CPUs, and its name."""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from asynccomm.cli.probing import CheckWarning, Section, SystemInfo, size_text

RESOLVE_SECONDS: Final = 1.0  # a slower name lookup is reported
SHARED_BYTES: Final = 64 << 20  # of /dev/shm: Docker's default, and little for the segments of NCCL and DataLoader
DESCRIPTORS: Final = 1024  # a rank has a few per peer and comm, next to the program's own

_LOOPBACK: Final = ("127.", "::1")


def python_section(system: SystemInfo) -> Section:
    return Section(
        {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        }
    )


def shared_memory_section(system: SystemInfo) -> Section:
    memfd = hasattr(os, "memfd_create")  # used by backend "shm" where available
    facts: dict[str, object] = {"dev_shm_bytes": None, "free_bytes": None, "memfd": memfd}
    try:
        found = os.statvfs(system.root / "dev/shm")
    except OSError as exc:
        return Section(facts, [CheckWarning(f"/dev/shm cannot be used: {exc.strerror}", serious=not memfd)])
    free = found.f_bavail * found.f_frsize
    facts |= {"dev_shm_bytes": found.f_blocks * found.f_frsize, "free_bytes": free}
    if free >= SHARED_BYTES:
        return Section(facts)
    text = f"/dev/shm has only {size_text(free)} left: NCCL and DataLoader use it; in Docker, raise --shm-size"
    return Section(facts, [CheckWarning(text, serious=not memfd)])


def executor_section(system: SystemInfo) -> Section:
    core = system.module("asynccomm.core.native").load_core()
    reason = getattr(core, "reason", None)  # of CoreUnavailable
    if reason is None:
        why = system.module("asynccomm.backends.shm.single_copy").refusal()
        calls = system.module("asynccomm.backends.shm.torch_functions").torch_functions() is not None
        facts = {
            "shm": "C",
            "file": core.__file__,
            "small_calls": "C" if calls else "Python",
            "single_copy": f"no: {why}" if why else "yes",
        }
        if calls:
            return Section(facts)
        text = "small calls begin in Python: this version of torch does not show its tensors to the executor in C"
        return Section(facts, [CheckWarning(f"{text}; please report it")])
    text = f"collectives in shared memory run in Python: {reason}; a C compiler at installation makes them faster"
    return Section({"shm": "Python", "why": reason}, [CheckWarning(text)])


def limits_section(system: SystemInfo) -> Section:
    resource = system.module("resource")
    limits = {}
    for name in ("nofile", "memlock", "nproc"):
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        limits[name] = [None if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)]
    facts = {name: "/".join("unlimited" if n is None else str(n) for n in both) for name, both in limits.items()}
    warned = []
    files, locked = limits["nofile"][0], limits["memlock"][0]
    if files is not None and files < DESCRIPTORS:
        warned.append(CheckWarning(f"only {files} open files are allowed: raise `ulimit -n`"))
    if locked is not None and (system.root / "sys/class/infiniband").is_dir():
        warned.append(CheckWarning("there is an InfiniBand device, which needs `ulimit -l unlimited`"))
    return Section(facts, warned)


def cpus_section(system: SystemInfo) -> Section:
    allowed = len(os.sched_getaffinity(0))
    quota = _quota(system)
    facts = {"of_the_machine": os.cpu_count(), "allowed": allowed, "cgroup_quota": quota}
    if quota is None or quota >= allowed:
        return Section(facts)
    text = f"{allowed} CPUs are visible, but the cgroup has time for {quota:g}: run at most that many busy threads"
    return Section(facts, [CheckWarning(text)])


def _quota(system: SystemInfo) -> float | None:
    """The number of CPUs that the tightest of this process's cgroups allows; None without a limit."""
    groups = [line.split(":", 2) for line in (system.read("proc/self/cgroup") or "").splitlines()]
    found = []
    for number, controllers, name in groups:
        for group in (Path(name), *Path(name).parents):
            inside = str(group).lstrip("/")
            if number == "0":
                text = system.read(f"sys/fs/cgroup/{inside}/cpu.max")
            elif "cpu" in controllers.split(","):
                at = f"sys/fs/cgroup/cpu/{inside}/cpu.cfs_"
                text = f"{system.read(at + 'quota_us') or -1} {system.read(at + 'period_us')}"
            else:
                continue
            limit, period = (text or "max max").split()[:2]
            if limit not in ("max", "-1"):
                found.append(int(limit) / int(period))
    return min(found, default=None)


def event_loop_section(system: SystemInfo) -> Section:
    found = system.version("uvloop")
    warned = [] if found else [CheckWarning("uvloop is not installed; the event loop of asyncio is slower")]
    return Section({"uvloop": found}, warned)


def host_name_section(system: SystemInfo) -> Section:
    name = socket.gethostname()
    began = time.perf_counter()
    try:
        addresses = sorted(set(_within(RESOLVE_SECONDS, system.resolve)))
    except OSError as exc:  # TimeoutError is one
        why = f"took more than {RESOLVE_SECONDS:g} s" if isinstance(exc, TimeoutError) else str(exc)
        text = f"the host's own name {name!r} does not resolve ({why}): give it an address in /etc/hosts"
        return Section({"name": name, "addresses": None}, [CheckWarning(text)])
    seconds = round(time.perf_counter() - began, 3)
    facts = {"name": name, "addresses": addresses, "seconds": seconds}
    foreign = [address for address in addresses if not _is_ours(address)]
    if foreign:
        text = f"{name!r} resolves to {', '.join(foreign)}, which no interface of this host has: see /etc/hosts"
        return Section(facts, [CheckWarning(text)])
    local = all(address.startswith(_LOOPBACK) for address in addresses)
    return Section(
        facts | {"reachable": "from this machine only" if local else "from others, if the network lets them"}
    )


def _within(seconds: float, function: Callable[[], Iterable[str]]) -> Iterable[str]:
    """The result of ``function``; after a timeout the function goes on in its thread, unobserved."""
    results: list[Iterable[str] | Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as exc:
            results.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _is_ours(address: str) -> bool:
    if address.startswith("fe80:"):  # link-local: cannot be bound without its interface
        return True
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True
