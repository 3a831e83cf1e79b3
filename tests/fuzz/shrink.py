"""From a program that fails to a small one that fails the same way: one change after the other, as long as it does.

Changes are made blindly; one that makes a call illegal makes the program fail in another way, and is not taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .effects import rows_for
from .layouts import dense
from .legality import normal
from .oracle import expect
from .program import Program, Step, View, mapped, torch_dtype, views_in, with_views
from .values import FILLS

Fails = Callable[[Program], bool]
SECONDS = 30.0  # for one program
_PLAIN_DTYPES = ("float32", "int32", "uint8")


def shrink(program: Program, fails: Fails, seconds: float = SECONDS) -> Program:
    """The smallest program found that fails; ``fails`` tells whether one does so in the way of the first."""
    deadline = time.monotonic() + seconds
    tried: set[str] = set()
    changed = True
    while changed and time.monotonic() < deadline:
        changed = False
        for candidates in _PASSES:
            better = _exhaust(program, candidates, fails, tried, deadline)
            changed = changed or better != program
            program = better
    return program


def _exhaust(
    program: Program,
    candidates: Callable[[Program], Iterator[Program]],
    fails: Fails,
    tried: set[str],
    deadline: float,
) -> Program:
    """Take what one pass has to offer, again and again from where something was taken."""
    taken = True
    while taken:
        taken = False
        for candidate in candidates(program):
            if time.monotonic() > deadline:
                return program
            if not _has_arenas(candidate):
                continue
            candidate = trimmed(normal(candidate))
            key = repr(candidate)
            if key in tried or candidate == program:
                continue
            tried.add(key)
            if _has_meaning(candidate) and fails(candidate):
                program, taken = candidate, True
                break
    return program


def _has_meaning(program: Program) -> bool:
    """Whether the oracle can make anything of it: a change may have left calls that do not fit together."""
    try:
        expect(program)
    except Exception:  # of torch's or Python's own, whatever does not fit
        return False
    return True


def trimmed(program: Program) -> Program:
    """Without the memory that no view needs."""
    used = [_used(program, rank) for rank in range(program.size)]
    numbers = [{arena: i for i, arena in enumerate(sorted(ends))} for ends in used]
    arenas = []
    for rank, ends in enumerate(used):
        own = []
        for arena, end in sorted(ends.items()):
            described = program.arenas[rank][arena]
            own.append(replace(described, numel=-(-end // torch_dtype(described.dtype).itemsize)))
        arenas.append(tuple(own))
    steps = [with_views(s, lambda rank, view: replace(view, arena=numbers[rank][view.arena])) for s in program.steps]
    return Program(tuple(arenas), tuple(steps))


def _has_arenas(program: Program) -> bool:
    return all(
        view.arena < len(program.arenas[rank])
        for step in program.steps
        for rank in step.group
        for view in views_of(step, rank)
    )


def _used(program: Program, rank: int) -> dict[int, int]:
    """The arenas of a rank that are used, and how many bytes of each."""
    ends: dict[int, int] = {}
    for step in program.steps:
        for view in views_of(step, rank):
            ends[view.arena] = max(ends.get(view.arena, 0), view.span[1])
    return ends


def views_of(step: Step, rank: int) -> list[View]:
    """Those of a rank of the world."""
    if rank not in step.group:
        return []
    member = step.group.index(rank)
    own = [m.send for m in step.messages if m.src == member] + [m.recv for m in step.messages if m.dst == member]
    return [*views_in(step.ranks[member]), *own] if step.ranks else own


def _with_step(program: Program, number: int, step: Step) -> Program:
    steps = [*program.steps]
    steps[number] = step
    return replace(program, steps=tuple(steps))


# -- fewer steps, ranks and messages ----------------------------------------------------------------------------------


def _fewer_steps(program: Program) -> Iterator[Program]:
    count = len(program.steps)
    for size in (count // 2, 1):
        for start in range(0, count, max(1, size)):
            steps = program.steps[:start] + program.steps[start + max(1, size) :]
            if steps:
                yield replace(program, steps=steps)


def _fewer_messages(program: Program) -> Iterator[Program]:
    for number, step in enumerate(program.steps):
        for i in range(len(step.messages) if len(step.messages) > 1 else 0):
            yield _with_step(program, number, replace(step, messages=step.messages[:i] + step.messages[i + 1 :]))


def _fewer_ranks(program: Program) -> Iterator[Program]:
    for gone in reversed(range(program.size if program.size > 1 else 0)):
        steps = [without_rank(step, gone) for step in program.steps]
        left = [step for step in steps if step is not None]
        if left:
            yield Program(program.arenas[:gone] + program.arenas[gone + 1 :], tuple(left))


def without_rank(step: Step, gone: int) -> Step | None:
    """The step in a world without a rank; None if nobody is left."""
    group = tuple(rank - (rank > gone) for rank in step.group if rank != gone)
    if gone not in step.group or not group:
        return replace(step, group=group) if group else None
    member = step.group.index(gone)
    size = len(step.group)
    common = {key: _without(key, value, member, size) for key, value in step.common.items()}
    if "root" in common:
        common["root"] = min(step.common["root"] - (step.common["root"] > member), len(group) - 1)
    ranks = tuple(
        {key: _narrowed(step, key, _without(key, value, member, size), member) for key, value in own.items()}
        for i, own in enumerate(step.ranks)
        if i != member
    )
    moved = [
        replace(m, src=m.src - (m.src > member), dst=m.dst - (m.dst > member))
        for m in step.messages
        if member not in (m.src, m.dst)
    ]
    if step.messages and not moved:
        return None
    return replace(step, group=group, common=common, ranks=ranks, messages=tuple(moved))


_BY_RANK = ("tensor_list", "input_list", "output_list", "output_lists", "sizes")
_BY_SIZES = ("output_split_sizes", "input_split_sizes")


def _without(key: str, value: Any, member: int, size: int) -> Any:
    if key in (*_BY_RANK, *_BY_SIZES) and isinstance(value, list) and len(value) == size:
        return value[:member] + value[member + 1 :]
    return value


# the tensors that have a share for each rank along dim 0
_SHARED = {
    "output": ("all_gather_single", "all_gather_v", "gather_single", "all_to_all_single"),
    "input": ("reduce_scatter_single", "reduce_scatter_v", "scatter_single", "all_to_all_single"),
    "outputs": ("all_gather_v_coalesced",),
    "inputs": ("reduce_scatter_coalesced", "reduce_scatter_v_coalesced"),
}


def _narrowed(step: Step, key: str, value: Any, member: int) -> Any:
    """A tensor without the share of a rank."""
    if step.op not in _SHARED.get(key, ()):
        return value

    def narrowed(view: View) -> View:
        if not view.shape:
            return view
        sizes = step.common.get("sizes")
        share = sizes[member] if sizes else view.shape[0] // len(step.group)
        shape = (max(0, view.shape[0] - share), *view.shape[1:])
        return replace(view, shape=shape)

    return mapped(value, narrowed)


def _fewer_in_lists(program: Program) -> Iterator[Program]:
    """Of the lists of the operations on lists."""
    for number, step in enumerate(program.steps):
        if not step.op.endswith("_coalesced"):
            continue
        count = max(len(value) for own in step.ranks for key, value in own.items() if key in ("tensors", "inputs"))
        for i in range(count if count > 1 else 0):
            ranks = tuple({key: _without_item(key, value, i) for key, value in own.items()} for own in step.ranks)
            yield _with_step(program, number, replace(step, ranks=ranks))


def _without_item(key: str, value: Any, i: int) -> Any:
    if not isinstance(value, list):
        return value
    if key == "output_lists":
        return [items[:i] + items[i + 1 :] for items in value]
    return value[:i] + value[i + 1 :]


# -- plainer calls ----------------------------------------------------------------------------------------------------


def _plainer_issue(program: Program) -> Iterator[Program]:
    yield replace(program, steps=tuple(replace(step, scope=0, issue="await") for step in program.steps))
    for number, step in enumerate(program.steps):
        yield _with_step(program, number, replace(step, scope=0, issue="await"))
        if step.issue != "await":
            yield _with_step(program, number, replace(step, issue="flight"))
        for key in ("tag", "scope"):
            if key in step.common:
                common = {name: value for name, value in step.common.items() if name != key}
                yield _with_step(program, number, replace(step, common=common))


def _plainer_arguments(program: Program) -> Iterator[Program]:
    for number, step in enumerate(program.steps):
        for change in ({"op": "SUM"}, {"root": 0}, {"dim": 0}):
            if step.common.keys() >= change.keys():
                yield _with_step(program, number, replace(step, common={**step.common, **change}))
        for key in {key for own in step.ranks for key, value in own.items() if value is not None}:
            yield _with_step(program, number, replace(step, ranks=tuple({**own, key: None} for own in step.ranks)))
        for i, own in enumerate(step.ranks):
            for key in own:
                ranks = (*step.ranks[:i], {**own, key: None}, *step.ranks[i + 1 :])
                yield _with_step(program, number, replace(step, ranks=ranks))


# -- smaller and plainer tensors --------------------------------------------------------------------------------------


def _smaller(program: Program) -> Iterator[Program]:
    """Replace an extent, with all that are multiples of it, and sums of sizes."""
    for number, step in enumerate(program.steps):
        extents = {n for rank in step.group for view in views_of(step, rank) for n in view.shape if n > 1}
        extents |= {n for value in _sizes(step) for n in value if n > 0}
        for extent in sorted(extents, reverse=True):
            for smaller in sorted({0, 1, 2, 3, extent // 2, extent - 1}):
                if smaller < extent:
                    yield _with_step(program, number, _resized(step, extent, smaller))


def _sizes(step: Step) -> list[Sequence[int]]:
    values = [step.common.get("sizes"), *(own.get(key) for own in step.ranks for key in _BY_SIZES)]
    if step.op in ("all_gather_v", "all_gather_v_coalesced"):  # sizes may be exchanged
        inputs = [list(views_in(own.get("input", own.get("inputs")))) for own in step.ranks]
        values.append([views[0].shape[step.common["dim"]] for views in inputs])
    if step.op == "all_to_all_v_single":
        sends = [rows_for(own, len(step.ranks)) for own in step.ranks]
        values += zip(*sends, strict=True)
    return [value for value in values if value]


def _resized(step: Step, extent: int, smaller: int) -> Step:
    by = {k * extent: k * smaller for k in range(1, len(step.group) + 1)}
    for sizes in _sizes(step):
        by[sum(sizes)] = sum(smaller if n == extent else n for n in sizes)
    by[extent] = smaller

    def resized(view: View) -> View:
        shape = tuple(by.get(n, n) for n in view.shape)
        plain = view.strides == dense(view.shape)
        offset = by.get(view.offset, view.offset) if extent > 1 else view.offset
        return replace(view, shape=shape, strides=dense(shape) if plain else view.strides, offset=offset)

    def counted(value: Any) -> Any:
        return [smaller if n == extent else n for n in value] if value else value

    step = with_views(step, lambda rank, view: resized(view))
    ranks = tuple({k: counted(v) if k in _BY_SIZES else v for k, v in own.items()} for own in step.ranks)
    common: Mapping[str, Any] = {k: counted(v) if k == "sizes" else v for k, v in step.common.items()}
    return replace(step, ranks=ranks, common=common)


def _plain_views(program: Program) -> Iterator[Program]:
    """Whole steps at once, then view by view."""
    for number, step in enumerate(program.steps):
        for change in _CHANGES:
            yield _with_step(program, number, with_views(step, lambda rank, view, change=change: change(view)))
        for target in {view for rank in step.group for view in views_of(step, rank)}:
            for change in _CHANGES:
                yield _with_step(
                    program,
                    number,
                    with_views(step, lambda rank, view, t=target, c=change: c(view) if view == t else view),
                )


def _same_on_all_ranks(program: Program) -> Iterator[Program]:
    """The layout of one rank on all."""
    for rank in range(program.size):
        steps = []
        for step in program.steps:
            alike = step.ranks and rank in step.group and "root" not in step.common
            own = step.ranks[step.group.index(rank)] if alike else None
            steps.append(step if own is None else replace(step, ranks=(own,) * len(step.group)))
        yield Program((program.arenas[rank],) * program.size, tuple(steps))


_CHANGES: tuple[Callable[[View], View], ...] = (
    lambda view: replace(view, conj=False, neg=False),
    lambda view: replace(view, strides=dense(view.shape)),
    lambda view: replace(view, shape=(view.numel,), strides=(1,)),
    lambda view: replace(view, offset=0),
    lambda view: replace(view, offset=view.offset // 2),
    lambda view: replace(view, offset=max(0, view.offset - 1)),
)


def _nearer(program: Program) -> Iterator[Program]:
    """Move all views of an arena towards its start, as one."""
    for rank in range(program.size):
        for arena in range(len(program.arenas[rank])):
            views = [v for step in program.steps for v in views_of(step, rank) if v.arena == arena]
            starts = {view.offset * view.itemsize for view in views}
            by = min(starts, default=0) // 16 * 16 or min(starts, default=0)
            if not by or any(by % view.itemsize for view in views):
                continue

            def moved(r: int, view: View, rank: int = rank, arena: int = arena, by: int = by) -> View:
                mine = r == rank and view.arena == arena
                return replace(view, offset=view.offset - by // view.itemsize) if mine else view

            yield replace(program, steps=tuple(with_views(step, moved) for step in program.steps))


def _plainer_content(program: Program) -> Iterator[Program]:
    fills = {arena.fill for arenas in program.arenas for arena in arenas}
    for fill in FILLS[: max((FILLS.index(f) for f in fills), default=0)]:
        yield replace(
            program, arenas=tuple(tuple(replace(a, fill=fill, seed=0) for a in own) for own in program.arenas)
        )
    yield replace(program, arenas=tuple(tuple(replace(a, seed=0) for a in own) for own in program.arenas))


def _plainer_dtypes(program: Program) -> Iterator[Program]:
    views = {view.dtype for step in program.steps for rank in step.group for view in views_of(step, rank)}
    names = views | {arena.dtype for arenas in program.arenas for arena in arenas}
    for name in sorted(names - {"float32"}):
        for plain in _PLAIN_DTYPES[: _PLAIN_DTYPES.index(name) if name in _PLAIN_DTYPES else None]:
            arenas = tuple(
                tuple(replace(a, dtype=plain) if a.dtype == name else a for a in own) for own in program.arenas
            )
            steps = tuple(
                with_views(s, lambda r, v, n=name, p=plain: replace(v, dtype=p, conj=False) if v.dtype == n else v)
                for s in program.steps
            )
            yield Program(arenas, steps)


_PASSES: tuple[Callable[[Program], Iterator[Program]], ...] = (
    _fewer_steps,
    _fewer_messages,
    _plainer_issue,
    _fewer_in_lists,
    _fewer_ranks,
    _plainer_arguments,
    _smaller,
    _plain_views,
    _nearer,
    _same_on_all_ranks,
    _plainer_dtypes,
    _plainer_content,
)
