"""Probes of GPUs on machines that are put together here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asynccomm.cli.probing import Section
from asynccomm.errors import BackendError
from tests.cli.pretended_machine import Metadata, Words, a_torch, binding, check, libraries, machine, probe, words

EAGER = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
LAZY = ("CUDA_MODULE_LOADING=EAGER loads all kernels at the start", False)
FEW = ("CUDA_DEVICE_MAX_CONNECTIONS=32 allows as many queues", False)
NO_DRIVER = "libcuda.so.1: cannot open shared object file"


@pytest.mark.parametrize(
    ("torch", "driver", "environ", "facts", "warned"),
    [
        (a_torch(), None, {}, {"driver": None, "why": NO_DRIVER, "cuda_visible_devices": None}, []),
        (a_torch(gpus=1), 13020, EAGER, {"driver": "for CUDA up to 13.2", "module_loading": "EAGER"}, []),
        (a_torch(gpus=1), 13000, EAGER, {"driver": "for CUDA up to 13.0"}, []),  # the same major version will do
        (a_torch(gpus=1), 13020, {}, {"module_loading": "LAZY", "device_max_connections": "8"}, [LAZY, FEW]),
        (a_torch(gpus=1), 13020, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, {"device_max_connections": "32"}, [LAZY]),
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
        "asynccomm__backends__nccl__bindings": binding(BackendError("nccl4py is missing")),
    }
    section = probe("nccl", machine(**modules))
    assert set(section.facts.values()) == {None, "nccl4py is missing"}
    assert words(section) == []  # nobody needs it here


def test_nccl_where_it_is_needed() -> None:
    system = machine(torch=a_torch(gpus=1), asynccomm__backends__nccl__bindings=binding(BackendError("install it")))
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
