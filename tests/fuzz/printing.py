"""A program as the code of a test, which needs nothing but the library: to be pasted where it belongs."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .effects import sent_by
from .judging import Finding
from .legality import MAY, MUST, runs
from .memory import Memory, bytes_of, nbytes_of
from .oracle import Expectation, Result, expect, owners_of
from .program import Program, Step, View, torch_dtype
from .reference import EXACT
from .shrink import views_of

RUNS = 40  # stretches of equal values that are written out; more is a checksum
LISTED = 64  # values that are written out one by one
INDENT = "    "

_HEADS = {
    "loopback": """async def test_NAME() -> None:
    async def one(comm: Comm) -> None:
BODY
    async with loopback_world(SIZE) as comms:
        await asyncio.gather(*(one(comm) for comm in comms))
""",
    "nccl": """async def test_NAME(world: World) -> None:
    async def one(comm: Comm) -> None:
BODY
    async with world(SIZE) as comms:
        await asyncio.gather(*(one(comm) for comm in comms))
""",
    "process": """@pytest.mark.ranks(SIZE, backend="BACKEND")
async def test_NAME(comm: Comm) -> None:
BODY
""",
}
_IMPORTS = {
    "loopback": "from asynccomm.testing.local import loopback_world\n",
    "nccl": "from tests.backends.nccl.conftest import World, simulated, world  # noqa: F401\n",
}


def printed(program: Program, backend: str, findings: Sequence[Finding] = ()) -> str:
    """The source of a module with one test."""
    nested = backend in _HEADS
    expectation = expect(program)
    ranks = [_Rank(program, expectation, rank).lines() for rank in range(program.size)]
    body = _merged(ranks, INDENT * (2 if nested else 1))
    name = "_then_".join(dict.fromkeys(step.op for step in program.steps))
    text = _HEADS.get(backend, _HEADS["process"])
    for key, value in (("NAME", name), ("SIZE", str(program.size)), ("BACKEND", backend), ("BODY", body)):
        text = text.replace(key, value)
    told = "".join(f"# rank {f.rank}: {f.kind}: {f.message.splitlines()[0][:300]}\n" for f in findings[:3])
    return f"{told}{_imports(text, backend)}\n\n{text}"


def _imports(text: str, backend: str) -> str:
    plain = [name for name in ("asyncio", "math", "zlib") if f"{name}." in text]
    names = ["Comm", *(["ReduceOp"] if "ReduceOp." in text else [])]
    lines = [*(f"import {name}" for name in plain), "", "import pytest" if "pytest." in text else "", "import torch"]
    lines += ["", f"from asynccomm import {', '.join(names)}", _IMPORTS.get(backend, "").rstrip()]
    return "\n".join(line for line, _ in itertools.groupby(lines)).strip() + "\n"


def _merged(ranks: list[list[str]], indent: str) -> str:
    """The lines of all ranks: once where they are alike, else by rank."""
    first = ranks[0]
    if all(lines == first for lines in ranks):
        return "\n".join(indent + line for line in first)
    text = []
    for rank, lines in enumerate(ranks):
        text.append(f"{indent}{'if' if not rank else 'elif'} comm.rank == {rank}:")
        text += [indent + INDENT + line for line in lines or ["pass"]]
    return "\n".join(text)


class _Rank:
    """What one rank does, as code."""

    def __init__(self, program: Program, expectation: Expectation, rank: int) -> None:
        self._program, self._expectation, self._rank = program, expectation, rank
        self._lines: list[str] = []
        self._works: list[tuple[int, str]] = []
        self._names: dict[View, str] = {}
        self._groups: list[str] = []  # comms of some of the ranks

    def lines(self) -> list[str]:
        for number, arena in enumerate(self._program.arenas[self._rank]):
            values = Memory((arena,), self._rank).arenas[0][: self._nbytes(number)].view(torch_dtype(arena.dtype))
            self._lines.append(f"a{number} = {_tensor(values, arena.dtype)}")
        for number, steps in runs(self._program.steps):
            if self._rank in steps[0].group:
                self._run(number, steps)
        self._await()
        for number, _ in enumerate(self._program.arenas[self._rank]):
            self._memory(number)
        self._lines += [f"await {name}.aclose()" for name in self._groups]
        return self._lines

    def _nbytes(self, number: int) -> int:
        """Of an arena; what views of other dtypes need if there are any, which do not divide it otherwise."""
        arena = self._program.arenas[self._rank][number]
        views = [view for step in self._program.steps for view in views_of(step, self._rank) if view.arena == number]
        if all(view.dtype == arena.dtype for view in views):
            return arena.numel * torch_dtype(arena.dtype).itemsize
        return nbytes_of(arena)

    def _run(self, number: int, steps: Sequence[Step]) -> None:
        refused = self._expectation.refusals.get(number, {}).get(self._rank)
        if self._expectation.probes(number) and refused != MUST:
            return
        if refused == MAY:
            self._lines.append("# this call may be refused, by a ValueError")
        start = len(self._lines)
        for i, step in enumerate(steps):
            self._call(number + i, step)
        added, self._lines = self._lines[start:], self._lines[:start]
        views = [line for line in added if line.startswith("t")]
        calls = [line for line in added if not line.startswith("t")]
        self._lines += views
        if steps[0].scope:
            limits = ", ".join(f"{key}={value}" for key, value in steps[0].common.get("scope", {}).items())
            calls = [f"async with {self._comm(steps[0])}.coalesce({limits}):", *(INDENT + line for line in calls)]
        if refused == MUST:
            calls = ["with pytest.raises(ValueError):", *(INDENT + line for line in calls)]
            self._works = []
        self._lines += calls
        if steps[0].scope or steps[0].issue not in ("flight", "thread"):
            self._await()

    def _comm(self, step: Step) -> str:
        if step.group == tuple(range(self._program.size)):
            return "comm"
        name = "c" + "".join(map(str, step.group))
        line = f'{name} = await comm.split({list(step.group)}, "{name}")'
        if name not in self._groups:
            self._groups.append(name)
            self._lines.insert(0, line)
        return name

    def _call(self, number: int, step: Step) -> None:
        member = step.group.index(self._rank)
        comm = self._comm(step)
        if step.messages:
            self._messages(number, step, member, comm)
            return
        given = step.ranks[member] if step.ranks else {}
        arguments = {key: self._value(value) for key, value in given.items() if key not in ("factor", "as_tensor")}
        arguments |= {key: repr(value) for key, value in step.common.items() if key not in ("scope", "op")}
        if "op" in step.common:
            arguments["op"] = _reduction(step.common["op"], given)
        text = ", ".join(f"{key}={value}" for key, value in arguments.items())
        work = f"work{number}"
        call = f"{comm}.{step.op}({text})"
        self._lines.append(
            f"{work} = await asyncio.to_thread(lambda: {call})" if step.issue == "thread" else f"{work} = {call}"
        )
        self._works.append((number, work))

    def _messages(self, number: int, step: Step, member: int, comm: str) -> None:
        calls = sent_by(step, member)
        if not calls:
            return
        to = f"batch{number}" if step.op == "batch" else comm
        if step.op == "batch":
            self._lines.append(f"{to} = {comm}.batch_op_create()")
        for i, (name, message) in enumerate(calls):
            tensor = self._value(message.send if name == "send" else message.recv)
            peer = message.dst if name == "send" else None if message.anyone else message.src
            call = f"{to}.{name}({tensor}, {peer}, {message.tag})"
            if step.op == "messages":
                self._works.append((-1, f"work{number}_{i}"))
                call = f"work{number}_{i} = {call}"
            self._lines.append(call)
        if step.op == "batch":
            self._lines.append(f"work{number} = {to}.issue()")
            self._works.append((-1, f"work{number}"))

    def _value(self, value: Any) -> str:
        if isinstance(value, View):
            return self._view(value)
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key!r}: {self._value(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(self._value(item) for item in value) + "]"
        return repr(value)

    def _view(self, view: View) -> str:
        if view not in self._names:
            name = self._names[view] = f"t{len(self._names)}"
            arena = self._program.arenas[self._rank][view.arena]
            base = f"a{view.arena}" + ("" if arena.dtype == view.dtype else f".view(torch.{view.dtype})")
            text = f"{base}.as_strided({view.shape}, {view.strides}, {view.offset})"
            text += ".conj()" if view.conj else ""
            self._lines.append(f"{name} = " + (f"torch._neg_view({text})" if view.neg else text))
        return self._names[view]

    # -- what must be so in the end -----------------------------------------------------------------------------------

    def _await(self) -> None:
        works, self._works = self._works, []
        for number, work in works:
            step = self._program.steps[number]
            result = Result() if number < 0 else self._expectation.results.get((number, self._rank), Result())
            awaited = (
                f"await asyncio.to_thread({work}.wait)" if number >= 0 and step.issue == "wait" else f"await {work}"
            )
            if not result.made or any(value.margin is not None for _, value in result.made):
                self._lines.append(awaited)
                continue
            self._lines.append(f"made = {awaited}")
            names = ["made"] if not result.several else [f"made[{i}]" for i in range(len(result.made))]
            if step.op == "all_gather_coalesced":
                count = len(result.made) // len(step.group)
                names = [f"made[{i // count}][{i % count}]" for i in range(len(result.made))]
            for name, (fresh, value) in zip(names, result.made, strict=True):
                tensor = value.data.view(torch_dtype(fresh.dtype))
                self._lines += _asserted(f"{name}.reshape(-1)", tensor, fresh.dtype)

    def _memory(self, number: int) -> None:
        arena = self._program.arenas[self._rank][number]
        memory, owners = self._expectation.memories[self._rank], self._expectation.owners[self._rank][number]
        expected = memory.arenas[number][: self._nbytes(number)].view(torch_dtype(arena.dtype))
        vague = [
            i
            for i, written in enumerate(self._expectation.written, 1)
            if written.value.margin is not None and bool((written.value.margin.kind != EXACT).any())
        ]
        if not any(int(owner) in vague for owner in owners.unique()):
            self._lines += _asserted(f"a{number}", expected, arena.dtype)
            return
        for owner in vague:
            written = self._expectation.written[owner - 1]
            if written.rank == self._rank and written.view.arena == number:
                self._vague(written.view, owner)

    def _vague(self, view: View, owner: int) -> None:
        """Compare a result that need not be exact; only if nothing else was written there."""
        if not bool((owners_of(self._expectation, self._rank, view) == owner).all()):
            return
        tensor = self._expectation.memories[self._rank].tensor(view)
        text = _literal(tensor.resolve_conj().reshape(-1)[:LISTED].tolist())
        self._lines.append(
            f"assert {self._view(view)}.reshape(-1)[:{LISTED}].tolist() == pytest.approx({text}, rel=1e-2, nan_ok=True)"
        )


def _reduction(name: str, given: Mapping[str, Any]) -> str:
    return f"ReduceOp.{name}" + (f"({given['factor']!r})" if name == "PREMUL_SUM" else "")


def _literal(value: Any) -> str:
    """The code of a number, or of a list of numbers."""
    if isinstance(value, list):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if isinstance(value, complex):
        return f"complex({_literal(value.real)}, {_literal(value.imag)})"
    return repr(value).replace("nan", "math.nan").replace("inf", "math.inf")


def _tensor(values: Tensor, dtype: str) -> str:
    """An expression for a flat tensor."""
    if values.numel() <= LISTED:
        return f"torch.tensor({_listed(values)}, dtype=torch.{dtype})"
    stretches = _stretches(values)
    if stretches is not None:
        heads, counts = stretches
        return f"torch.tensor({heads}).repeat_interleave(torch.tensor({counts})).to(torch.{dtype})"
    numbers = bytes_of(values).tolist()
    for period in (7 * 7 * values.itemsize, 7 * 7 * 7 * values.itemsize):
        repeated = numbers[:period] * (len(numbers) // period + 1)
        if numbers == repeated[: len(numbers)]:
            part = f"torch.tensor({numbers[:period]}, dtype=torch.uint8)"
            times = len(numbers) // period + 1
            return f"{part}.repeat({times})[:{len(numbers)}].view(torch.{dtype})"
    return f"torch.tensor({numbers}, dtype=torch.uint8).view(torch.{dtype})"


def _listed(values: Tensor) -> str:
    if values.dtype.itemsize == 1 and values.dtype.is_floating_point:
        values = values.float()
    if values.dtype.is_complex and values.dtype.itemsize == 4:
        values = values.to(torch_dtype("complex64"))
    return _literal(values.tolist())


def _stretches(values: Tensor) -> tuple[str, list[int]] | None:
    """Equal values side by side: each value, and how many there are."""
    if values.dtype.itemsize == 1 and values.dtype.is_floating_point:
        values = values.float()
    heads, counts = [], []
    for value, items in itertools.groupby(values.tolist()):
        if value != value or len(heads) >= RUNS:  # NaN equals nothing
            return None
        heads.append(value)
        counts.append(sum(1 for _ in items))
    return _literal(heads), counts


def _asserted(name: str, expected: Tensor, dtype: str) -> list[str]:
    """That a flat tensor has these values."""
    if expected.numel() <= LISTED:
        text = _listed(expected)
        if "nan" in text:
            return [f"assert {name}.view(torch.uint8).tolist() == {bytes_of(expected).tolist()}"]
        return [f"assert {name}.tolist() == {text}"]
    stretches = _stretches(expected)
    if stretches is not None:
        return [f"assert {name}.tolist() == {_tensor(expected, dtype)}.tolist()"]
    checksum = zlib.crc32(bytes(bytes_of(expected).tolist()))
    return [f"assert zlib.crc32(bytes({name}.contiguous().view(torch.uint8).tolist())) == {checksum}"]
