"""Many programs on one backend: findings by signature, each shrunk once and counted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TextIO

from .fleet import Fleet
from .generate import Features, generate
from .judging import Finding
from .printing import printed
from .program import Program, dumps
from .shrink import SECONDS, shrink, trimmed
from .torch_calls import OPS

Signature = tuple[str, ...]

BACKENDS = ("shm", "gloo", "hierarchical", "loopback", "nccl", "torch")
TRIES = 3  # of a program that fails now and then
_DATA = ("wrong", "untouched", "result", "differs")
SLOW_KINDS = ("hang", "crash")  # each try takes seconds
CHUNK = 200  # cases on one number of ranks before the next
FEATURES = {
    "loopback": Features(),
    "shm": Features(torch=True),
    "gloo": Features(),
    "hierarchical": Features(),
    "nccl": Features(anyone=False, wait=False),
    "torch": Features(torch=True, only_torch=True, groups=False, ops=OPS),
}


def signature(program: Program, finding: Finding) -> Signature:
    """What findings have in common that are taken for one."""
    kind = "wrong" if finding.kind in _DATA else finding.kind
    if finding.step < 0:
        ops = "+".join(dict.fromkeys(step.op for step in program.steps))
        return kind, ops if len(program.steps) < 3 else "", finding.detail
    step = program.steps[finding.step]
    way = "scope" if step.scope else "torch" if step.issue == "torch" else "call"
    reduction = "minmax" if step.common.get("op") in ("MIN", "MAX") and finding.detail else ""
    return kind, step.op, way, finding.detail + reduction


@dataclasses.dataclass(slots=True)
class Found:
    """All findings of one signature."""

    signature: Signature
    size: int
    seed: int
    count: int
    message: str
    program: Program
    minimal: Program | None = None
    becomes: Signature = ()  #: the signature of the smallest program
    test: str = ""


@dataclasses.dataclass(slots=True)
class Campaign:
    """What is to be done: ``cases`` programs, or as many as fit into ``seconds``."""

    backend: str
    profile: str
    sizes: Sequence[int]
    seed: int
    cases: int | None = None
    seconds: float | None = None
    timeout: float = 20.0
    shrink_seconds: float = SECONDS  # for each signature; 0: none is shrunk
    out: Callable[[str], object] = print
    log: TextIO | None = None
    found: dict[Signature, Found] = dataclasses.field(default_factory=dict)
    done: int = 0

    def run(self) -> dict[str, Any]:
        """Do it; returns the summary."""
        start = time.monotonic()
        features = FEATURES[self.backend]
        with ExitStack() as stack:
            fleets = {
                size: stack.enter_context(Fleet(self.backend, size, timeout=self.timeout, with_torch=features.torch))
                for size in self.sizes
            }
            for first, size in zip(itertools.count(0, CHUNK), itertools.cycle(self.sizes)):
                if self._over(first, start):
                    break
                count = CHUNK if self.cases is None else min(CHUNK, self.cases - first)
                self._chunk(fleets[size], size, self.seed + first, count, start)
                self._progress(start)
            if self.shrink_seconds:
                for found in self.found.values():
                    self._shrink(fleets[found.size], found)
        return self._summary(time.monotonic() - start)

    def _over(self, first: int, start: float) -> bool:
        if self.cases is not None and first >= self.cases:
            return True
        return self.seconds is not None and time.monotonic() - start > self.seconds

    def _chunk(self, fleet: Fleet, size: int, seed: int, count: int, start: float) -> None:
        features = FEATURES[self.backend]

        def programs() -> Iterator[Program]:
            for number in range(seed, seed + count):
                if self.seconds is not None and time.monotonic() - start > self.seconds:
                    return
                yield generate(self.profile, size, number, features)

        for number, (program, findings) in enumerate(fleet.run(programs()), seed):
            self.done += 1
            for finding in findings:
                self._note(program, finding, size, number)

    def _note(self, program: Program, finding: Finding, size: int, seed: int) -> None:
        key = signature(program, finding)
        known = self.found.get(key)
        if known is not None:
            known.count += 1
            return
        self.found[key] = Found(key, size, seed, 1, f"rank {finding.rank}: {finding.message}", program)
        self._say(f"NEW {' '.join(key)} at {size} ranks, seed {seed}: {finding.message[:400]}")

    def _shrink(self, fleet: Fleet, found: Found) -> None:
        """To a program with a finding of the same kind; of which operation, the smallest tells best."""
        kind = found.signature[0]
        tries = 1 if kind in SLOW_KINDS else TRIES
        last: list[Finding] = []

        def fails(program: Program) -> bool:
            if program.size != found.size:
                return False  # its ranks would have to be started
            for _ in range(tries):
                found_now = [f for f in run_one(fleet, program) if _kin(f, found.signature, found.message)]
                if found_now:
                    last[:] = found_now
                    return True
            return False

        if kind == "fuzzer" or not fails(trimmed(found.program)):
            self._say(f"{' '.join(found.signature)} does not come again")
            return
        found.minimal = shrink(trimmed(found.program), fails, self.shrink_seconds)
        found.becomes = signature(found.minimal, last[0])
        found.test = printed(found.minimal, self.backend, last)
        title = f"MINIMAL {' '.join(found.signature)} ({found.count} times)"
        same = [other for other in self.found.values() if other is not found and other.becomes == found.becomes]
        if same:
            self._say(f"{title}: as {' '.join(same[0].signature)}")
        else:
            self._say(f"{title}: {' '.join(found.becomes)}\n{dumps(found.minimal)}\n{found.test}")

    def _progress(self, start: float) -> None:
        spent = time.monotonic() - start
        findings = ", ".join(f"{' '.join(key)}: {found.count}" for key, found in self.found.items()) or "none"
        self._say(f"{self.done} cases, {self.done / spent:.1f}/s, findings: {findings}")

    def _say(self, text: str) -> None:
        self.out(text)
        if self.log is not None:
            self.log.write(text + "\n")
            self.log.flush()

    def _summary(self, seconds: float) -> dict[str, Any]:
        findings = [
            {
                "signature": " ".join(found.signature),
                "becomes": " ".join(found.becomes),
                "count": found.count,
                "size": found.size,
                "seed": found.seed,
                "message": found.message[:1000],
                "minimal": None if found.minimal is None else json.loads(dumps(found.minimal)),
                "test": found.test,
            }
            for found in self.found.values()
        ]
        what = {"backend": self.backend, "profile": self.profile, "ranks": list(self.sizes), "seed": self.seed}
        return {**what, "cases": self.done, "seconds": round(seconds, 1), "findings": findings}


def _kin(finding: Finding, wanted: Signature, message: str) -> bool:
    """Whether a finding is of the same sort; wrong data may show in one place or another."""
    if wanted[0] in _DATA:
        return finding.kind in _DATA
    if finding.kind != wanted[0] or (finding.kind != "hang" and not wanted[-1].startswith(finding.detail)):
        return False
    return finding.kind != "refused" or _words(finding.message) == _words(message)


def _words(message: str) -> set[str]:
    """What a message says, but for names and numbers."""
    return {word for word in message.split() if word.isalpha() and len(word) > 4}


def run_one(fleet: Fleet, program: Program) -> list[Finding]:
    """The findings of one program."""
    return next(fleet.run([program]))[1]
