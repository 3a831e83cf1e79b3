"""The documents: their tables, code, figures and links are right."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import asynccomm
from asynccomm import Comm, ReduceOp
from asynccomm.core.native import CoreUnavailable, load_core
from asynccomm.testing import loopback_world
from asynccomm.testing.conformance import data  # importing it silences torch's warning about complex32

from .cases import cases
from .test_source import ORDER

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for top in (ROOT, ROOT / "asynccomm", ROOT / "bench", ROOT / "examples", ROOT / "tests")
    for path in (top.glob("*.md") if top != ROOT / "asynccomm" else top.rglob("*.md"))
)


def read(document: str) -> str:
    return (ROOT / document).read_text()


def table(document: str, first_row: str) -> tuple[list[str], dict[str, list[str]]]:
    """The heads of the columns, without the first, and the rows of the table that has ``first_row``."""
    lines = read(document).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_row} |"))
    while lines[at - 1].startswith("|"):
        at -= 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[at:]]
    rows = {}
    for (name, *rest), line in zip(cells[2:], lines[at + 2 :], strict=False):
        if not line.startswith("|"):
            break
        rows[name] = rest
    return cells[0][1:], rows


# -- form -------------------------------------------------------------------------------------------------------------


def test_the_first_page_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 200


def test_the_commands_check_the_version() -> None:
    lines = [line for line in read("README.md").splitlines() if "python -m venv" in line]
    assert len(lines) == 2
    for line in lines:
        (code,) = re.findall(r"^python -c '([^']+)' && python -m venv", line)
        exec(code, {})
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "version_info", (3, 10, 99))
            with pytest.raises(SystemExit, match=r"^asynccomm needs Python 3\.11"):
                exec(code, {})


def test_no_cell_is_long() -> None:
    long = [
        f"{document}: {cell}"
        for document in DOCUMENTS
        for line in read(document).splitlines()
        if line.startswith("|")
        for cell in line.strip("|").split("|")
        if len(cell.strip()) > 120
    ]
    assert not long, "\n".join(long)


def test_the_test_command_is_the_same_everywhere() -> None:
    (command,) = [line for line in read("README.md").splitlines() if '-e ".[test]"' in line]
    assert command in read("tests/README.md").splitlines()
    assert command.split(" && ")[-1].startswith(".venv/bin/pytest")


# -- links ------------------------------------------------------------------------------------------------------------


def headings(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@cases("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = re.sub(r"```.*?```", "", read(document), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        assert path.exists(), f"{document}: no file {target}"
        if anchor:
            assert anchor in headings(path.read_text()), f"{document}: no heading {target}"


def test_all_documents_are_found_from_the_first() -> None:
    found, new = set(), {"README.md"}
    while new:
        document = new.pop()
        found.add(document)
        for target in re.findall(r"\]\(([^)#]+\.md)", read(document)):
            path = os.path.normpath((ROOT / document).parent / target)
            new.add(Path(path).relative_to(ROOT).as_posix())
        new -= found
    assert found == set(DOCUMENTS)


# -- code -------------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A block of Python in a document. A comment in the line before the block says how to run it.

    ``<!-- fragment -->``: it only has to compile. ``<!-- program: N ranks -->``: it is a file for ``asynccomm run``.
    ``<!-- 4 ranks -->`` and without a comment (2 ranks): it is a part of a coroutine with a ``comm``. Tests that it
    defines are run, too.
    """

    document: str
    line: int
    kind: str
    source: str

    def code(self) -> Any:
        padded = "\n" * (self.line - 1) + self.source
        return compile(padded, self.document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def blocks() -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = read(document)
        for match in re.finditer(r"(?:^<!-- ([^\n]+) -->\n)?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start(2)].count("\n") + 1
            found.append(Block(document, line, match[1] or "2 ranks", match[2]))
    return found


BLOCKS = blocks()
PROGRAMS = [block for block in BLOCKS if block.kind.startswith("program")]


def of_kind(kind: str) -> pytest.MarkDecorator:
    chosen = [block for block in BLOCKS if block.kind == kind]
    return pytest.mark.parametrize("block", chosen, ids=[f"{block.document}:{block.line}" for block in chosen])


def test_all_code_is_run_or_marked_as_a_fragment() -> None:
    for block in BLOCKS:
        block.code()
    kinds = {block.kind for block in BLOCKS}
    assert kinds == {"fragment", "program: 2 ranks", "program: 3 ranks", "4 ranks", "2 ranks"}


def test_no_block_is_overlooked() -> None:
    assert len(BLOCKS) == sum(read(document).count("```python") for document in DOCUMENTS)


def train(mesh: Any) -> None:
    dist.all_reduce(torch.ones(1), group=mesh.get_group("dp"))


async def run_block(block: Block, comm: Comm) -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    names: dict[str, Any] = {"asynccomm": asynccomm, "asyncio": asyncio, "torch": torch, "ReduceOp": ReduceOp}
    names |= {"comm": comm, "model": model, "train": train}
    names |= {name: torch.ones(4) for name in ("grad", "gradient", "tensor")}
    running = eval(block.code(), names)
    if inspect.iscoroutine(running):
        await running
    for name, value in list(names.items()):
        if name.startswith("test_"):
            await value(comm)


@of_kind("2 ranks")
@pytest.mark.ranks(2)
async def test_code_on_two_ranks(comm: Comm, block: Block) -> None:
    await run_block(block, comm)


@of_kind("4 ranks")
@pytest.mark.ranks(4)
async def test_code_on_four_ranks(comm: Comm, block: Block) -> None:
    await run_block(block, comm)


def python(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("block", PROGRAMS, ids=[f"{block.document}:{block.line}" for block in PROGRAMS])
def test_programs(block: Block, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(block.source)
    ranks = re.findall(r"\d+", block.kind)[0]
    done = python("-m", "asynccomm.cli.main", "run", "-n", ranks, "--elastic", "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if "SIGKILL" in block.source:
        shown = read(block.document).split("$ asynccomm run -n 3 --elastic dying.py\n")[1].split("```")[0].splitlines()
        # the launcher may be too busy to know the signal in time
        output = (done.stdout + done.stderr).replace("its control connection ended", "it was killed by SIGKILL")
        lines = re.sub(r"process \d+ on [^)]+", "process 4711 on node1", output).splitlines()
        for line in shown:
            assert line in lines, f"{line!r}: {done}"
    else:
        assert "are left" not in done.stderr


# -- figures ----------------------------------------------------------------------------------------------------------


def test_figures_are_among_the_measured_ones() -> None:
    heads, rows = table("README.md", "all_reduce, 8 B")
    measured_heads, measured = table("bench/README.md", "all_reduce, 8 B")
    assert heads == measured_heads
    assert 0 < len(rows) <= 8
    for name, figures in rows.items():
        assert measured[name] == figures, name


# -- the comm ---------------------------------------------------------------------------------------------------------


def test_every_method_is_named() -> None:
    text = read("asynccomm/comm/README.md")
    described = text[text.index("## Methods") : text.index("## Scopes")]
    for name in dir(Comm):
        if name.startswith("_") or not callable(getattr(Comm, name)) or name == "unsafe_get_backend":
            continue
        if name in {"abort", "aclose", "ready", "statistics"}:
            assert f"`comm.{name}(" in text or f"`await comm.{name}(" in text, f"{name} is not in the contract"
        else:
            assert f"`{name}" in described, f"{name} is not among the methods"


# -- control ----------------------------------------------------------------------------------------------------------


def test_time_limits_are_those_of_the_code() -> None:
    _, rows = table("asynccomm/control/README.md", "between heartbeats")
    folders = [ROOT / "asynccomm" / folder for folder in ("control", "rendezvous")]
    modules = [path.relative_to(ROOT).with_suffix("") for folder in folders for path in folder.rglob("*.py")]
    for name, (seconds, constant) in rows.items():
        end, attribute = constant.strip("`").rsplit(".", 1)
        (module,) = [".".join(m.parts) for m in modules if f".{'.'.join(m.parts)}".endswith(f".{end}")]
        value = getattr(import_module(module), attribute)
        if isinstance(value, dict):
            value = value["TCP_KEEPIDLE"] + value["TCP_KEEPINTVL"] * value["TCP_KEEPCNT"]
        assert value == float(seconds), name


# -- the map of the code ----------------------------------------------------------------------------------------------


def test_packages_stand_in_their_order() -> None:
    named = [name for first in ("`ops`", "`interop`") for name in table("asynccomm/README.md", first)[1]]
    assert re.findall(r"\w+", " ".join(named)) == ORDER


def stops() -> list[str]:
    """The modules that the map of the code names on the way of an all_reduce."""
    text = read("asynccomm/README.md")
    return re.findall(r"^\d\. \[`[\w/]+`\]\(([\w/]+)\.py\)", text, re.MULTILINE)


async def modules_of_an_all_reduce(comm: Comm, tensor: Tensor) -> list[str]:
    """The modules of the package whose functions an awaited all_reduce enters, in their order."""
    calls: list[str] = []
    package = str(Path(asynccomm.__file__).parent) + os.sep

    def note(frame: FrameType, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            calls.append(file.removeprefix(package).removesuffix(".py"))

    await comm.barrier()
    sys.setprofile(note)
    try:
        await comm.all_reduce(tensor)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.ranks(2)
async def test_an_all_reduce_goes_the_way_that_is_described() -> None:
    tensor = torch.ones(2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ASYNCCOMM_EXECUTOR", "reference")
        async with asynccomm.new_comm("shm", name="ordinary") as comm:
            await comm.all_reduce(tensor)
            calls = await modules_of_an_all_reduce(comm, tensor)
    *way, last = stops()
    assert len(way) == 8
    assert sorted(way, key=calls.index) == way, calls
    assert max(i for i, module in enumerate(calls) if module == last) > calls.index(way[-1])


@pytest.mark.ranks(1)  # with more, a rank that is late has the call take the ordinary path
async def test_a_known_all_reduce_enters_no_module() -> None:
    if isinstance(load_core(), CoreUnavailable):
        pytest.skip("the executor in C was not built")
    tensor = torch.ones(2)
    async with asynccomm.new_comm("shm", name="fast") as comm:
        found = [await modules_of_an_all_reduce(comm, tensor) for _ in range(3)]
    assert "backends/shm/fast_path" in found[0]
    assert found[2] == []


# -- dtypes -----------------------------------------------------------------------------------------------------------

DTYPES, ROWS = table("asynccomm/backends/README.md", "move")


def test_the_table_has_every_dtype_and_reduction() -> None:
    assert sorted(" ".join(DTYPES).split()) == sorted(str(dtype).removeprefix("torch.") for dtype in data.DTYPES)
    kinds = " ".join(name for name in ROWS if name != "move").split()
    assert sorted(kinds) == sorted(kind.name for kind in asynccomm.RedOpType)


def reductions(name: str) -> list[ReduceOp]:
    return [ReduceOp.PREMUL_SUM(2) if kind == "PREMUL_SUM" else getattr(ReduceOp, kind) for kind in name.split()]


async def check_cell(comm: Comm, name: str, dtype: torch.dtype, cell: str) -> None:
    def new(*shape: int) -> Tensor:
        return torch.ones(shape).to(dtype)

    if name == "move":
        assert cell == "yes"
        await comm.broadcast(new(2), 0)
        await comm.all_gather_single(None, new(2), 0)
        await comm.all_to_all(None, [new(2)] * comm.size)
        await comm.scatter_v(None, [new(2)] * comm.size if comm.rank == 0 else None, 0)
        return
    for op in reductions(name):
        for call in (
            lambda op=op: comm.all_reduce(new(2), op),
            lambda op=op: comm.reduce(new(2), 0, op),
            lambda op=op: comm.reduce_scatter_v(None, new(2, 2 * comm.size), None, op, 1),
            lambda op=op: comm.all_reduce_coalesced([new(2), new(3)], op),
        ):
            if cell == "no":
                with pytest.raises(ValueError, match="cannot reduce"):
                    call()
            else:
                await call()
    if cell == "integer factor":
        with pytest.raises(ValueError, match="factor"):
            comm.all_reduce(new(2), ReduceOp.PREMUL_SUM(0.5))


async def check_all(comm: Comm) -> None:
    for name, cells in ROWS.items():
        for dtypes, cell in zip(DTYPES, cells, strict=True):
            for dtype in dtypes.split():
                await check_cell(comm, name, getattr(torch, dtype), cell)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_dtypes(comm: Comm) -> None:
    await check_all(comm)


async def test_dtypes_on_loopback() -> None:
    async with loopback_world(2) as comms:
        await asyncio.gather(*(check_all(comm) for comm in comms))
