"""The types that users see: complete, precise in programs, and right in the documents' code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from .test_readme import BLOCKS, Block

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests/typed_program.py"
COMPLETE = 0.97  # of the names in all modules; the rest are attributes of internal classes
AROUND = """\
import asyncio
from typing import Any

import torch
from torch import Tensor

import asynccomm
from asynccomm import Comm, GradientReducer, ReduceOp


async def block(
    comm: Comm,
    model: torch.nn.Module,
    train: Any,
    grad: Tensor,
    gradient: Tensor,
    tensor: Tensor,
    gradients: GradientReducer,
) -> None:
"""

pytestmark = [
    pytest.mark.exhaustive,  # as .ci/run has them, beside its other checks of style and types
    pytest.mark.real_python,
    pytest.mark.skipif(
        tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14),
        reason="names and types of torch differ; those of the newest are checked",
    ),
]


def checked(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a type checker, by the name of its module."""
    command = [sys.executable, "-m", *map(str, arguments)]
    bin = Path(sys.executable).parent  # pyright looks for the packages of the first interpreter in PATH
    path = os.pathsep.join([str(bin), *filter(None, [os.environ.get("PATH")])])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110)


def pyright(*arguments: object) -> subprocess.CompletedProcess[str]:
    return checked("basedpyright", *arguments)


def typed(block: Block) -> str:
    """A block as a module: parts of a coroutine get a function, with the names that the tests give them, too."""
    if block.kind.startswith("program"):
        return block.source
    return AROUND + textwrap.indent(block.source, "    ")


def test_the_public_types_are_complete() -> None:
    done = pyright("--verifytypes", "asynccomm", "--ignoreexternal", "--outputjson")
    found = json.loads(done.stdout)["typeCompleteness"]
    counts = found["exportedSymbolCounts"]
    assert counts["withKnownType"] > 4000, done.stderr
    assert counts["withUnknownType"] == 0
    vague = [symbol["name"] for symbol in found["symbols"] if symbol["isExported"] and symbol["isTypeAmbiguous"]]
    assert found["completenessScore"] >= COMPLETE, "\n".join(vague)
    public = "asynccomm.errors.", "asynccomm.comm.", "asynccomm.core.work."
    assert not [name for name in vague if name.startswith(public)]


@pytest.fixture
def programs(tmp_path: Path) -> list[Path]:
    """The program beside this file, and the documents' code."""
    for block in BLOCKS:
        name = f"{Path(block.document).with_suffix('').as_posix().replace('/', '_')}_{block.line}.py"
        (tmp_path / name).write_text(typed(block))
    assert len(list(tmp_path.iterdir())) == len(BLOCKS)
    return [PROGRAM, tmp_path]


def test_programs_have_precise_types(programs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    """With Pyright, which takes a few seconds."""
    project = tmp_path_factory.mktemp("project") / "pyrightconfig.json"
    project.write_text(json.dumps({"include": list(map(str, programs)), "typeCheckingMode": "standard"}))
    done = pyright("--level", "error", "--outputjson", "--project", project)
    assert json.loads(done.stdout)["summary"]["filesAnalyzed"] == len(BLOCKS) + 1
    assert done.returncode == 0, done.stdout


def test_programs_have_precise_types_for_mypy(programs: list[Path]) -> None:
    """By the cache of the check of the package; without it, mypy looks at torch for half a minute."""
    done = checked("mypy", *programs)
    assert done.returncode == 0, done.stdout + done.stderr
