"""Operations on slices of one tensor: the result is that of copies, written in order, or the call is refused.

``tests/fuzz --profile aliasing`` does this for all operations, dtypes and layouts. Here, a few forms are drawn by
hypothesis and checked against a model of a few lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asynccomm import Comm, MemoryStore, new_comm
from asynccomm.backends import registry
from tests.backends.nccl import simulation
from tests.sampling import amount, examples

ROOM = 24  # elements of the tensor of which all arguments are slices


@dataclass(frozen=True)
class Slices:
    """The places of the arguments: the same on all ranks."""

    form: str
    unit: int  #: elements of a slice
    scale: int  #: floats for each element; large ones take other ways than small ones
    reads: list[int]  #: the first elements of the tensors that are only read
    writes: list[int]  #: of those that are written
    root: int

    def of(self, whole: Tensor, starts: list[int]) -> list[Tensor]:
        return [whole[start * self.scale : (start + self.unit) * self.scale] for start in starts]

    def whole(self, rank: int) -> Tensor:
        """The tensor of a rank, as it is before the operation."""
        return torch.arange(ROOM * self.scale, dtype=torch.float64) + 1000 * self.scale * (rank + 1)


def draw(random: Random, size: int) -> Slices:
    form = random.choice(list(FORMS))
    unit = random.randrange(1, 5)
    reads, writes = COUNTS[form](size, random)
    starts = [random.randrange(0, ROOM - unit + 1) for _ in range(reads + writes)]
    if random.random() < 0.3:  # the same tensor twice
        starts[-1] = starts[0]
    if form == "batch" and random.random() < 0.5:  # without a conflict
        unit, starts = 1, random.sample(range(ROOM), reads + writes)
    scale = random.choice((1, 1, 1, 4001))
    return Slices(form, unit, scale, starts[:reads], starts[reads:], random.randrange(size))


COUNTS: dict[str, Callable[[int, Random], tuple[int, int]]] = {
    "all_reduce_coalesced": lambda size, random: (0, random.randrange(1, 4)),
    "two all_reduce in a scope": lambda size, random: (0, 2),
    "two all_reduce in flight": lambda size, random: (0, 2),
    "all_gather": lambda size, random: (1, size),
    "all_to_all": lambda size, random: (size, size),
    "reduce_scatter": lambda size, random: (size, 1),
    "scatter": lambda size, random: (size, 1),
    "gather": lambda size, random: (1, size),
    "batch": lambda size, random: (random.randrange(1, 3),) * 2,
}


async def in_scope(comm: Comm, slices: Slices, reads: list[Tensor], writes: list[Tensor]) -> None:
    async with comm.coalesce() as batch:
        for tensor in writes:
            comm.all_reduce(tensor)
    await batch


async def in_flight(comm: Comm, slices: Slices, reads: list[Tensor], writes: list[Tensor]) -> None:
    await asyncio.gather(*[comm.all_reduce(tensor) for tensor in writes])


async def batch(comm: Comm, slices: Slices, reads: list[Tensor], writes: list[Tensor]) -> None:
    messages = comm.batch_op_create()
    for tensor in reads:
        messages.send(tensor, (comm.rank + 1) % comm.size)
    for tensor in writes:
        messages.recv(tensor, (comm.rank - 1) % comm.size)
    await messages.issue()


FORMS: dict[str, Callable[[Comm, Slices, list[Tensor], list[Tensor]], Any]] = {
    "all_reduce_coalesced": lambda comm, slices, reads, writes: comm.all_reduce_coalesced(writes),
    "two all_reduce in a scope": in_scope,
    "two all_reduce in flight": in_flight,
    "all_gather": lambda comm, slices, reads, writes: comm.all_gather(writes, reads[0]),
    "all_to_all": lambda comm, slices, reads, writes: comm.all_to_all(writes, reads),
    "reduce_scatter": lambda comm, slices, reads, writes: comm.reduce_scatter(writes[0], reads),
    "scatter": lambda comm, slices, reads, writes: comm.scatter(
        writes[0], reads if comm.rank == slices.root else None, slices.root
    ),
    "gather": lambda comm, slices, reads, writes: comm.gather(
        writes if comm.rank == slices.root else None, reads[0], slices.root
    ),
    "batch": batch,
}


def expected(slices: Slices, rank: int, size: int) -> Tensor | None:
    """The tensor of ``rank`` after the operation; None: the call must be refused."""
    wholes = [slices.whole(r) for r in range(size)]
    reads = [[t.clone() for t in slices.of(whole, slices.reads)] for whole in wholes]
    whole = wholes[rank]
    writes = slices.of(whole, slices.writes)
    if slices.form.startswith("two"):
        for i in range(len(writes)):
            total = sum([slices.of(each, slices.writes)[i] for each in wholes], torch.zeros(()))
            for each in wholes:
                slices.of(each, slices.writes)[i].copy_(total)
        return whole
    match slices.form:
        case "all_reduce_coalesced":
            before = [[t.clone() for t in slices.of(each, slices.writes)] for each in wholes]
            values = [sum(each, torch.zeros(())) for each in zip(*before, strict=True)]
        case "all_gather":
            values = [each[0] for each in reads]
        case "gather":
            values = [each[0] for each in reads] if rank == slices.root else []
        case "all_to_all":
            values = [each[rank] for each in reads]
        case "reduce_scatter":
            values = [sum([each[rank] for each in reads], torch.zeros(()))]
        case "scatter":
            values = [reads[slices.root][rank]]
        case _:
            starts = [*slices.reads, *slices.writes]
            for i, start in enumerate(slices.writes, len(slices.reads)):
                if any(abs(start - other) < slices.unit for j, other in enumerate(starts) if j != i):
                    return None
            values = reads[(rank - 1) % size]
    for target, value in zip(writes, values, strict=len(values) > 0):
        target.copy_(value)
    return whole


async def check(comm: Comm, slices: Slices) -> None:
    whole = slices.whole(comm.rank)
    want = expected(slices, comm.rank, comm.size)
    reads, writes = slices.of(whole, slices.reads), slices.of(whole, slices.writes)
    if want is None:
        with pytest.raises(ValueError, match="shares memory with"):
            await FORMS[slices.form](comm, slices, reads, writes)
        want = slices.whole(comm.rank)
    else:
        await FORMS[slices.form](comm, slices, reads, writes)
    assert whole.equal(want), slices


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "simulated", (simulation.__name__, "SimulatedBackend"))


@pytest.mark.parametrize("backend", ["loopback", "simulated"])
@pytest.mark.parametrize("size", [2, 3])
def test_slices_of_one_tensor_within_a_process(backend: str, size: int, simulated: None) -> None:
    hints = {"side": "loopback"} if backend == "simulated" else None
    with asyncio.Runner() as runner:
        store = MemoryStore()

        async def begin() -> list[Comm]:
            comms = [new_comm(backend, name="a", store=store, rank=r, size=size, hints=hints) for r in range(size)]
            return list(await asyncio.gather(*comms))

        comms = runner.run(begin())

        @given(st.randoms(use_true_random=False))
        @examples(300, 30)
        def property_of_all(random: Random) -> None:
            slices = draw(random, size)

            async def main() -> None:
                await asyncio.gather(*(check(comm, slices) for comm in comms))

            runner.run(main())

        async def end() -> None:
            await asyncio.gather(*(comm.aclose() for comm in comms))

        try:
            property_of_all()
        finally:
            runner.run(end())


@pytest.mark.ranks([2, 3], backend=["shm", "gloo"])
async def test_slices_of_one_tensor_on_processes(comm: Comm) -> None:
    for seed in range(amount(150, 50)):
        await check(comm, draw(Random(seed), comm.size))
