"""Where in the memory of a rank tensors lie: apart from one another, or over one another in every way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from .arguments import Slot
from .program import Arena, View, torch_dtype
from .values import COMPLEX

LARGE = 1 << 14  # elements; larger views are without gaps, so that what they share is told by their ends
FAR = 64  # elements, that a view may begin behind another


class Ground:
    """The arenas of one rank while a program is made."""

    def __init__(self, random: Random, fill: str, seed: int) -> None:
        self.random = random
        self._fill, self._seed = fill, seed
        self._dtypes: list[str] = []
        self._ends: list[int] = []  # bytes in use
        self._placed: list[View] = []  # by all operations
        self._latest: list[View] = []  # by the one under way

    def arenas(self) -> tuple[Arena, ...]:
        made = []
        for number, (dtype, end) in enumerate(zip(self._dtypes, self._ends, strict=True)):
            numel = -(-end // torch_dtype(dtype).itemsize) + self.random.randrange(3)
            made.append(Arena(dtype, numel, self._fill, self._seed + number))
        return tuple(made)

    def begin(self) -> None:
        """The next operation."""
        self._placed += self._latest
        self._latest = []

    def place(self, value: Any, *, aliasing: float, lazy: bool) -> Any:
        """The argument with its slots placed.

        Args:
            aliasing: how probable it is for a tensor to lie over others of the same call.
            lazy: it may be conjugated or negated lazily.
        """
        if isinstance(value, Slot):
            view = self._over(value) if self.random.random() < aliasing else self._apart(value)
            view = self._lazy(view) if lazy else view
            self._latest.append(view)
            self._reach(view)
            return view
        if isinstance(value, Mapping):
            return {key: self.place(item, aliasing=aliasing, lazy=lazy) for key, item in value.items()}
        if isinstance(value, list):
            return [self.place(item, aliasing=aliasing, lazy=lazy) for item in value]
        return value

    def _lazy(self, view: View) -> View:
        if view.dtype in COMPLEX and self.random.random() < 0.1:
            return _changed(view, conj=True)
        if view.dtype in ("float32", "float64") and self.random.random() < 0.03:
            return _changed(view, neg=True)
        return view

    def _reach(self, view: View) -> None:
        self._ends[view.arena] = max(self._ends[view.arena], view.span[1])

    def _arena_for(self, dtype: str) -> int:
        """An arena that views of ``dtype`` may have, perhaps a new one."""
        fit = [i for i, name in enumerate(self._dtypes) if name == dtype]
        if fit and self.random.random() < 0.8:
            return self.random.choice(fit)
        self._dtypes.append(dtype)
        self._ends.append(0)
        return len(self._dtypes) - 1

    # -- apart --------------------------------------------------------------------------------------------------------

    def _apart(self, slot: Slot) -> View:
        again = [v for v in self._placed if v.dtype == slot.dtype and v.numel == slot.numel and self._is_free(v)]
        if again and self.random.random() < 0.3:  # where another operation has worked
            view = self.random.choice(again)
            if view.shape == slot.shape:
                return _changed(view)
        arena = self._arena_for(slot.dtype)
        offset = -(-self._ends[arena] // torch_dtype(slot.dtype).itemsize) + self.random.choice((0, 0, 1, 3))
        return View(arena, offset, slot.shape, self._strides(slot), slot.dtype)

    def _is_free(self, view: View) -> bool:
        start, end = view.span
        return all(v.arena != view.arena or v.span[0] >= end or start >= v.span[1] for v in self._latest) and (
            all(s or n == 1 for n, s in zip(view.shape, view.strides, strict=True))
        )

    def _strides(self, slot: Slot) -> tuple[int, ...]:
        """Without two indices of one place, unless it is only read."""
        order = list(range(len(slot.shape)))
        kind = self.random.random() if slot.numel <= LARGE else 0.0
        if kind > 0.6 and kind < 0.75:
            self.random.shuffle(order)
        step = self.random.choice((2, 3)) if kind >= 0.75 and kind < 0.9 else 1
        strides = [0] * len(order)
        for dim in reversed(order):
            strides[dim] = step
            step *= max(1, slot.shape[dim])
            if kind >= 0.9 and self.random.random() < 0.5:
                step += self.random.randrange(1, 3)
        if order and not slot.written and slot.numel <= LARGE and self.random.random() < 0.06:
            strides[self.random.choice(order)] = 0
        return tuple(strides)

    # -- over one another ---------------------------------------------------------------------------------------------

    def _over(self, slot: Slot) -> View:
        """Over something that is there already."""
        others = [v for v in self._latest or self._placed if _go_together(v.dtype, slot.dtype)]
        if not others:
            return self._apart(slot)
        other = self.random.choice(others)
        ways: list[Callable[[Slot, View], View]] = [self._same, self._shifted, self._chunk, self._somewhere]
        if len(slot.shape) > 1 or self.random.random() < 0.06:
            ways.append(self._twisted)
        return self.random.choice(ways)(slot, other)

    def _at(self, slot: Slot, other: View, offset: int, strides: tuple[int, ...] | None = None) -> View:
        return View(other.arena, max(0, offset), slot.shape, strides or dense(slot.shape), slot.dtype)

    def _same(self, slot: Slot, other: View) -> View:
        """The very same elements."""
        if other.shape == slot.shape and other.dtype == slot.dtype and (not slot.written or _is_plain(other)):
            return _changed(other)
        return self._at(slot, other, _offset(other, slot.dtype))

    def _shifted(self, slot: Slot, other: View) -> View:
        far = max(1, min(FAR, slot.numel))
        offset = _offset(other, slot.dtype) + self.random.randrange(-far, far + 1)
        return self._at(slot, other, offset, self._strides(slot))

    def _chunk(self, slot: Slot, other: View) -> View:
        """A part of a larger one, or the larger one of which it is a part."""
        count = max(1, other.nbytes // max(1, slot.numel * torch_dtype(slot.dtype).itemsize))
        offset = _offset(other, slot.dtype)
        if count > 1:
            return self._at(slot, other, offset + self.random.randrange(count) * slot.numel)
        own = other.numel * self.random.randrange(4)
        return self._at(slot, other, offset - own if offset >= own else offset)

    def _somewhere(self, slot: Slot, other: View) -> View:
        start, end = (at // torch_dtype(slot.dtype).itemsize for at in other.span)
        return self._at(slot, other, self.random.randrange(start, end + 1), self._strides(slot))

    def _twisted(self, slot: Slot, other: View) -> View:
        """Transposed, or with several indices of one place: which can be read, but not written."""
        offset = _offset(other, slot.dtype)
        if slot.shape and slot.numel <= LARGE and self.random.random() < (0.1 if slot.written else 0.4):
            return self._at(slot, other, offset, tuple(self.random.choice((0, 1)) for _ in slot.shape))
        turned = dense(tuple(reversed(slot.shape)))
        return self._at(slot, other, offset, tuple(reversed(turned)))


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def _offset(view: View, dtype: str) -> int:
    return view.offset * view.itemsize // torch_dtype(dtype).itemsize


def _is_plain(view: View) -> bool:
    return all(stride for extent, stride in zip(view.shape, view.strides, strict=True) if extent > 1)


def _go_together(one: str, other: str) -> bool:
    """Whether both may have the same bytes: those of bools are only 0 and 1."""
    return one == other or "bool" not in (one, other)


def _changed(view: View, *, conj: bool = False, neg: bool = False) -> View:
    return View(view.arena, view.offset, view.shape, view.strides, view.dtype, conj, neg)
