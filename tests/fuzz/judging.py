"""Whether what a rank has in the end is what it must have."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .effects import Fresh, Value
from .memory import Memory, bytes_of
from .oracle import Expectation, Result, Written, owners_of
from .program import Program, torch_dtype
from .reference import BOUNDED, EXACT

SHOWN = 8  # elements in a message


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it must be.

    Args:
        kind: "wrong", "untouched" (memory that nothing should have written), "result", "refused", "accepted",
            "raised", "hang", "crash", "differs" (between ranks); ``detail`` tells sorts of one kind apart.
        step: the number of the operation, -1 if it is not known.
    """

    kind: str
    step: int
    rank: int
    message: str
    detail: str = ""

    @property
    def secondary(self) -> bool:
        """Whether it only follows from another rank's."""
        seen = "has aborted the comm" in self.message  # by the backend, where the message with the cause came too late
        return self.kind == "raised" and (seen or self.detail in ("AbortedError", "PeerLostError", "ClosedError"))


def judge_memory(expectation: Expectation, memory: Memory, rank: int) -> list[Finding]:
    """Compare the arenas of a rank, at most one finding for each output."""
    found: list[Finding] = []
    vague = [i for i, each in enumerate(expectation.written, 1) if each.value.margin is not None and each.rank == rank]
    for number, arena in enumerate(memory.arenas):
        expected, owners = expectation.memories[rank].arenas[number], expectation.owners[rank][number]
        if torch.equal(arena, expected):
            continue
        differs = arena != expected
        if vague:
            differs &= ~torch.isin(owners, torch.tensor(vague, dtype=owners.dtype))
        for owner in owners[differs].unique().tolist():
            found.append(_wrong(expectation, memory, rank, number, owner))
    for owner in vague:
        written = expectation.written[owner - 1]
        mine = (owners_of(expectation, rank, written.view) == owner).all(-1).reshape(-1)
        problem = _compare(memory.tensor(written.view), written.value, written.view.dtype, mine)
        if problem is not None:
            found.append(_finding(written, *problem))
    return found


def _wrong(expectation: Expectation, memory: Memory, rank: int, number: int, owner: int) -> Finding:
    if not owner:
        expected = expectation.memories[rank].arenas[number]
        at = torch.nonzero(memory.arenas[number] != expected).reshape(-1)
        message = f"arena {number} is written where nothing should be: {len(at)} bytes, from byte {int(at[0])}"
        return Finding("untouched", -1, rank, message)
    written = expectation.written[owner - 1]
    actual = memory.tensor(written.view)
    detail = "nan" if _lacks_nan(actual, expectation.memories[rank].tensor(written.view)) else ""
    expected = expectation.memories[rank].tensor(written.view)
    return _finding(written, f"got {shown(actual)}, expected {shown(expected)}", detail)


def _finding(written: Written, message: str, detail: str) -> Finding:
    return Finding("wrong", written.step, written.rank, f"output {written.number}: {message}", detail)


def shown(tensor: Tensor) -> str:
    values = tensor.reshape(-1)
    if values.dtype.is_floating_point and values.dtype.itemsize == 1:
        values = values.to(torch.float32)
    text = ", ".join(str(value) for value in values[:SHOWN].tolist())
    return f"[{text}{', ...' if len(values) > SHOWN else ''}]"


def _lacks_nan(actual: Tensor, expected: Tensor) -> bool:
    if not expected.dtype.is_floating_point:
        return False
    return bool((torch.isnan(expected.double()) & ~torch.isnan(actual.double())).any())


def _compare(actual: Tensor, value: Value, dtype: str, mine: Tensor | None) -> tuple[str, str] | None:
    """What is wrong with a tensor, of whose elements only ``mine`` are looked at, and of what sort that is."""
    data = bytes_of(actual)
    if value.margin is None:
        same = torch.equal(data, value.data)
        return None if same else (f"got {shown(actual)}, expected {shown(value.data.view(torch_dtype(dtype)))}", "")
    kind = torch_dtype(dtype)
    real = kind.to_real() if kind.is_complex else kind
    got, wanted = data.view(real), value.data.view(real)
    same = (data.view(-1, real.itemsize) == value.data.view(-1, real.itemsize)).all(1)
    margin = value.margin
    wide = got.double()
    within = (margin.low <= wide) & (wide <= margin.high) | (torch.isnan(margin.low) & torch.isnan(wide))
    bad = (margin.kind == EXACT) & ~same | (margin.kind == BOUNDED) & ~within
    if mine is not None:
        bad &= mine.repeat_interleave(len(got) // max(1, len(mine)))
    if not bad.any():
        return None
    detail = "nan" if bool((torch.isnan(margin.low) & bad).any()) else ""
    at = int(torch.nonzero(bad)[0])
    return f"at {at}: got {shown(got[at:])}, expected {shown(wanted[at:])}", detail


def digests(expectation: Expectation, memory: Memory, rank: int) -> dict[str, int]:
    """Checksums of what must be the same on all ranks, though no rank knows what it is; by step and output."""
    found = {}
    for owner, written in enumerate(expectation.written, 1):
        whole = written.rank == rank and written.value.margin is not None
        if whole and (owners_of(expectation, rank, written.view) == owner).all():
            found[f"{written.step}/{written.number}"] = zlib.crc32(
                bytes(bytes_of(memory.tensor(written.view)).tolist())
            )
    return found


def differing(program: Program, each: Sequence[dict[str, int]]) -> list[Finding]:
    """Where ranks have different bits of an all_reduce. ``each`` rank's digests."""
    found = []
    for key in sorted({key for digest in each for key in digest}):
        step = int(key.split("/")[0])
        if program.steps[step].op.startswith("all_reduce") and len({d[key] for d in each if key in d}) > 1:
            found.append(Finding("differs", step, 0, "ranks have different bits of one result"))
    return found


# -- results ----------------------------------------------------------------------------------------------------------


def judge_result(number: int, rank: int, expected: Result, arguments: dict[str, Any], actual: Any) -> Finding | None:
    """Compare what awaiting the call of a step has given."""
    problem = _result(expected, arguments, actual)
    return None if problem is None else Finding("result", number, rank, problem)


def _result(expected: Result, arguments: dict[str, Any], actual: Any) -> str | None:
    if expected.is_object:
        return _object("the result", expected.obj, actual)
    if expected.given is not None:
        given = arguments[expected.given]
        return None if actual is given else f"the result is {actual!r:.200}, not the argument {expected.given}"
    if not expected.made and not expected.several:
        return None if actual is None else f"the result is {actual!r:.200}, not None"
    if not expected.made:
        return None if actual is None or actual == [] else f"the result is {actual!r:.200}, not None"
    tensors = list(_flat(actual))
    if len(tensors) != len(expected.made) or expected.several != isinstance(actual, (list, tuple)):
        return f"the result has {len(tensors)} tensors, expected {len(expected.made)}"
    for tensor, (fresh, value) in zip(tensors, expected.made, strict=True):
        problem = _fresh(tensor, fresh, value)
        if problem is not None:
            return problem
    return None


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _fresh(actual: Any, fresh: Fresh, value: Value) -> str | None:
    if not isinstance(actual, Tensor):
        return f"a result is {actual!r:.200}, not a tensor"
    if tuple(actual.shape) != fresh.shape or actual.dtype != torch_dtype(fresh.dtype):
        return f"a result is {actual.dtype} of shape {tuple(actual.shape)}, expected {fresh.dtype} of {fresh.shape}"
    problem = _compare(actual, value, fresh.dtype, None)
    return None if problem is None else f"a result: {problem[0]}"


def _object(name: str, expected: Any, actual: Any) -> str | None:
    if isinstance(expected, tuple):
        problem = _fresh(actual, *expected)
        return None if problem is None else f"{name}: {problem}"
    if isinstance(expected, dict) and isinstance(actual, dict) and list(expected) == list(actual):
        pairs = [(f"{name}[{key!r}]", item, actual[key]) for key, item in expected.items()]
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = [(f"{name}[{i}]", item, actual[i]) for i, item in enumerate(expected)]
    elif type(expected) is type(actual) and not isinstance(expected, (dict, list)) and expected == actual:
        return None
    else:
        return f"{name} is {actual!r:.200}, expected {expected!r:.200}"
    return next((problem for pair in pairs if (problem := _object(*pair)) is not None), None)
