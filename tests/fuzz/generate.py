"""Random programs: the same for the same seed, everywhere."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from .arguments import Draw
from .arguments_of_lists import ARGUMENTS, OBJECTS, message_slots
from .layouts import Ground
from .legality import normal
from .program import Message, Program, Step
from .torch_calls import by_torch, right_in_gloo
from .values import DTYPES, FILLS

PROFILES = ("aliasing", "everything")
_FILLS = ("position", "position", "position", "small", "small", "special", "random")
assert set(_FILLS) < set(FILLS)


@dataclass(frozen=True, slots=True)
class Features:
    """What may be in the programs for a backend.

    Args:
        anyone: receives that do not name their sender; torch: calls of torch's functions.
        groups: operations of some of the ranks; wait: threads that block on a Work.
        only_torch: nothing but such calls, and only what torch itself does as it should.
    """

    anyone: bool = True
    torch: bool = False
    groups: bool = True
    wait: bool = True
    only_torch: bool = False
    big: float = 0.01
    ops: tuple[str, ...] = (*ARGUMENTS, "messages", "batch")


def generate(profile: str, size: int, seed: int, features: Features) -> Program:
    """The program number ``seed`` of a world."""
    return _Maker(profile, size, Random(f"{profile}/{size}/{seed}"), features).program()


class _Maker:
    """One program in the making."""

    def __init__(self, profile: str, size: int, random: Random, features: Features) -> None:
        self._random, self._features, self._size = random, features, size
        aliasing = profile == "aliasing"
        self._aliasing = random.choice((0.5, 0.8, 1.0) if aliasing else (0.0, 0.0, 0.0, 0.6))
        if features.only_torch:
            self._aliasing = 0.0
        self._lazy = random.random() < 0.3
        self._objects = not aliasing
        self._count = random.choice((1, 1, 1, 2, 3)) if aliasing else random.choice((1, 2, 2, 3, 3, 4, 5))
        alike, fill, seed = random.random() < 0.5, random.choice(_FILLS), random.randrange(1000)
        base = random.getrandbits(32)  # where ranks draw alike, they come to the same layouts
        self._grounds = [Ground(Random(base + (0 if alike else rank)), fill, seed) for rank in range(size)]
        self._scope = 0
        self._tags = itertools.count(10)  # of messages that are received from any rank

    def program(self) -> Program:
        steps: list[Step] = []
        while len(steps) < self._count:
            if self._features.only_torch:
                step = by_torch(self._step(tuple(range(self._size))))
                steps += [step] if step is not None and right_in_gloo(step) else []
                continue
            count = self._random.choice((2, 2, 3, 4)) if self._count > 1 and self._random.random() < 0.25 else 1
            steps += self._steps(count, scoped=count > 1 and self._random.random() < 0.7)
        arenas = tuple(ground.arenas() for ground in self._grounds)
        return normal(Program(arenas, tuple(steps)))

    def _steps(self, count: int, *, scoped: bool) -> list[Step]:
        group = self._group()
        issue = self._issue()
        plain = "flight" if count > 1 else "await" if issue == "torch" else issue
        steps = [replace(self._step(group), issue=plain) for _ in range(count)]
        if scoped:
            self._scope += 1
            limits: dict[str, Any] = {"max_ops": 2} if self._random.random() < 0.2 else {}
            steps = [replace(step, scope=self._scope, issue="await") for step in steps]
            steps[0] = replace(steps[0], common={**steps[0].common, "scope": limits})
        elif issue == "torch":
            steps = [by_torch(step) or step for step in steps] if len(group) == self._size else steps
        return steps

    def _issue(self) -> str:
        issue = self._random.choice(("await", "await", "await", "flight", "flight", "thread", "wait", "torch"))
        if (issue == "wait" and not self._features.wait) or (issue == "torch" and not self._features.torch):
            return "await"
        return issue

    def _group(self) -> tuple[int, ...]:
        everybody = tuple(range(self._size))
        if not self._features.groups or self._size < 2 or self._random.random() < 0.88:
            return everybody
        return tuple(self._random.sample(everybody, self._random.randrange(1, self._size + 1)))

    def _step(self, group: tuple[int, ...]) -> Step:
        for rank in group:
            self._grounds[rank].begin()
        ops = [op for op in self._features.ops if self._objects or op not in OBJECTS]
        draw = Draw(self._random, len(group), self._features.big, DTYPES)
        op = self._random.choice(ops)
        if op in ("messages", "batch"):
            return self._messages(op, group, draw)
        common, ranks = ARGUMENTS[op](draw)
        lazy = self._lazy and not draw.pairs
        placed = tuple(self._placed(rank, own, lazy) for rank, own in zip(group, ranks, strict=True))
        if op not in ("messages", "batch") and self._random.random() < 0.05:
            common = {**common, "tag": self._random.choice("ab")}
        return Step(op, group, common, placed)

    def _placed(self, rank: int, arguments: dict[str, Any], lazy: bool) -> dict[str, Any]:
        names = list(arguments)
        ground = self._grounds[rank]
        ground.random.shuffle(names)  # any may lie over any
        placed = {name: ground.place(arguments[name], aliasing=self._aliasing, lazy=lazy) for name in names}
        return {name: placed[name] for name in arguments}

    def _messages(self, op: str, group: tuple[int, ...], draw: Draw) -> Step:
        conflict = self._aliasing if op == "batch" and self._random.random() < 0.3 else 0.0
        messages = []
        for _ in range(self._random.choice((1, 2, 2, 3, 4))):
            draw.dtype = draw.any_dtype()
            send, recv = message_slots(draw)
            src, dst = self._random.randrange(len(group)), self._random.randrange(len(group))
            lazy = self._lazy and not draw.pairs
            given = self._grounds[group[src]].place(send, aliasing=conflict, lazy=lazy)
            taken = self._grounds[group[dst]].place(recv, aliasing=conflict, lazy=lazy)
            anyone = self._features.anyone and self._random.random() < 0.1
            # of its own in the whole program: the messages of two steps may be under way together
            tag = next(self._tags) if anyone else self._random.choice((0, 0, 1, 7))
            messages.append(Message(src, dst, tag, given, taken, anyone))
        return Step(op, group, {}, tuple({} for _ in group), tuple(messages))
