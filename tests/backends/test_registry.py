"""Backends by name: ours, and those of other packages."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

from asynccomm.backends import names, registry
from asynccomm.backends.base import Backend
from asynccomm.backends.gloo.backend import GlooBackend
from asynccomm.backends.loopback import LoopbackBackend
from asynccomm.backends.names import ENTRY_POINT_GROUP, backend_names
from asynccomm.backends.registry import candidates, load_backend

CPU = torch.device("cpu")

PLUGIN = """
from asynccomm.backends.base import Backend

class Third(Backend):
    name = "third"
    devices = frozenset({"cpu", "meta"})

    @classmethod
    async def connect(cls, context): ...
    def submit(self, batch): ...
    async def aclose(self): ...
    def abort(self): ...

class NoBackend:
    name = "none"
    devices = frozenset({"cpu"})

not_a_class = Third()
"""
POINTS = """[asynccomm.backends]
third = asynccomm_third_plugin:Third
nobackend = asynccomm_third_plugin:NoBackend
instance = asynccomm_third_plugin:not_a_class
missing = asynccomm_third_plugin:Missing
gloo = asynccomm_third_plugin:Third
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that brings backends."""
    (tmp_path / "asynccomm_third_plugin.py").write_text(PLUGIN)
    info = tmp_path / "asynccomm_third_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: asynccomm-third-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "asynccomm_third_plugin", raising=False)
    return tmp_path


def test_builtin_backends() -> None:
    assert {"gloo", "loopback", "shm"} <= set(backend_names())
    assert backend_names() == sorted(backend_names())
    assert load_backend("gloo", CPU) is GlooBackend
    assert load_backend("loopback", CPU) is LoopbackBackend


@pytest.mark.parametrize("name", ["gloo", "loopback", "shm"])
def test_builtin_backends_say_who_they_are(name: str) -> None:
    backend = load_backend(name, CPU)
    assert issubclass(backend, Backend)
    assert backend.name == name
    assert "cpu" in backend.devices


@pytest.mark.parametrize("name", ["glo", "nccl2", "", "GLOO"])
def test_an_unknown_backend_names_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match="is unknown; choose from auto, ") as caught:
        load_backend(name, CPU)
    assert repr(name) in str(caught.value)
    for choice in backend_names():
        assert choice in str(caught.value)


@pytest.mark.parametrize("name", ["gloo", "loopback"])
def test_the_wrong_device(name: str) -> None:
    with pytest.raises(ValueError, match=rf"backend '{name}' takes tensors on \['cpu'\], not on device cuda:1"):
        load_backend(name, torch.device("cuda:1"))


def test_auto() -> None:
    assert candidates("auto", CPU) == ("shm", "hierarchical", "gloo")
    assert candidates("auto", torch.device("cuda", 1)) == ("nccl",)
    assert candidates("mine", torch.device("meta")) == ("mine",)
    with pytest.raises(ValueError, match="backend 'auto' has no choice for device meta"):
        candidates("auto", torch.device("meta"))


@pytest.mark.parametrize("name", [None, 3, GlooBackend, b"gloo"])
def test_a_backend_goes_by_name(name: Any) -> None:
    with pytest.raises(TypeError, match="backend must be a name") as caught:
        candidates(name, CPU)
    assert repr(name) in str(caught.value)


def test_backends_of_other_packages(plugin: Path) -> None:
    assert {"gloo", "loopback", "third"} <= set(backend_names())
    assert backend_names().count("gloo") == 1
    third = load_backend("third", CPU)
    assert third.__module__ == "asynccomm_third_plugin"
    assert load_backend("third", torch.device("meta")) is third
    with pytest.raises(ValueError, match=r"backend 'third' takes tensors on \['cpu', 'meta'\], not on device cuda"):
        load_backend("third", torch.device("cuda"))


def test_nobody_replaces_a_builtin_backend(plugin: Path) -> None:
    assert load_backend("gloo", CPU) is GlooBackend


@pytest.mark.parametrize("name", ["nobackend", "instance"])
def test_what_is_no_backend(plugin: Path, name: str) -> None:
    with pytest.raises(TypeError, match=rf"backend '{name}' is .*, not a subclass of .*Backend"):
        load_backend(name, CPU)


def test_a_broken_entry_point_shows_its_own_error(plugin: Path) -> None:
    with pytest.raises(AttributeError, match="Missing"):
        load_backend("missing", CPU)


def test_entry_points_are_looked_up_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("late", "asynccomm.backends.loopback:LoopbackBackend", ENTRY_POINT_GROUP)
    for module in (names, registry):
        monkeypatch.setattr(module, "entry_points", lambda group: EntryPoints([point]).select(group=group))
    assert backend_names() == sorted({"late", *backend_names()})
    assert load_backend("late", CPU) is LoopbackBackend
