"""The package's face: lazy, complete, and free of torch until something is used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import asynccomm
from tests.cases import cases


def declared() -> dict[str, str]:
    """Names that the TYPE_CHECKING imports give to type checkers, and the modules they come from."""
    tree = ast.parse(Path(asynccomm.__file__).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    names: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        if node.module == "asynccomm":  # packages: test_packages_need_no_import_of_their_own
            continue
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name} is not re-exported explicitly"
            assert alias.name not in names, f"{alias.name} is imported twice"
            names[alias.name] = node.module
    return names


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_all_is_what_type_checkers_see() -> None:
    assert set(asynccomm.__all__) == set(declared())
    assert len(asynccomm.__all__) == len(set(asynccomm.__all__))


@cases("name", asynccomm.__all__)
def test_every_name_resolves(name: str) -> None:
    home = import_module(declared()[name])
    assert getattr(asynccomm, name) is getattr(home, name)
    assert name in dir(asynccomm)


@cases("name", asynccomm.__all__)
def test_homes_export_them(name: str) -> None:
    home = import_module(declared()[name])
    if name != "__version__":
        assert name in getattr(home, "__all__", vars(home))


@cases("name", asynccomm.__all__)
def test_public_members_have_docstrings(name: str) -> None:
    value = getattr(asynccomm, name)
    if not inspect.isclass(value):
        return
    members = {key: member for key, member in inspect.getmembers(value) if not key.startswith("_")}
    ours = {
        key: member
        for key, member in members.items()
        if isinstance(member, property) or str(getattr(member, "__module__", "")).startswith("asynccomm")
    }
    assert [key for key, member in ours.items() if not inspect.getdoc(member)] == []


@pytest.mark.real_python
def test_packages_bring_no_torch() -> None:
    assert (
        python("import asynccomm as a, sys; a.interop, a.compat, a.observe; print('torch' in sys.modules)") == "False"
    )


IMPORTED_ANEW = """
import sys  # in a fork, torch and our modules are imported already
for name in [name for name in sys.modules if name.partition(".")[0] == "asynccomm"]:
    del sys.modules[name]
import asynccomm as a
"""


def test_packages_need_no_import_of_their_own() -> None:
    names = python(
        IMPORTED_ANEW + "print(a.testing.loopback_world.__name__, a.interop.mesh.init_device_mesh.__name__, "
        "a.compat.c10d.all_reduce.__name__, a.interop.torch_backend.register.__name__, "
        "a.blocking.new_comm.__name__, a.observe.otel.instrument.__name__)"
    )
    assert names == "loopback_world init_device_mesh all_reduce register new_comm instrument"
    assert {"blocking", "compat", "interop", "observe", "testing"} <= set(dir(asynccomm))
    assert {"bagua", "c10d", "torchcomms", "vllm"} <= set(dir(asynccomm.compat))
    assert {"mesh", "torch_backend"} <= set(dir(asynccomm.interop))
    assert "otel" in dir(asynccomm.observe)
    for package in (asynccomm.compat, asynccomm.interop, asynccomm.observe):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            package.nothing  # noqa: B018
    assert {"loopback_world", "check_backend"} <= set(dir(asynccomm.testing))


FACES = [
    "asynccomm",
    "asynccomm.backends.base",
    "asynccomm.backends.loopback",
    "asynccomm.ops",
    "asynccomm.blocking",
    "asynccomm.compat.bagua",
    "asynccomm.compat.c10d",
    "asynccomm.compat.torchcomms",
    "asynccomm.compat.torchcomms.functional",
    "asynccomm.compat.torchcomms.hooks",
    "asynccomm.compat.torchcomms.objcol",
    "asynccomm.compat.vllm",
    "asynccomm.experts",
    "asynccomm.interop.mesh",
    "asynccomm.interop.torch_backend",
    "asynccomm.observe.otel",
    "asynccomm.testing",
    "asynccomm.weights",
]


def annotated(value: Any) -> dict[str, Any]:
    """A public function, or a class with its public methods and properties, as far as they are written in Python."""
    found = {"": value}
    if inspect.isclass(value):
        members = {name: getattr(member, "fget", member) for name, member in inspect.getmembers(value)}
        found |= {name: member for name, member in members.items() if name == "__init__" or not name.startswith("_")}
    return {
        name: member
        for name, member in found.items()
        if member is value or (inspect.isroutine(member) and hasattr(member, "__annotations__"))
    }


@pytest.mark.filterwarnings("ignore:`reduce_op` is deprecated:FutureWarning")
@cases("face", FACES)
def test_hints_can_be_resolved(face: str) -> None:
    module = import_module(face)
    names = [name for name in getattr(module, "__all__", dir(module)) if not name.startswith("_")]
    unresolved = []
    for name, value in [(name, getattr(module, name)) for name in names]:
        ours = str(getattr(value, "__module__", "")).startswith("asynccomm")
        if not ours or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        for member, function in annotated(value).items():
            try:
                get_type_hints(function)
            except (NameError, TypeError) as exc:
                unresolved.append(f"{name}.{member}: {exc}")
    assert unresolved == []


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'asynccomm' has no attribute 'new_com'"):
        asynccomm.new_com  # noqa: B018
    assert not hasattr(asynccomm, "__wrapped__")


@pytest.mark.real_python
def test_import_brings_no_torch() -> None:
    heavy = "[m for m in ('torch', 'numpy', 'uvloop') if m in sys.modules]"
    assert python(f"import sys, asynccomm; asynccomm.__version__; asynccomm.__all__; print({heavy})") == "[]"


def test_star_import_gives_all() -> None:
    names: dict[str, object] = {}
    exec("from asynccomm import *", names)
    assert names.keys() >= set(asynccomm.__all__)
