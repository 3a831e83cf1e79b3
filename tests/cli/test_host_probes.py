"""Probes of the host on machines that are put together here."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asynccomm.cli import host_probes
from asynccomm.cli.doctor import PROBES, examine
from asynccomm.cli.probing import Section, SystemInfo
from tests.cli.pretended_machine import Metadata, Words, check, fail, machine, probe, words


def test_python() -> None:
    section = probe("python", machine())
    assert section.facts["version"].startswith("3.")
    assert words(section) == []


def statvfs(free: int) -> Any:
    return lambda path: SimpleNamespace(f_bavail=free >> 12, f_frsize=4096, f_blocks=2 * free >> 12)


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", statvfs(1 << 30))
    assert probe("shared_memory", machine()) == Section(
        {"dev_shm_bytes": 2 << 30, "free_bytes": 1 << 30, "memfd": hasattr(os, "memfd_create")}
    )


@pytest.mark.parametrize("memfd", [True, False])
def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch, memfd: bool) -> None:
    monkeypatch.setattr(os, "statvfs", statvfs(8 << 20))
    monkeypatch.delattr(os, "memfd_create", raising=False)
    if memfd:
        monkeypatch.setattr(os, "memfd_create", None, raising=False)
    check(probe("shared_memory", machine()), {"memfd": memfd}, [("/dev/shm has only 8.0 MiB left", not memfd)])


def executors(load_core: Any, refusal: str = "", *, shown: bool = True) -> Any:
    return {
        "asynccomm.core.native": SimpleNamespace(load_core=load_core),
        "asynccomm.backends.shm.torch_functions": SimpleNamespace(torch_functions=lambda: "found" if shown else None),
        "asynccomm.backends.shm.single_copy": SimpleNamespace(refusal=lambda: refusal),
    }


@pytest.mark.parametrize(("refusal", "says"), [("", "yes"), ("not permitted", "no: not permitted")])
def test_the_executor_in_c(refusal: str, says: str) -> None:
    modules = executors(lambda: SimpleNamespace(__file__="/lib/_core.so"), refusal)
    expected = Section({"shm": "C", "file": "/lib/_core.so", "small_calls": "C", "single_copy": says})
    assert probe("executor", machine(**modules)) == expected


def test_the_executor_in_c_with_a_torch_that_hides_its_tensors() -> None:
    modules = executors(lambda: SimpleNamespace(__file__="/lib/_core.so"), shown=False)
    facts = {"shm": "C", "small_calls": "Python", "single_copy": "yes"}
    check(probe("executor", machine(**modules)), facts, [("small calls begin in Python: this version of torch", False)])


def test_the_executor_in_python_and_why() -> None:
    modules = executors(lambda: SimpleNamespace(reason="no compiler"))
    section = probe("executor", machine(**modules))
    check(section, {"shm": "Python", "why": "no compiler"}, [("run in Python: no compiler; a C compiler", False)])


def test_no_shared_memory(tmp_path: Path) -> None:
    section = probe("shared_memory", machine(tmp_path))
    check(section, {"dev_shm_bytes": None}, [("/dev/shm cannot be used: No such file", not section.facts["memfd"])])


def limited(**soft: int) -> SimpleNamespace:
    """resource, with these soft limits and no hard ones; -1 is unlimited."""
    names = {f"RLIMIT_{name.upper()}": name for name in ("nofile", "memlock", "nproc")}
    return SimpleNamespace(RLIM_INFINITY=-1, getrlimit=lambda name: (soft.get(name, 4096), -1), **names)


@pytest.mark.parametrize(
    ("soft", "infiniband", "warned"),
    [
        ({}, False, []),
        ({"nofile": 256}, False, [("only 256 open files are allowed", False)]),
        ({"nofile": -1, "memlock": -1}, True, []),
        ({}, True, [("InfiniBand", False)]),
    ],
)
def test_limits(tmp_path: Path, soft: dict[str, int], infiniband: bool, warned: list[Words]) -> None:
    if infiniband:
        (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    check(probe("limits", machine(tmp_path, resource=limited(**soft))), {"nproc": "4096/unlimited"}, warned)


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_cpus_without_a_quota(tmp_path: Path) -> None:
    section = probe("cpus", machine(tmp_path))
    assert section == Section(
        {"of_the_machine": os.cpu_count(), "allowed": len(os.sched_getaffinity(0)), "cgroup_quota": None}
    )


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/slice/job\n")
    write(tmp_path, "sys/fs/cgroup/slice/job/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/slice/cpu.max", "50000 100000\n")
    text = "the cgroup has time for 0.5"
    check(probe("cpus", machine(tmp_path)), {"cgroup_quota": 0.5}, [(text, False)])


@pytest.mark.parametrize(("quota", "cpus"), [("-1", None), ("25000", 0.25)])
def test_old_cgroups(tmp_path: Path, quota: str, cpus: float | None) -> None:
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/x\n4:cpu,cpuacct:/docker/1\n3:cpuset:/\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us", quota)
    write(tmp_path, "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us", "100000")
    assert probe("cpus", machine(tmp_path)).facts["cgroup_quota"] == cpus


def test_event_loop() -> None:
    check(probe("event_loop", machine()), {"uvloop": "0.22.1"}, [])
    check(
        probe("event_loop", machine(importlib__metadata=Metadata())),
        {"uvloop": None},
        [("uvloop is not installed", False)],
    )


@pytest.mark.parametrize(
    ("addresses", "facts", "warned"),
    [
        (["127.0.0.1", "127.0.0.1"], {"addresses": ["127.0.0.1"], "reachable": "from this machine only"}, []),
        (["fe80::1"], {"reachable": "from others, if the network lets them"}, []),
        (["192.0.2.1"], {"addresses": ["192.0.2.1"]}, [("resolves to 192.0.2.1, which no interface", False)]),
        (OSError("Name or service not known"), {"addresses": None}, [("resolve (Name or service not known)", False)]),
    ],
)
def test_host_name(addresses: Any, facts: dict[str, object], warned: list[Words]) -> None:
    resolve = (lambda: fail(addresses)) if isinstance(addresses, Exception) else (lambda: addresses)
    check(probe("host_name", SystemInfo(resolve=resolve)), facts, warned)


def test_a_name_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probes, "RESOLVE_SECONDS", 0.05)
    release = threading.Event()
    before = set(threading.enumerate())
    try:
        section = probe("host_name", SystemInfo(resolve=lambda: [str(release.wait(60))]))
    finally:
        release.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
    check(section, {"addresses": None}, [("does not resolve (took more than 0.05 s)", False)])


def test_a_surprise_while_resolving_is_not_lost() -> None:
    report = examine(SystemInfo(resolve=lambda: fail(UnicodeError("label too long"))), {"host": PROBES["host_name"]})
    assert report.sections["host"].error == "UnicodeError: label too long"
