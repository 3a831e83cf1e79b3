"""What a program must do: the content of all arenas when it is over, and what every call gives.

Each rank's process computes this for all ranks, from the program alone. Operations take effect one after the other in
the order of the program; each reads all its inputs first, and then writes its outputs one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .effects import Effect, Fresh, Read, Value, unknown
from .effects_of_lists import EFFECTS_OF_ALL
from .legality import MUST, refusal_of_run, runs
from .memory import Memory, bytes_of
from .program import Program, Step, View, torch_dtype

INITIAL = 0  # the owner of bytes that nothing has written


@dataclass(frozen=True, slots=True)
class Written:
    """One output: which step wrote what, and where."""

    step: int
    rank: int
    number: int  #: among the outputs of the rank
    view: View
    value: Value


@dataclass(frozen=True, slots=True)
class Result:
    """What awaiting a call gives: the argument ``given``, the tensors ``made``, or ``obj``."""

    given: str | None = None
    made: tuple[tuple[Fresh, Value], ...] = ()
    several: bool = False
    obj: Any = None
    is_object: bool = False


@dataclass(slots=True)
class Expectation:
    """``refusals``: by the number of the first step of a run, for each rank of the world: MUST, MAY, or None."""

    memories: list[Memory]
    owners: list[list[Tensor]]  #: for each byte of each arena of each rank the number of its Written, from 1
    written: list[Written] = field(default_factory=list)
    results: dict[tuple[int, int], Result] = field(default_factory=dict)  #: by step and rank of the world
    refusals: dict[int, dict[int, str]] = field(default_factory=dict)

    def probes(self, number: int) -> bool:
        """Whether the run that begins with step ``number`` is only tried, by those ranks that must be refused."""
        return MUST in self.refusals.get(number, {}).values()


def expect(program: Program) -> Expectation:
    """What the program must do."""
    memories = [Memory(arenas, rank) for rank, arenas in enumerate(program.arenas)]
    owners = [[torch.zeros(len(arena), dtype=torch.int16) for arena in memory.arenas] for memory in memories]
    expectation = Expectation(memories, owners)
    for number, steps in runs(program.steps):
        refused = {
            rank: found for i, rank in enumerate(steps[0].group) if (found := refusal_of_run(steps, i)) is not None
        }
        if refused:
            expectation.refusals[number] = refused
        if expectation.probes(number):
            continue
        for i, step in enumerate(steps):
            effect = EFFECTS_OF_ALL[step.op](step, _reader(expectation, step))
            _apply(expectation, number + i, step, effect)
    return expectation


def _reader(expectation: Expectation, step: Step) -> Read:
    vague = [i for i, written in enumerate(expectation.written, 1) if written.value.margin is not None]

    def read(member: int, view: View) -> Value:
        rank = step.group[member]
        reals = 2 if view.dtype.startswith("complex") else 1
        value = Value(bytes_of(expectation.memories[rank].tensor(view)), view.itemsize, reals)
        if vague and torch.isin(owners_of(expectation, rank, view), torch.tensor(vague)).any():
            value = unknown(value)
        return value

    return read


def owners_of(expectation: Expectation, rank: int, view: View) -> Tensor:
    """The owner of each byte of a view: of shape ``(*view.shape, itemsize)``."""
    owners = expectation.owners[rank][view.arena]
    strides = [stride * view.itemsize for stride in view.strides]
    return owners.as_strided((*view.shape, view.itemsize), (*strides, 1), view.offset * view.itemsize)


def _apply(expectation: Expectation, number: int, step: Step, effect: Effect) -> None:
    for i, rank in enumerate(step.group):
        made = []
        for j, (target, value) in enumerate(effect.writes[i]):
            if isinstance(target, Fresh):
                made.append((target, value))
            else:
                _write(expectation, Written(number, rank, j, target, value))
        given, objects = effect.results[i], effect.objects
        expectation.results[number, rank] = Result(given, tuple(made), effect.made, objects.get(i), i in objects)


def _write(expectation: Expectation, written: Written) -> None:
    view = written.view
    if not view.numel:
        return
    target = expectation.memories[written.rank].tensor(view)
    target.copy_(written.value.data.view(torch_dtype(view.dtype)).view(view.shape))
    expectation.written.append(written)
    owners_of(expectation, written.rank, view).fill_(len(expectation.written))
