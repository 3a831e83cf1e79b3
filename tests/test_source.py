"""The source itself: the order of packages, and one test file per module."""

import ast
import functools
import inspect
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from asynccomm import ops

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asynccomm"

# The packages, and the modules beside them, lowest first: an import points to one that stands further ahead.
LAYERS = [
    "version errors options ops core control store serialization backends batching rendezvous observe windows queues",
    "comm runner",
    "experts gradients blocking interop weights compat benchmarks cli testing",
]
ORDER = [package for layer in LAYERS for package in layer.split()]

# The modules that do something else for each operation. All others read the attributes that classify operations, so a
# new operation changes these modules and ``ops`` only.
BY_OPERATION = {
    "backends.computing",
    "backends.gloo.carried",
    "backends.gloo.collectives",
    "backends.gloo.disputes",
    "backends.gloo.frames",
    "backends.gloo.hazard_tracker",
    "backends.gloo.lowering",
    "backends.gloo.outbox",
    "backends.gloo.p2p",
    "backends.gloo.packing",
    "backends.gloo.windows",
    "backends.hazards",
    "backends.hierarchical.backend",
    "backends.hierarchical.windows",
    "backends.loopback",
    "backends.nccl.backend",
    "backends.nccl.lowering",
    "backends.nccl.p2p",
    "backends.nccl.windows",
    "backends.shm.lowering",
    "backends.shm.message_fields",
    "backends.shm.p2p",
    "backends.shm.payloads",
    "backends.shm.schedule",
    "backends.shm.windows",
    "backends.windows",
    "batching.fusion",
    "observe.flight",
}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name and name != "__main__":  # which is cli.main
            found[name] = path
    return found


MODULES = modules()


class Contents(NamedTuple):
    """A file's part in the checks below; the syntax trees of all files would take much memory."""

    imports: set[str]  #: our modules that it imports anywhere in it, also for type checking only
    classes: list[str]
    compared: set[str]  #: names in places where classes are compared
    nameless: list[int]  #: the lines that make tensors and name no device


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


#: the kinds of nodes that matter below
LOOKED_AT = {
    *(ast.Import, ast.ImportFrom, ast.ClassDef, ast.Call),
    *(ast.MatchClass, ast.Dict, ast.Set, ast.Compare),
}


@functools.cache
def contents(path: Path) -> Contents:
    imports, classes, compared, nameless = set(), [], set(), []
    for node in ast.walk(ast.parse(path.read_text())):
        if type(node) not in LOOKED_AT:  # of half a million nodes, most
            continue
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                imports.add(inner if inner.removeprefix("asynccomm.") in MODULES else base)
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=attribute)) if attribute in FACTORIES:
                if not {"device", None} & {keyword.arg for keyword in node.keywords}:
                    nameless.append(node.lineno)
        compared |= {each.id for each in _compared(node) if isinstance(each, ast.Name)}
    return Contents({name for name in imports if name.split(".")[0] == "asynccomm"}, classes, compared, nameless)


def test_order_has_every_package() -> None:
    assert sorted(ORDER) == sorted({name.split(".")[0] for name in MODULES})


def test_imports_only_point_down() -> None:
    wrong = []
    for name, path in sorted(MODULES.items()):
        own = name.split(".")[0]
        for target in sorted(contents(path).imports):
            package = target.removeprefix("asynccomm").removeprefix(".").split(".")[0]
            if not package or ORDER.index(package) > ORDER.index(own):
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    graph = {name: {t.removeprefix("asynccomm.") for t in contents(path).imports} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises with the cycle


def test_every_module_has_its_tests() -> None:
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    # the conformance suite is itself a test, run by every backend and against broken ones in test_suite.py
    exempt = {
        *packages,
        "version",
        "control.timing",
        *(name for name in MODULES if name.startswith("testing.conformance.")),
    }
    for name in sorted(set(MODULES) - exempt):
        *folders, last = name.split(".")
        path = ROOT / "tests" / Path(*folders) / f"test_{last}.py"
        assert path.exists(), f"{name} has no {path.relative_to(ROOT)}"


def test_new_tensors_name_their_device() -> None:
    """Else they are made on torch's default device, which a program may set to a GPU."""
    made = {name: path for name, path in MODULES.items() if not name.startswith(("benchmarks", "testing.conformance"))}
    nameless = [f"{name}:{line}" for name, path in made.items() for line in contents(path).nameless]
    assert not nameless


def test_a_class_name_means_one_class() -> None:
    found: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for each in contents(path).classes:
            found.setdefault(each, []).append(name)
    # names of other libraries in ``compat``, and the same role in two backends
    twins = {
        "Backend",
        "Work",
        "HazardTracker",
        "PointToPoint",
        "TorchWork",
        "CommOptions",
        "MessageQueue",
        "BatchSendRecv",
        "P2POp",
        "ReduceOp",
    }
    several = {name: modules for name, modules in found.items() if len(modules) > 1 and name not in twins}
    assert not several, several


def test_modules_that_distinguish_operations() -> None:
    operations = {name for name, kind in vars(ops).items() if inspect.isclass(kind) and "kind" in vars(kind)}
    assert "AllReduce" in operations
    others = {name: path for name, path in MODULES.items() if not name.startswith("ops")}
    assert {name for name, path in others.items() if contents(path).compared & operations} == BY_OPERATION


def _compared(node: ast.AST) -> list[ast.AST]:
    """The expressions in ``node`` where a class is compared with others, or is one of several classes."""
    match node:
        case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kinds]):
            return list(ast.walk(kinds))
        case ast.MatchClass(cls=kind):
            return [kind]
        case ast.Dict(keys=kinds):
            return [kind for kind in kinds if kind is not None]
        case ast.Set(elts=kinds):
            return list(kinds)
        case ast.Compare():
            return [node.left, *node.comparators]
        case _:
            return []
