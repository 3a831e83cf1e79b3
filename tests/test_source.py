"""The source itself: lint, types, the order of layers, and one test file per module."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from asynccomm.interop.torch_version import PYTHON_BACKENDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asynccomm"

# Every module, lowest first; an import may only point to a line above. Packages' __init__ stand where they may be used.
LAYERS = [
    "version handles dtypes reduce_op checks ops.base ops.reductions ops.moves ops.messages ops.parcels ops ops.along",
    "ops.several ops.signature errors ops.uneven news options mailbox sites work deadlines stacks background",
    "store store.base store.codec store.wait_line store.client store.memory store.torch_store store.host",
    "store.rendezvous",
    "control control.frames control.roster control.doors control.node control.links control.listener control.thread",
    "control.ledger control.members control.questions control.prints control.climbing",
    "control.ballots control.candidate control.quorum control.elections control.channel control.guest",
    "control.diagnosis",
    "backends backends.arithmetic backends.regions backends.lanes backends.base backends.hazards",
    "backends.delivery backends.matching backends.computing backends.differences backends.loopback",
    "backends.gloo backends.gloo.torch_gloo backends.gloo.staging backends.gloo.transfers",
    "backends.gloo.reducing backends.gloo.lowering backends.gloo.several backends.gloo.wire backends.gloo.p2p",
    "backends.gloo.exchange backends.gloo.in_flight backends.gloo.frames backends.gloo.disputes",
    "backends.gloo.predictions backends.gloo.alarms backends.gloo.collectives",
    "backends.gloo.backend",
    "backends.shm backends.shm.segment backends.shm.fence backends.shm.bells backends.shm.memory backends.shm.line",
    "backends.shm.meeting backends.shm.settings backends.shm.pieces backends.shm.rings",
    "backends.shm.links backends.shm.arrivals backends.shm.messages",
    "backends.shm.vectors backends.shm.reduction backends.shm.listing backends.shm.batches backends.shm.board",
    "backends.shm.algorithms backends.shm.streams backends.shm.parcels backends.shm.parts backends.shm.collectives",
    "backends.shm.worker backends.shm.patience backends.shm.engine backends.shm.backend",
    "backends.registry",
    "backends.nccl backends.nccl.api backends.nccl.events backends.nccl.device backends.nccl.platform",
    "backends.nccl.hints backends.nccl.flight backends.nccl.plan backends.nccl.lowering backends.nccl.communicator",
    "backends.nccl.estimates backends.nccl.origins backends.nccl.side backends.nccl.in_flight",
    "backends.nccl.turns backends.nccl.gifts backends.nccl.transfers backends.nccl.parcels",
    "backends.nccl.backend",
    "coalescing coalescing.plan coalescing.merging coalescing.together coalescing.holding coalescing.batches",
    "coalescing.undecided",
    "coalescing.announcements coalescing.agreed coalescing.agreement",
    "join connecting family monitored_barrier reporting traffic calls coalescing.scope newcomers session",
    "assembly regrouping incoming",
    "methods methods.base methods.collectives methods.uneven methods.coalesced methods.messages methods.barriers",
    "methods.groups pickling schemas methods.parcels methods.objects methods.dicts methods.states methods.streams",
    "methods.graphs methods.scopes methods.diagnosing methods.regrouping",
    "comm connect runner",
    "compat compat.c10d.types compat.c10d.backends compat.c10d.work compat.c10d.process_group",
    "compat.c10d.recorder compat.c10d.world compat.c10d.ranks compat.c10d.checks compat.c10d.logs compat.c10d.hooks",
    "compat.c10d.meeting compat.c10d.fake compat.c10d.making compat.c10d.init compat.c10d.groups compat.c10d.splitting",
    "compat.c10d.ending compat.c10d.shrinking compat.c10d.coalescing compat.c10d.messages compat.c10d.reductions",
    "compat.c10d.moves compat.c10d.barriers compat.c10d.objects compat.c10d.internals compat.c10d",
    "interop interop.torch_version interop.torch_words interop.profiling interop.uncompiled interop.threads",
    "interop.torch_work interop.comms",
    "interop.torch_collectives interop.torch_backend interop.known_groups interop.awaiting interop.from_torch",
    "interop.mesh",
    "cli cli.environment cli.output cli.report cli.rank_output cli.processes cli.store_process cli.launch",
    "cli.run cli.doctor cli.diagnose cli.main",
    "testing.local testing.messages testing.worker testing.pool testing.plugin",
    "testing.conformance.data testing.conformance.collectives testing.conformance.handles testing.conformance.along",
    "testing.conformance.uneven testing.conformance.coalesced testing.conformance.inplace testing.conformance.forms",
    "testing.conformance.aliasing",
    "testing.conformance.complexes testing.conformance.batches testing.conformance.objects testing.conformance.dicts",
    "testing.conformance.groups testing.conformance.crowds testing.conformance.scopes",
    "testing.conformance.failures testing.conformance.suite testing.conformance testing",
]
ORDER = [module for layer in LAYERS for module in layer.split()]


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            found[name] = path
    return found


def imports_of(path: Path) -> set[str]:
    """Our modules that a file imports anywhere in it, also for type checking only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner.removeprefix("asynccomm.") in ORDER else base)
    return {name for name in found if name.split(".")[0] == "asynccomm"}


def test_order_lists_every_module() -> None:
    assert sorted(ORDER) == sorted(modules())


@pytest.mark.parametrize("module", ORDER)
def test_imports_only_point_down(module: str) -> None:
    for target in imports_of(modules()[module]):
        assert target != "asynccomm", f"{module} imports the package root"
        name = target.removeprefix("asynccomm.")
        assert ORDER.index(name) < ORDER.index(module), f"{module} imports upwards: {name}"


def test_every_module_has_its_tests() -> None:
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    # the conformance suite is itself a test, run by every backend and against broken ones in test_suite.py
    exempt = {*packages, "version", *(name for name in ORDER if name.startswith("testing.conformance."))}
    for name in sorted(set(ORDER) - exempt):
        *folders, last = name.split(".")
        path = ROOT / "tests" / Path(*folders) / f"test_{last}.py"
        assert path.exists(), f"{name} has no {path.relative_to(ROOT)}"


@pytest.mark.timeout(600)  # mypy reads all of torch's types, without a cache of them
@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_clean(command: list[str]) -> None:
    if command == ["mypy"] and not PYTHON_BACKENDS:
        pytest.skip("names and types of torch differ; those of the newest are checked")
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
