"""Some programs of both profiles on every backend, the same each time. ``python -m tests.fuzz`` runs more of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest

from asynccomm import Comm
from tests.sampling import amount

from .campaign import FEATURES
from .generate import PROFILES, generate
from .judging import Finding, differing
from .legality import MAY
from .oracle import Expectation, expect
from .perform import Comms, perform
from .program import Program
from .worlds import perform_all, worlds


def sample(backend: str, profile: str, size: int, count: int) -> Iterator[tuple[int, Program, Expectation]]:
    """Without those that may be refused: whose comms would have to be made anew."""
    features = dataclasses.replace(FEATURES[backend], torch=False)
    for seed in range(count):
        program = generate(profile, size, seed, features)
        expectation = expect(program)
        if all(MAY not in refused.values() for refused in expectation.refusals.values()):
            yield seed, program, expectation


def told(backend: str, profile: str, size: int, seed: int, findings: list[Finding]) -> str:
    again = f"python -m tests.fuzz --backend {backend} --profile {profile} --ranks {size} --seed {seed}"
    return "\n".join([*map(str, findings[:5]), f"as a test: {again} --replay -", f"shrunk: {again} --cases 1"])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("backend", ["loopback", "nccl"])
async def test_a_sample_within_a_process(backend: str, profile: str, size: int) -> None:
    async with worlds(backend, size, name=f"{profile}{size}", timeout=5.0) as comms:
        for seed, program, _ in sample(backend, profile, size, amount(120, 25)):
            findings, broken = await perform_all(program, comms)
            if findings:
                pytest.fail(told(backend, profile, size, seed, findings), pytrace=False)
            assert not broken


async def of_one_rank(comm: Comm, profile: str, count: int) -> None:
    """Do a sample as one of its ranks, and compare with the others what only they know together."""
    comms = Comms(comm)
    try:
        await compared(comm, comms, profile, count)
    finally:
        await asyncio.gather(*(group.aclose() for group in comms.groups.values()))


async def compared(comm: Comm, comms: Comms, profile: str, count: int) -> None:
    digests: dict[int, dict[str, int]] = {}
    programs: dict[int, Program] = {}
    for seed, program, expectation in sample(comm.backend, profile, comm.size, count):
        report = await perform(program, expectation, comm.rank, comms)
        if report.findings:
            comms.abort("there is a finding")  # the others may be waiting in the next program
            pytest.fail(told(comm.backend, profile, comm.size, seed, report.findings), pytrace=False)
        digests[seed], programs[seed] = report.digests, program
    each = await comm.all_gather_object({str(seed): digest for seed, digest in digests.items()})
    for seed, program in programs.items():
        found = differing(program, [theirs[str(seed)] for theirs in each])  # type: ignore[index]
        assert not found, told(comm.backend, profile, comm.size, seed, found)


@pytest.mark.ranks([2, 3], backend=["shm", "gloo"])
@pytest.mark.parametrize("profile", PROFILES)
async def test_a_sample_on_processes(comm: Comm, profile: str) -> None:
    await of_one_rank(comm, profile, amount(60, 12))
