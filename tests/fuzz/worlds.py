"""The comms of a world, on any backend: in processes of their own, or all in this one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asynccomm
from asynccomm.backends import registry

from .judging import Finding, differing
from .oracle import expect
from .perform import Comms, Report, perform
from .program import Program

TIMEOUT = 20.0  # seconds for one operation; more is a hang
IN_PROCESS = {"loopback": "loopback", "nccl": "simulated"}  # backends whose ranks share a process, as registered


def register_simulation() -> None:
    """Have the NCCL backend on a simulated GPU under its name."""
    from tests.backends.nccl import simulation

    registry.BUILTIN.setdefault("simulated", (simulation.__name__, "SimulatedBackend"))


@asynccontextmanager
async def worlds(
    backend: str, size: int, *, name: str = "fuzz", timeout: float = TIMEOUT
) -> AsyncIterator[list[Comms]]:
    """The comms of all ranks of a backend that runs in one process; aborted comms are taken as closed."""
    if backend == "nccl":
        register_simulation()
    store = asynccomm.MemoryStore()
    hints = {"side": "loopback"} if backend == "nccl" else None
    made = [
        asynccomm.new_comm(
            IN_PROCESS[backend], name=name, store=store, rank=rank, size=size, timeout=timeout, hints=hints
        )
        for rank in range(size)
    ]
    comms = [Comms(comm) for comm in await asyncio.gather(*made)]
    try:
        yield comms
    finally:
        await asyncio.gather(*(each.aclose() for each in comms))


async def perform_all(program: Program, comms: list[Comms]) -> tuple[list[Finding], bool]:
    """Do a program as all of its ranks at once. Returns: the findings, and whether the comms are broken."""
    expectation = expect(program)
    each = await asyncio.gather(*(perform(program, expectation, rank, mine) for rank, mine in enumerate(comms)))
    return combined(program, each), any(report.broken for report in each)


def combined(program: Program, each: list[Report]) -> list[Finding]:
    """What all ranks say, without what only follows from other things: that one was refused, or had to give up."""
    findings = [finding for report in each for finding in report.findings]
    findings += differing(program, [report.digests for report in each])
    if any(report.refused for report in each):
        findings = [finding for finding in findings if not finding.secondary]
    return primary(findings)


def primary(findings: list[Finding]) -> list[Finding]:
    """Without those that only follow from others: of the operations, those of the first that went wrong."""
    findings = [finding for finding in findings if not finding.secondary] or findings
    first = min((finding.step for finding in findings if finding.step >= 0), default=-1)
    return [finding for finding in findings if finding.step == first]
