"""Probes of GPUs: the CUDA driver, the devices, and NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asynccomm.backends.nccl import cuda_settings
from asynccomm.cli.probing import CheckWarning, Section, SystemInfo


def cuda_section(system: SystemInfo) -> Section:
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
    if not torch.cuda.is_available():
        missing = [] if hidden in ("", "-1") else ["there is a CUDA driver, but torch finds no GPU"]
        return Section(facts, [CheckWarning(text, serious=True) for text in missing])
    facts["module_loading"] = cuda_settings.module_loading(system.environ)
    facts["device_max_connections"] = cuda_settings.max_connections(system.environ)
    return Section(facts, [CheckWarning(advice) for advice in cuda_settings.advice(system.environ)])


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


def devices_section(system: SystemInfo) -> Section:
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


def nccl_section(system: SystemInfo) -> Section:
    torch = system.module("torch")
    packages = {name: found for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if (found := system.version(name))}
    compiled = _compiled_nccl(torch)
    loaded = _loaded_nccl(system) if torch.version.cuda else None
    warned = _nccl_warnings(packages, compiled, loaded)
    binding = "ready"
    try:
        system.module("asynccomm.backends.nccl.bindings").load()
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
