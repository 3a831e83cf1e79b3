"""Doing a program, as one of its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from asynccomm import Comm, ReduceOp
from asynccomm.errors import NotSentError

from .effects import sent_by
from .judging import Finding, digests, judge_memory, judge_result
from .legality import MAY, MUST, refusal, runs
from .memory import Memory, overlaps_itself
from .oracle import Expectation, expect
from .program import Program, Step, mapped

Caller = Callable[[Step, int, dict[str, Any]], Any]


@dataclass(slots=True)
class Comms:
    """The comms of one rank: that of the world, those that were split off it, and torch's functions.

    Args:
        torch_calls: does a step by torch's own functions, and returns what must be its result; blocks.
    """

    world: Comm | None
    torch_calls: Caller | None = None
    groups: dict[tuple[int, ...], Comm] = field(default_factory=dict)

    async def of(self, group: tuple[int, ...]) -> Comm:
        """The comm of some ranks, made when they first have one; all of them ask at the same place."""
        assert self.world is not None, "this world has torch's functions only"
        if group == tuple(range(self.world.size)):
            return self.world
        if group not in self.groups:
            comm = await self.world.split(group, "of-" + "-".join(map(str, group)))
            assert comm is not None
            self.groups[group] = comm
        return self.groups[group]

    def abort(self, reason: str) -> None:
        for comm in self._all():
            comm.abort(reason)

    async def aclose(self) -> None:
        for comm in reversed(self._all()):
            await comm.aclose()

    def _all(self) -> list[Comm]:
        return [comm for comm in (self.world, *self.groups.values()) if comm is not None]


class NotAsExpected(Exception):
    """What a rank has noticed while it was doing a program."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding


class Refused(Exception):
    """A call was refused that may be."""

    def __init__(self, number: int, cause: ValueError) -> None:
        super().__init__(f"step {number} was refused: {cause}")
        self.number = number


@dataclass(slots=True)
class _Pending:
    """A call that was made: its Work, and what it was made with."""

    number: int
    step: Step
    work: Awaitable[Any]
    arguments: dict[str, Any]
    tensors: Sequence[Any] = ()  #: of messages: what awaiting must give


@dataclass(slots=True)
class Report:
    """What a rank says of a program. ``broken``: its comms cannot be used for another. ``refused``: a call of its was
    that may be, so the others could not go on."""

    findings: list[Finding]
    digests: dict[str, int] = field(default_factory=dict)
    broken: bool = False
    refused: bool = False


async def perform(program: Program, expectation: Expectation, rank: int, comms: Comms) -> Report:
    """Do what ``rank`` does in the program, and judge it."""
    run = _Run(program, expectation, rank, comms)
    try:
        number = await run.all()
    except NotAsExpected as exc:
        comms.abort(str(exc.finding))
        return Report([*run.findings, exc.finding], broken=True)
    if number is not None:  # it must have left everything as it was, and the others cannot go on
        comms.abort(f"step {number} was refused, as it may be")
        expectation = expect(replace(program, steps=program.steps[:number]))
        return Report([*run.findings, *judge_memory(expectation, run.memory, rank)], broken=True, refused=True)
    findings = [*run.findings, *judge_memory(expectation, run.memory, rank)]
    return Report(findings, digests(expectation, run.memory, rank))


class _Run:
    """One rank's way through a program."""

    def __init__(self, program: Program, expectation: Expectation, rank: int, comms: Comms) -> None:
        self.memory = Memory(program.arenas[rank], rank, comms.world)
        self.findings: list[Finding] = []
        self._program, self._expectation, self._rank, self._comms = program, expectation, rank, comms
        self._pending: list[_Pending] = []

    async def all(self) -> int | None:
        """Everything; returns the number of a step that was refused, as it may be."""
        refused = None
        try:
            for number, steps in runs(self._program.steps):
                await self.steps(number, steps)
        except Refused as exc:
            refused = exc.number
        await self.finish()
        return refused

    async def steps(self, number: int, steps: Sequence[Step]) -> None:
        """Those of one scope, or a single one."""
        if self._rank not in steps[0].group:
            return
        refused = self._expectation.refusals.get(number, {}).get(self._rank)
        try:
            for step in steps:  # before a scope is entered, and by all of them: making a comm is a collective
                if step.issue != "torch":
                    await self._comms.of(step.group)
            if self._expectation.probes(number) and refused != MUST:
                return
            if steps[0].scope:
                await self._scope(number, steps)
            else:
                await self._issue(number, steps[0])
        except ValueError as exc:
            if refused is None:
                raise self._unexpected(number, exc, "refused") from exc
            if refused == MAY:
                raise Refused(number, exc) from exc
            await self._drop(number)
            return
        except Exception as exc:
            raise self._unexpected(number, exc) from exc
        if refused == MUST:
            raise NotAsExpected(Finding("accepted", number, self._rank, "a call that must be refused was not"))
        if steps[-1].issue not in ("flight", "thread") or steps[0].scope:
            await self.finish()

    async def _drop(self, number: int) -> None:
        """Look at the Works of a scope that was refused: they have all failed."""
        dropped = [each for each in self._pending if each.number >= number]
        self._pending = [each for each in self._pending if each.number < number]
        for each in dropped:
            try:
                await each.work
            except NotSentError:
                continue
            raise NotAsExpected(Finding("accepted", each.number, self._rank, "a call of a refused scope was sent"))

    async def _scope(self, number: int, steps: Sequence[Step]) -> None:
        comm = await self._comms.of(steps[0].group)
        async with comm.coalesce(**steps[0].common.get("scope", {})):
            for i, step in enumerate(steps):
                await self._issue(number + i, step)

    async def _issue(self, number: int, step: Step) -> None:
        member = step.group.index(self._rank)
        if step.issue == "torch":
            await self.finish()
            await self._by_torch(number, step, member)
            return
        comm = await self._comms.of(step.group)
        if step.messages:
            self._messages(number, step, member, comm)
            return
        arguments = arguments_of(step, member, self.memory)
        method = getattr(comm, step.op)
        if step.issue == "thread":
            work = await asyncio.to_thread(lambda: method(**arguments))
        else:
            work = method(**arguments)
        self._pending.append(_Pending(number, step, work, arguments))

    async def _by_torch(self, number: int, step: Step, member: int) -> None:
        assert self._comms.torch_calls is not None
        arguments = arguments_of(step, member, self.memory)
        await asyncio.to_thread(self._comms.torch_calls, step, member, arguments)

    def _messages(self, number: int, step: Step, member: int, comm: Comm) -> None:
        calls = sent_by(step, member)
        if step.op == "messages" and refusal(step, member) == MUST:  # nothing may be sent that no one receives
            calls = [(name, message) for name, message in calls if name == "recv" and overlaps_itself(message.recv)]
        if not calls:
            return
        batch = comm.batch_op_create() if step.op == "batch" else None
        tensors = []
        for name, message in calls:
            tensor = self.memory.tensor(message.send if name == "send" else message.recv)
            tensors.append(tensor)
            peer = message.dst if name == "send" else None if message.anyone else message.src
            work = getattr(batch or comm, name)(tensor, peer, message.tag)
            if batch is None:
                self._pending.append(_Pending(number, step, work, {}, [tensor]))
        if batch is not None:
            self._pending.append(_Pending(number, step, batch.issue(), {}, tensors))

    async def finish(self) -> None:
        """Await all that is in flight, and judge what that gives."""
        pending, self._pending = self._pending, []
        for each in pending:
            try:
                if each.step.issue == "wait":
                    result = await asyncio.to_thread(each.work.wait)  # type: ignore[attr-defined]
                else:
                    result = await each.work
            except Exception as exc:
                raise self._unexpected(each.number, exc) from exc
            finding = self._judge(each, result)
            if finding is not None:
                self.findings.append(finding)

    def _judge(self, each: _Pending, result: Any) -> Finding | None:
        if each.step.messages:
            given = result if each.step.op == "batch" else [result]
            if len(given) == len(each.tensors) and all(a is b for a, b in zip(given, each.tensors, strict=True)):
                return None
            return Finding("result", each.number, self._rank, f"messages gave {result!r:.200}, not their tensors")
        expected = self._expectation.results[each.number, self._rank]
        return judge_result(each.number, self._rank, expected, each.arguments, result)

    def _unexpected(self, number: int, exc: Exception, kind: str = "raised") -> NotAsExpected:
        if isinstance(exc, NotAsExpected):
            return exc
        name = type(exc).__name__
        if name == "CollectiveTimeoutError":
            kind = "hang"
        return NotAsExpected(Finding(kind, number, self._rank, f"{name}: {exc}", name))


def arguments_of(step: Step, member: int, memory: Memory) -> dict[str, Any]:
    """What the method is called with: tensors in place of views."""
    own = step.ranks[member] if step.ranks else {}
    given = {name: mapped(value, memory.tensor) for name, value in own.items() if name not in ("factor", "as_tensor")}
    common = {name: value for name, value in step.common.items() if name not in ("scope", "op")}
    if "op" in step.common:
        common["op"] = reduction_of(step.common["op"], own.get("factor"), as_tensor=own.get("as_tensor", False))
    return {**common, **given}


def reduction_of(name: str, factor: complex | None, *, as_tensor: bool = False) -> ReduceOp:
    if name != "PREMUL_SUM":
        return getattr(ReduceOp, name)  # type: ignore[no-any-return]
    assert factor is not None
    if not as_tensor:
        return ReduceOp.PREMUL_SUM(factor)
    dtype = {int: torch.int64, float: torch.float64, complex: torch.complex128}[type(factor)]
    return ReduceOp.PREMUL_SUM(torch.tensor(factor, dtype=dtype))
