"""What the doctor says, of machines that are put together here, and of this one."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import threading
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asynccomm.backends.names import backend_names
from asynccomm.cli import doctor
from asynccomm.cli.doctor import PROBES, Checkup, CheckWarning, Section, SystemInfo, as_text, examine
from asynccomm.cli.main import main
from asynccomm.errors import BackendError
from asynccomm.version import __version__

Words = tuple[str, bool]  # of a warning, and whether it is serious


def a_torch(
    cuda: str | None = "13.2",
    gpus: int = 0,
    nccl: tuple[Any, ...] = (2, 30, 7),
    gloo: bool = True,
    distributed: bool = True,
    hip: str | None = None,
    peers: bool = True,
) -> SimpleNamespace:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 << 30)
    return SimpleNamespace(
        __version__="2.15.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        device=lambda kind: kind,
        distributed=SimpleNamespace(
            is_available=lambda: distributed, is_gloo_available=lambda: gloo, is_nccl_available=lambda: bool(nccl)
        ),
        cuda=SimpleNamespace(
            is_available=lambda: gpus > 0,
            device_count=lambda: gpus,
            get_device_properties=lambda index: properties,
            can_device_access_peer=lambda one, other: peers,
            nccl=SimpleNamespace(version=lambda: nccl),
        ),
    )


def libraries(driver: int | None = None, nccl: int | None = 23007, status: int = 0) -> SimpleNamespace:
    """ctypes, where these libraries are; None: not there."""

    def function(value: int) -> Any:
        def call(number: Any) -> int:
            number.value = value
            return status

        return call

    def load(name: str) -> SimpleNamespace:
        if name == "libcuda.so.1" and driver is not None:
            return SimpleNamespace(cuDriverGetVersion=function(driver))
        if name == "libnccl.so.2" and nccl is not None:
            return SimpleNamespace(ncclGetVersion=function(nccl))
        raise OSError(f"{name}: cannot open shared object file")

    return SimpleNamespace(c_int=ctypes.c_int, byref=lambda number: number, CDLL=load)


class Metadata:
    """importlib.metadata, where these packages are installed."""

    PackageNotFoundError = PackageNotFoundError

    def __init__(self, **versions: str) -> None:
        self._versions = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(self, package: str) -> str:
        if package not in self._versions:
            raise PackageNotFoundError(package)
        return self._versions[package]

    def requires(self, package: str) -> list[str]:
        self.version(package)
        return ["filelock", 'nvidia-nccl-cu13==2.30.7; platform_system == "Linux"']


def binding(error: Exception | None = None) -> SimpleNamespace:
    def load() -> None:
        if error is not None:
            raise error

    return SimpleNamespace(load=load)


MODULES = {
    "torch": a_torch(),
    "ctypes": libraries(),
    "importlib.metadata": Metadata(torch="2.15.0", nvidia_nccl_cu13="2.30.7", nccl4py="0.6.0", uvloop="0.22.1"),
    "asynccomm.backends.nccl.api": binding(),
    "resource": resource,
}


def machine(root: Path = Path("/nowhere"), environ: dict[str, str] | None = None, **modules: Any) -> SystemInfo:
    """One with these modules; without any it is sound and has no GPU."""
    found = MODULES | {name.replace("__", "."): module for name, module in modules.items()}
    return SystemInfo(module=lambda name: found[name], environ=environ or {}, root=root)


def words(section: Section) -> list[Words]:
    return [(warned.text, warned.serious) for warned in section.warned]


def probe(name: str, system: SystemInfo) -> Section:
    return PROBES[name](system)


def test_python() -> None:
    section = probe("python", machine())
    assert section.facts["version"].startswith("3.")
    assert words(section) == []


@pytest.mark.parametrize(
    ("torch", "facts", "warned"),
    [
        (a_torch(), {"version": "2.15.0", "built_for": "CUDA 13.2", "gloo": True}, []),
        (a_torch(cuda=None, nccl=()), {"built_for": "CPU only"}, []),
        (a_torch(cuda=None, hip="7.1"), {"built_for": "ROCm 7.1"}, []),
        (a_torch(gloo=False), {"gloo": False}, [("has no gloo: on CPUs, ranks must be on one machine", False)]),
        (a_torch(distributed=False), {"gloo": False}, [("this torch has no torch.distributed, whose", True)]),
    ],
)
def test_torch(torch: Any, facts: dict[str, object], warned: list[Words]) -> None:
    check(probe("torch", machine(torch=torch)), facts, warned)


def check(section: Section, facts: dict[str, object], warned: list[Words]) -> None:
    """The section has these facts, and warnings with these words in them."""
    assert {name: section.facts[name] for name in facts} == facts
    assert [serious for _, serious in words(section)] == [serious for _, serious in warned]
    for (text, _), (part, _) in zip(words(section), warned, strict=True):
        assert part in text


NO_DRIVER = "libcuda.so.1: cannot open shared object file"


@pytest.mark.parametrize(
    ("torch", "driver", "environ", "facts", "warned"),
    [
        (a_torch(), None, {}, {"driver": None, "why": NO_DRIVER, "cuda_visible_devices": None}, []),
        (a_torch(gpus=1), 13020, {}, {"driver": "for CUDA up to 13.2"}, []),
        (a_torch(gpus=1), 13000, {}, {"driver": "for CUDA up to 13.0"}, []),  # the same major version will do
        (a_torch(), 12080, {}, {}, [("torch is built for CUDA 13.2, but the driver ends at 12.8", True)]),
        (a_torch(), 13020, {}, {}, [("there is a CUDA driver, but torch finds no GPU", True)]),
        (a_torch(), 13020, {"CUDA_VISIBLE_DEVICES": ""}, {"cuda_visible_devices": ""}, []),
        (a_torch(cuda=None), 13020, {}, {}, [("but this torch is built without CUDA", False)]),
    ],
)
def test_cuda(torch: Any, driver: int | None, environ: dict[str, str], facts: Any, warned: list[Words]) -> None:
    section = probe("cuda", machine(environ=environ, torch=torch, ctypes=libraries(driver)))
    check(section, facts, warned)


def test_a_driver_that_does_not_answer() -> None:
    section = probe("cuda", machine(ctypes=libraries(13020, status=3)))
    check(section, {"driver": None, "why": "cuDriverGetVersion failed with 3"}, [])


@pytest.mark.parametrize(("cuda", "serious"), [("13.2", [True]), (None, [])])
def test_a_container_without_the_drivers_library(tmp_path: Path, cuda: str | None, serious: list[bool]) -> None:
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version: gcc 12\n")
    section = probe("cuda", machine(tmp_path, torch=a_torch(cuda)))
    assert section.facts["kernel_driver"] == "580.95.05"
    assert [warned.serious for warned in section.warned] == serious


def test_devices() -> None:
    assert probe("devices", machine()) == Section({"count": 0})
    section = probe("devices", machine(torch=a_torch(gpus=2)))
    device = {"name": "NVIDIA H200", "capability": "9.0", "memory_bytes": 139 << 30}
    assert section == Section(
        {"count": 2, "device_0": device | {"reaches": [1]}, "device_1": device | {"reaches": [0]}}
    )


def test_devices_apart() -> None:
    section = probe("devices", machine(torch=a_torch(gpus=3, peers=False)))
    check(section, {"count": 3}, [("devices 0-1, 0-2, 1-2 do not reach each other's memory", False)])


def test_nccl(tmp_path: Path) -> None:
    maps = tmp_path / "proc/self/maps"
    maps.parent.mkdir(parents=True)
    maps.write_text("7f-80 r-xp 0 08:01 5  /a b/libnccl.so.2\n80-81 r--p 0 08:01 5  /a b/libnccl.so.2\n81-82 rw-p 0\n")
    section = probe("nccl", machine(tmp_path))
    assert section == Section(
        {
            "torch_compiled_with": "2.30.7",
            "torch_requires": "nvidia-nccl-cu13==2.30.7",
            "packages": {"nvidia-nccl-cu13": "2.30.7"},
            "loaded": "2.30.7",
            "loaded_from": "/a b/libnccl.so.2",
            "nccl4py": "0.6.0",
            "binding": "ready",
        },
        [],
    )


def test_nccl_where_there_is_none() -> None:
    modules = {
        "torch": a_torch(None, nccl=()),
        "importlib__metadata": Metadata(),
        "asynccomm__backends__nccl__api": binding(BackendError("nccl4py is missing")),
    }
    section = probe("nccl", machine(**modules))
    assert set(section.facts.values()) == {None, "nccl4py is missing"}
    assert words(section) == []  # nobody needs it here


def test_nccl_where_it_is_needed() -> None:
    system = machine(torch=a_torch(gpus=1), asynccomm__backends__nccl__api=binding(BackendError("install it")))
    check(probe("nccl", system), {"binding": "install it"}, [("backend 'nccl' cannot be used: install it", True)])


def test_two_nccl_packages() -> None:
    both = Metadata(torch="2.15.0", nvidia_nccl_cu12="2.32.3", nvidia_nccl_cu13="2.30.7")
    section = probe("nccl", machine(importlib__metadata=both, ctypes=libraries(nccl=23203)))
    assert section.facts["packages"] == {"nvidia-nccl-cu12": "2.32.3", "nvidia-nccl-cu13": "2.30.7"}
    check(
        section,
        {"loaded": "2.32.3", "nccl4py": None},
        [
            ("nvidia-nccl-cu12 2.32.3 and nvidia-nccl-cu13 2.30.7 are both installed, and have overwritten", True),
            ("NCCL 2.32.3 is loaded, but torch was compiled with 2.30.7", False),
        ],
    )


@pytest.mark.parametrize(
    ("loaded", "compiled", "warned"),
    [
        (22805, (2, 30, 7), [("NCCL 2.28.5 is loaded, but torch was compiled with 2.30.7, which is newer", True)]),
        (23007, (2, 30, 7, "rc1"), []),
        (None, (2, 30, 7), []),  # torch has it built in
    ],
)
def test_another_nccl(loaded: int | None, compiled: tuple[Any, ...], warned: list[Words]) -> None:
    check(probe("nccl", machine(torch=a_torch(nccl=compiled), ctypes=libraries(nccl=loaded))), {}, warned)


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


def executors(load_core: Any) -> Any:
    return {"asynccomm.core.native": SimpleNamespace(load_core=load_core)}


def test_the_executor_in_c() -> None:
    modules = executors(lambda: SimpleNamespace(__file__="/lib/_core.so"))
    assert probe("executor", machine(**modules)) == Section({"shm": "C", "file": "/lib/_core.so"})


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


def fail(error: Exception) -> Any:
    raise error


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
    monkeypatch.setattr(doctor, "RESOLVE_SECONDS", 0.05)
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


class Registry:
    """backends.registry, with these for "auto"; those whose name begins with ! cannot be loaded."""

    def __init__(self, **auto: str) -> None:
        self._auto = auto

    def candidates(self, name: str, device: str) -> list[str]:
        assert name == "auto"
        if device not in self._auto:
            raise ValueError(f"no choice for {device}")
        return self._auto[device].split()

    def load_backend(self, name: str, device: str) -> None:
        if name.startswith("!"):
            raise ImportError(f"{name} is broken")


@pytest.mark.parametrize(
    ("auto", "torch", "cpu", "cuda", "warned"),
    [
        ({"cpu": "shm gloo"}, a_torch(), "shm, then gloo; the first that suits", "none: no choice for cuda", []),
        ({"cpu": "shm", "cuda": "nccl"}, a_torch(gpus=1), "shm", "nccl", []),
        ({"cpu": "shm", "cuda": "nccl"}, a_torch(), "shm", "nccl; but there is no GPU here", []),
        ({"cpu": "!shm gloo"}, a_torch(), "not !shm: !shm is broken, then gloo", "none", []),
        ({"cpu": "!shm"}, a_torch(), "not !shm", "none", [("no backend can be used for CPU tensors", True)]),
    ],
)
def test_backends(auto: dict[str, str], torch: Any, cpu: str, cuda: str, warned: list[Words]) -> None:
    section = probe("backends", machine(torch=torch, asynccomm__backends__registry=Registry(**auto)))
    check(section, {"known": backend_names()}, warned)
    assert str(section.facts["auto_for_cpu"]).startswith(cpu)
    assert str(section.facts["auto_for_cuda"]).startswith(cuda)


# -- the report


def test_a_probe_that_fails_is_alone() -> None:
    report = examine(
        machine(), {"bad": lambda system: fail(ValueError("no such thing")), "good": lambda system: Section({"n": 1})}
    )
    assert report.sections["bad"] == Section({}, [], "ValueError: no such thing")
    assert report.sections["good"] == Section({"n": 1}, [])
    assert not report.ok
    assert "FAILED   ValueError: no such thing" in as_text(report)


def test_what_python_warns_of_while_probing_is_reported_once() -> None:
    def warn(system: SystemInfo) -> Section:
        for _ in range(2):
            warnings.warn("the driver is too old", stacklevel=1)
        return Section({}, [CheckWarning("a", serious=True)])

    section = examine(machine(), {"probe": warn}).sections["probe"]
    assert section.warned == [CheckWarning("a", serious=True), CheckWarning("the driver is too old")]


@pytest.mark.parametrize(
    ("section", "ok", "summary"),
    [
        (Section({}), True, "nothing seems wrong"),
        (Section({}, [CheckWarning("a")]), True, "1 warning, none serious"),
        (Section({}, [CheckWarning("a"), CheckWarning("b")]), True, "2 warnings, none serious"),
        (
            Section({}, [CheckWarning("a"), CheckWarning("b", serious=True)]),
            False,
            "something is seriously wrong; see above",
        ),
        (Section({}, error="x"), False, "something is seriously wrong; see above"),
    ],
)
def test_whether_all_is_well(section: Section, ok: bool, summary: str) -> None:
    report = Checkup({"some": section})
    assert report.ok is ok
    assert as_text(report).splitlines()[-1] == summary


def test_text() -> None:
    facts = {
        "memory_bytes": 3 << 30,
        "free_bytes": 1 << 19,
        "yes": True,
        "absent": None,
        "names": ["a", "b"],
        "empty": [],
        "device_0": {"name": "H200", "memory_bytes": 1 << 30, "reaches": [1]},
    }
    assert as_text(
        Checkup({"one_thing": Section(facts, [CheckWarning("a"), CheckWarning("b", serious=True)])})
    ) == "\n".join(
        [
            f"asynccomm {__version__}",
            "",
            "one thing",
            "  memory    3.0 GiB",
            "  free      0.5 MiB",
            "  yes       yes",
            "  absent    none",
            "  names     a b",
            "  empty     none",
            "  device 0  name H200, memory 1.0 GiB, reaches 1",
            "  warning  a",
            "  SERIOUS  b",
            "",
            "something is seriously wrong; see above",
        ]
    )


# -- the command


@pytest.mark.parametrize(("serious", "code"), [(False, 0), (True, 1)])
def test_exit_code_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], serious: bool, code: int
) -> None:
    section = Section({"n": 1, "list": [1]}, (CheckWarning("a", serious),))
    monkeypatch.setattr(doctor, "examine", lambda system, probes: Checkup({"some": section}))
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {
        "ok": not serious,
        "asynccomm": __version__,
        "sections": {
            "some": {"facts": {"n": 1, "list": [1]}, "warned": [{"text": "a", "serious": serious}], "error": None}
        },
    }
    assert main(["doctor"]) == code
    assert "some\n  n     1\n" in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--help"])
    assert ended.value.code == 0
    assert "usage: asynccomm doctor [--json]" in capsys.readouterr().out


def test_on_this_machine(launcher) -> None:
    code, out, err = launcher.run("doctor", "--json")
    report = json.loads(out)
    assert (code, err) == (0 if report["ok"] else 1, "")
    assert list(report["sections"]) == list(PROBES)
    assert {name: section["error"] for name, section in report["sections"].items() if section["error"]} == {}
    assert "shm" in report["sections"]["backends"]["facts"]["auto_for_cpu"]


def test_for_people_on_this_machine(launcher) -> None:
    code, out, err = launcher.run("doctor", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert err == ""
    assert out.startswith(f"asynccomm {__version__}\n\npython\n")
    assert all(f"\n{name.replace('_', ' ')}\n" in out for name in PROBES)
    assert (code == 1) == out.endswith("something is seriously wrong; see above\n")
