"""Machines that are put together for the probes of ``asynccomm doctor``."""

from __future__ import annotations

import ctypes
import resource
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asynccomm.cli.doctor import PROBES
from asynccomm.cli.probing import Section, SystemInfo

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
    "asynccomm.backends.nccl.bindings": binding(),
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


def check(section: Section, facts: dict[str, object], warned: list[Words]) -> None:
    """The section has these facts, and warnings with these words in them."""
    assert {name: section.facts[name] for name in facts} == facts
    assert [serious for _, serious in words(section)] == [serious for _, serious in warned]
    for (text, _), (part, _) in zip(words(section), warned, strict=True):
        assert part in text


def fail(error: Exception) -> Any:
    raise error
