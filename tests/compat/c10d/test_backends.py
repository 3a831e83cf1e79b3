"""Names of backends, and which devices they serve."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as torch_dist

import asynccomm.compat.c10d as dist
from asynccomm.compat.c10d import backends


def no_creator(*_: object) -> None:
    raise AssertionError("nobody makes a group here")


def test_availability() -> None:
    assert dist.is_gloo_available() == torch_dist.is_gloo_available()
    assert not (dist.is_nccl_available() and not torch_dist.is_nccl_available())
    assert [dist.is_mpi_available(), dist.is_ucc_available(), dist.is_xccl_available()] == [False] * 3


@pytest.mark.parametrize("name", ["GLOO", "gloo", "GlOo"])
def test_known_names_in_any_case(name: str) -> None:
    assert dist.Backend(name) == dist.Backend.GLOO == "gloo"
    assert type(dist.Backend(name)) is str


def test_unknown_names_are_taken() -> None:
    assert dist.Backend("Unheard") == "unheard"
    with pytest.raises(ValueError, match="named by a str"):
        dist.Backend(3)  # type: ignore[arg-type]


def test_backends_of_torch() -> None:
    for name in ("undefined", "gloo", "nccl", "ucc", "mpi", "xccl"):
        assert getattr(dist.Backend, name.upper()) == name
        assert name in dist.Backend.backend_list
        assert name in dist.Backend.backend_type_map
    for device, name in (("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "xccl"), ("mps", "gloo")):
        assert dist.get_default_backend_for_device(device) == name
    assert dist.Backend.backend_capability["gloo"] == ["cpu", "cuda"]
    assert dist.Backend.backend_capability["nccl"] == ["cuda"]


@pytest.mark.usefixtures("tables")
def test_registering() -> None:
    dist.Backend.register_backend("Mine", no_creator, devices=["cpu", "quantum"])
    assert dist.Backend.MINE == "mine"  # type: ignore[attr-defined]
    assert dist.Backend("MINE") == "mine"
    assert dist.Backend.backend_list[-1] == "mine"
    assert dist.Backend.backend_capability["mine"] == ["cpu", "quantum"]
    assert dist.Backend.backend_type_map["mine"] == torch_dist.ProcessGroup.BackendType.CUSTOM
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"  # which was there first
    assert dist.Backend.default_device_backend_map["quantum"] == "mine"
    assert dist.Backend._plugins["MINE"] == (no_creator, False)
    dist.Backend.register_backend("mine", print, True, devices="cpu")
    assert dist.Backend._plugins["MINE"] == (print, True)
    assert dist.Backend.backend_list.count("mine") == 1


@pytest.mark.usefixtures("tables")
def test_one_device_is_not_taken_for_its_letters() -> None:
    dist.Backend.register_backend("mine", no_creator, devices="quantum")
    assert dist.Backend.backend_capability["mine"] == ["quantum"]
    assert "q" not in dist.Backend.default_device_backend_map


@pytest.mark.usefixtures("tables")
def test_devices_are_copied() -> None:
    devices = ["cpu"]
    dist.Backend.register_backend("mine", no_creator, devices=devices)
    devices.append("cuda")
    assert dist.Backend.backend_capability["mine"] == ["cpu"]


@pytest.mark.usefixtures("tables")
def test_registering_without_devices_warns() -> None:
    with pytest.warns(UserWarning, match="without devices="):
        dist.Backend.register_backend("mine", no_creator)
    assert dist.Backend.backend_capability["mine"][:2] == ["cpu", "cuda"]


def test_config_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, expected in (("cpu", "cpu:gloo"), ("cuda", "cuda:nccl"), ("mps", "mps:gloo")):
        monkeypatch.setattr(backends, "accelerator", lambda device=device: device)
        assert repr(dist.BackendConfig("undefined")) == expected
    monkeypatch.setattr(backends, "accelerator", lambda: "quantum")
    with pytest.raises(ValueError, match=r"'quantum', which no backend is known for: pass backend="):
        dist.BackendConfig("undefined")


def test_config_of_a_name() -> None:
    assert repr(dist.BackendConfig("gloo")) == "cpu:gloo,cuda:gloo"
    assert dist.BackendConfig("GLOO").get_device_backend_map() == {"cpu": "gloo", "cuda": "gloo"}
    with pytest.warns(UserWarning, match="the devices of backend 'Unheard' are not known"):
        assert repr(dist.BackendConfig("Unheard")) == "cpu:unheard,cuda:unheard,xpu:unheard"


def test_config_of_pairs() -> None:
    assert repr(dist.BackendConfig("CPU:gloo,cuda:NCCL")) == "cpu:gloo,cuda:nccl"
    assert repr(dist.BackendConfig("cpu:unheard")) == "cpu:unheard"  # looked at when a group is made
    with pytest.raises(ValueError, match=r"'cuda' in backend 'cpu:gloo,cuda' is no pair"):
        dist.BackendConfig("cpu:gloo,cuda")
    with pytest.raises(ValueError, match=r"device 'cpu' is twice in backend 'cpu:gloo,cpu:nccl'"):
        dist.BackendConfig("cpu:gloo,cpu:nccl")


@pytest.mark.usefixtures("tables")
def test_which_backend_stands_for_the_group() -> None:
    def of(name: str) -> str:
        return backends.backend_of(name, dist.BackendConfig(name))

    dist.Backend.register_backend("mine", no_creator, devices="cpu")
    assert of("gloo") == "gloo"
    assert of("mine") == "mine"
    assert of("cpu:gloo,cuda:nccl") == "nccl"
    assert of("cpu:mine,cuda:gloo") == "mine"
    assert of("cpu:gloo,cuda:gloo") == "gloo"


def test_undefined_is_nccl_or_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, expected in (("cuda", "nccl"), ("cpu", "gloo")):
        monkeypatch.setattr(backends, "accelerator", lambda device=device: device)
        assert backends.backend_of("undefined", dist.BackendConfig("undefined")) == expected


def test_is_backend_available() -> None:
    assert dist.is_backend_available("GLOO") == dist.is_gloo_available()
    assert dist.is_backend_available("shm")
    assert not dist.is_backend_available("mpi")
    assert not dist.is_backend_available("unheard")
    assert dist.is_backend_available("cpu:gloo,cuda:gloo") == dist.is_gloo_available()
    assert not dist.is_backend_available("cpu:gloo,cuda:unheard")


def test_default_backend_for_device() -> None:
    assert dist.get_default_backend_for_device(torch.device("cuda:3")) == "nccl"
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    with pytest.raises(ValueError, match="no default backend is registered for device meta"):
        dist.get_default_backend_for_device("meta")
