"""What the README says in tables is so."""

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

import asynccomm
from asynccomm import Comm, ReduceOp
from asynccomm.testing import loopback_world
from asynccomm.testing.conformance import data  # which also gets over torch's warning of complex32

README = (Path(__file__).parent.parent / "README.md").read_text()


def table(first_row: str) -> tuple[list[str], dict[str, list[str]]]:
    """The column heads and the rows of the table that has ``first_row``, without the first column's head."""
    lines = README.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_row} |"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[at - 2 :]]
    rows = {}
    for (name, *rest), line in zip(cells[2:], lines[at:], strict=False):
        if not line.startswith("|"):
            break
        rows[name] = rest
    return cells[0][1:], rows


DTYPES, ROWS = table("move")


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


def test_every_method_is_named() -> None:
    described = README[README.index("## What there is") : README.index("## Backends")]
    other = {"abort", "aclose", "ready", "statistics", "unsafe_get_backend"}
    for name in dir(Comm):
        if not name.startswith("_") and callable(getattr(Comm, name)) and name not in other:
            assert f"`{name}" in described, f"README: {name} is not in the tables of what there is"
