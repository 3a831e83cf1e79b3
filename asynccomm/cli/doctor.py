"""``asynccomm doctor``: a report on this machine and its problems.

A probe examines one subject and returns a :class:`Section`. All its inputs come from a :class:`SystemInfo`, so that a
test can replace them. An exception in a probe becomes the error of its section. The probes that need torch import it,
not this module: the launcher must start without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

from asynccomm.backends.names import backend_names
from asynccomm.cli.run import Commands
from asynccomm.version import __version__

_DESCRIPTION = """\
Look at what asynccomm needs here: Python, torch, CUDA, NCCL, devices, shared memory, limits, CPUs, the host's name, and
which backends "auto" takes; with --store, also the address and the interface that it takes between hosts. Prints a
report; the exit code is 1 if something is seriously wrong, else 0.
"""

RESOLVE_SECONDS: Final = 1.0  # a slower name lookup is reported
SHARED_BYTES: Final = 64 << 20  # of /dev/shm: Docker's default, and little for the segments of NCCL and DataLoader
DESCRIPTORS: Final = 1024  # a rank has a few per peer and comm, next to the program's own

_LOOPBACK: Final = ("127.", "::1")


@final
@dataclass(frozen=True, slots=True)
class CheckWarning:
    """A problem; ``serious`` if a feature will not work."""

    text: str
    serious: bool = False


@final
@dataclass(frozen=True, slots=True)
class Section:
    """The result of a probe. Facts with names in ``_bytes`` are sizes; None stands for an absent thing."""

    facts: Mapping[str, object]
    warned: Sequence[CheckWarning] = ()
    error: str | None = None  #: why the probe failed


@final
@dataclass(frozen=True, slots=True)
class SystemInfo:
    """The inputs of probes."""

    module: Callable[[str], Any] = import_module
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")  #: of /proc, /sys and /dev
    resolve: Callable[[], Iterable[str]] = lambda: _addresses(socket.gethostname())

    def version(self, package: str) -> str | None:
        """The version of an installed package; None if it is not installed."""
        metadata = self.module("importlib.metadata")
        try:
            found: str = metadata.version(package)
        except metadata.PackageNotFoundError:
            return None
        return found

    def read(self, path: str) -> str | None:
        """The content of a system file; None if it cannot be read."""
        try:
            return (self.root / path).read_text()
        except OSError:
            return None


def _python(system: SystemInfo) -> Section:
    return Section(
        {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        }
    )


def _torch(system: SystemInfo) -> Section:
    torch = system.module("torch")
    distributed = torch.distributed.is_available()
    gloo = distributed and torch.distributed.is_gloo_available()
    warned = []
    if not distributed:
        warned.append(CheckWarning("this torch has no torch.distributed, whose store the ranks meet on", serious=True))
    elif not gloo:
        warned.append(CheckWarning("this torch has no gloo: on CPUs, ranks must be on one machine"))
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = next((f"{kind} {number}" for kind, number in kinds.items() if number), "CPU only")
    return Section({"version": str(torch.__version__), "built_for": built, "gloo": gloo}, warned)


def _cuda(system: SystemInfo) -> Section:
    torch = system.module("torch")
    built: str | None = torch.version.cuda
    hidden = system.environ.get("CUDA_VISIBLE_DEVICES")
    kernel = _kernel_driver(system)
    facts: dict[str, object] = {"kernel_driver": kernel, "cuda_visible_devices": hidden}
    try:
        driver = _driver_version(system)
    except OSError as exc:
        text = f"the kernel has the NVIDIA driver {kernel}, but its library is not here: {exc}"
        warned = [CheckWarning(text, serious=True)] if kernel and built else []
        return Section({"driver": None, "why": str(exc)} | facts, warned)
    facts = {"driver": f"for CUDA up to {driver[0]}.{driver[1]}"} | facts
    if built is None:
        return Section(facts, [CheckWarning("there is a CUDA driver, but this torch is built without CUDA")])
    if driver[0] < int(built.partition(".")[0]):
        text = f"torch is built for CUDA {built}, but the driver ends at {driver[0]}.{driver[1]}: install a newer one"
        return Section(facts, [CheckWarning(text, serious=True)])
    if not torch.cuda.is_available() and hidden not in ("", "-1"):
        return Section(facts, [CheckWarning("there is a CUDA driver, but torch finds no GPU", serious=True)])
    return Section(facts)


def _driver_version(system: SystemInfo) -> tuple[int, int]:
    """The CUDA version of the driver. Raises: OSError without a driver."""
    ctypes = system.module("ctypes")
    number = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    if status:
        raise OSError(f"cuDriverGetVersion failed with {status}")
    return number.value // 1000, number.value % 1000 // 10


def _kernel_driver(system: SystemInfo) -> str | None:
    text = system.read("proc/driver/nvidia/version")
    return None if text is None else next((word for word in text.split() if word[:1].isdigit() and "." in word), None)


def _devices(system: SystemInfo) -> Section:
    cuda = system.module("torch").cuda
    count = cuda.device_count() if cuda.is_available() else 0
    facts: dict[str, object] = {"count": count}
    apart = []
    for index in range(count):
        found = cuda.get_device_properties(index)
        reached = [other for other in range(count) if other != index and cuda.can_device_access_peer(index, other)]
        apart += [f"{index}-{other}" for other in range(index + 1, count) if other not in reached]
        facts[f"device_{index}"] = {
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "memory_bytes": found.total_memory,
            "reaches": reached,
        }
    if apart:
        text = f"devices {', '.join(apart)} do not reach each other's memory: NCCL goes through the host's"
        return Section(facts, [CheckWarning(text)])
    return Section(facts)


def _nccl(system: SystemInfo) -> Section:
    torch = system.module("torch")
    packages = {name: found for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if (found := system.version(name))}
    compiled = _compiled_nccl(torch)
    loaded = _loaded_nccl(system) if torch.version.cuda else None
    warned = _nccl_warnings(packages, compiled, loaded)
    binding = "ready"
    try:
        system.module("asynccomm.backends.nccl.api").load()
    except Exception as exc:
        binding = f"{exc}"
        if torch.cuda.is_available():
            warned.append(CheckWarning(f"backend 'nccl' cannot be used: {exc}", serious=True))
    return Section(
        {
            "torch_compiled_with": _dotted(compiled),
            "torch_requires": _requirement(system, "torch", "nvidia-nccl"),
            "packages": packages or None,
            "loaded": _dotted(loaded),
            "loaded_from": _mapped(system, "libnccl"),
            "nccl4py": system.version("nccl4py"),
            "binding": binding,
        },
        warned,
    )


def _nccl_warnings(
    packages: Mapping[str, str], compiled: tuple[int, ...] | None, loaded: tuple[int, ...] | None
) -> list[CheckWarning]:
    warned = []
    if len(packages) > 1:
        both = " and ".join(f"{name} {version}" for name, version in packages.items())
        text = f"{both} are both installed, and have overwritten each other's libnccl: "
        warned.append(
            CheckWarning(text + "uninstall both, then install the one that torch requires again", serious=True)
        )
    if compiled and loaded and loaded != compiled:
        older = loaded < compiled
        text = f"NCCL {_dotted(loaded)} is loaded, but torch was compiled with {_dotted(compiled)}"
        warned.append(CheckWarning(text + (", which is newer" if older else ""), serious=older))
    return warned


def _compiled_nccl(torch: Any) -> tuple[int, ...] | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return tuple(torch.cuda.nccl.version()[:3])  # a suffix may follow


def _loaded_nccl(system: SystemInfo) -> tuple[int, ...] | None:
    """The version of the NCCL that torch has loaded, found by its file name."""
    ctypes = system.module("ctypes")
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:  # torch is linked with NCCL statically, or not at all
        return None
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _mapped(system: SystemInfo, name: str) -> str | None:
    """The files under that name that are mapped into this process."""
    lines = (system.read("proc/self/maps") or "").splitlines()
    return ", ".join(sorted({line[line.index("/") :] for line in lines if f"/{name}" in line})) or None


def _requirement(system: SystemInfo, package: str, wanted: str) -> str | None:
    metadata = system.module("importlib.metadata")
    try:
        found = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return None
    return next((text.partition(";")[0].strip() for text in found if text.startswith(wanted)), None)


def _dotted(version: tuple[int, ...] | None) -> str | None:
    return ".".join(map(str, version)) if version else None


def _shared_memory(system: SystemInfo) -> Section:
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
    text = f"/dev/shm has only {_size(free)} left: NCCL and DataLoader use it; in Docker, raise --shm-size"
    return Section(facts, [CheckWarning(text, serious=not memfd)])


def _executor(system: SystemInfo) -> Section:
    core = system.module("asynccomm.core.native").load_core()
    reason = getattr(core, "reason", None)  # of CoreUnavailable
    if reason is None:
        return Section({"shm": "C", "file": core.__file__})
    text = f"collectives in shared memory run in Python: {reason}; a C compiler at installation makes them faster"
    return Section({"shm": "Python", "why": reason}, [CheckWarning(text)])


def _limits(system: SystemInfo) -> Section:
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


def _cpus(system: SystemInfo) -> Section:
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


def _event_loop(system: SystemInfo) -> Section:
    found = system.version("uvloop")
    warned = [] if found else [CheckWarning("uvloop is not installed; the event loop of asyncio is slower")]
    return Section({"uvloop": found}, warned)


def _host_name(system: SystemInfo) -> Section:
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


def _addresses(name: str) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]


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


def _backends(system: SystemInfo) -> Section:
    registry = system.module("asynccomm.backends.registry")
    torch = system.module("torch")
    chosen = partial(_chosen, registry, torch)
    (cpu, usable), (cuda, _) = chosen("cpu"), chosen("cuda")
    warned = [] if usable else [CheckWarning("no backend can be used for CPU tensors", serious=True)]
    return Section({"known": backend_names(), "auto_for_cpu": cpu, "auto_for_cuda": cuda}, warned)


def _chosen(registry: Any, torch: Any, kind: str) -> tuple[str, bool]:
    """A description of the backends that "auto" tries for a kind of device, and whether any of them can be loaded."""
    device = torch.device(kind)
    try:
        names = registry.candidates("auto", device)
    except ValueError as exc:
        return f"none: {exc}", False
    words, usable = [], False
    for name in names:
        try:
            registry.load_backend(name, device)
        except Exception as exc:
            words.append(f"not {name}: {exc}")
        else:
            words.append(name)
            usable = True
    text = ", then ".join(words)
    if len(words) > 1:
        text += "; the first that suits all ranks is taken, and the fastest is first"
    if kind == "cuda" and not torch.cuda.is_available():
        text += "; but there is no GPU here"
    return text, usable


def _way(host: str, port: int, system: SystemInfo) -> Section:
    facts, problem = system.module("asynccomm.cli.way").find_way(host, port, system.environ)
    return Section(facts, [CheckWarning(problem, serious=True)] if problem else [])


PROBES: Final[Mapping[str, Callable[[SystemInfo], Section]]] = {
    "python": _python,
    "torch": _torch,
    "cuda": _cuda,
    "devices": _devices,
    "nccl": _nccl,
    "shared_memory": _shared_memory,
    "executor": _executor,
    "limits": _limits,
    "cpus": _cpus,
    "event_loop": _event_loop,
    "host_name": _host_name,
    "backends": _backends,
}


@final
@dataclass(frozen=True, slots=True)
class Checkup:
    """All sections, by name."""

    sections: Mapping[str, Section]
    asynccomm: str = __version__

    @property
    def ok(self) -> bool:
        """Whether no problem is serious; a failed probe is serious."""
        sections = self.sections.values()
        return not any(section.error or any(found.serious for found in section.warned) for section in sections)


def examine(system: SystemInfo, probes: Mapping[str, Callable[[SystemInfo], Section]] = PROBES) -> Checkup:
    """Run all probes."""
    return Checkup({name: _isolated(probe, system) for name, probe in probes.items()})


def _isolated(probe: Callable[[SystemInfo], Section], system: SystemInfo) -> Section:
    with warnings.catch_warnings(record=True) as caught:  # torch's warnings explain a missing GPU
        warnings.simplefilter("always")
        try:
            section = probe(system)
        except Exception as exc:
            section = Section({}, error=f"{type(exc).__name__}: {exc}")
    texts = dict.fromkeys(str(warning.message) for warning in caught)
    return Section(section.facts, [*section.warned, *map(CheckWarning, texts)], section.error)


def as_text(report: Checkup) -> str:
    """The report as text."""
    lines = [f"asynccomm {report.asynccomm}"]
    for name, section in report.sections.items():
        lines += ["", name.replace("_", " ")]
        rows = [(_title(key), _text(key, value)) for key, value in section.facts.items()]
        width = max((len(title) for title, _ in rows), default=0)
        lines += [f"  {title:{width}}  {text}" for title, text in rows]
        if section.error:
            lines.append(f"  FAILED   {section.error}")
        lines += [f"  {'SERIOUS' if found.serious else 'warning'}  {found.text}" for found in section.warned]
    warned = sum(len(section.warned) for section in report.sections.values())
    summary = "nothing seems wrong" if not warned else f"{warned} warning{'s' if warned > 1 else ''}, none serious"
    lines += ["", summary if report.ok else "something is seriously wrong; see above"]
    return "\n".join(lines)


def _title(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ")


def _text(key: str, value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{_title(inner)} {_text(inner, found)}" for inner, found in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return _size(value) if key.endswith("_bytes") and isinstance(value, int) else str(value)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def add_command(commands: Commands) -> None:
    """Register ``doctor`` with the command line."""
    parser = commands.add_parser(
        "doctor",
        help="look at what asynccomm needs here",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="asynccomm doctor [--json] [--store tcp://HOST:PORT]",
    )
    store = "the place where ranks of several hosts meet: says which address this host would use"
    parser.add_argument("--store", metavar="tcp://HOST:PORT", help=store)
    parser.add_argument("--json", action="store_true", help="print the report for machines")
    parser.set_defaults(command=_doctor, parser=parser)


def _doctor(arguments: argparse.Namespace) -> int:
    probes = dict(PROBES)
    if arguments.store is not None:
        try:
            host, port = import_module("asynccomm.cli.way").store_address(arguments.store)
        except ValueError as exc:
            arguments.parser.error(f"argument --store: {exc}")
        probes["way_to_the_store"] = partial(_way, host, port)
    report = examine(SystemInfo(), probes)
    print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2) if arguments.json else as_text(report))
    return 0 if report.ok else 1
