"""Which calls are refused, from their arguments alone; and programs in which nothing depends on how ranks are timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from .memory import overlaps_itself, share, touch
from .program import Program, Step, View, views_in

MUST, MAY = "must", "may"

_WRITTEN = ("out", "output", "outputs", "tensor_list", "output_list", "output_lists")
_READ = ("input", "inputs", "input_list", "obj", "tensor_dict")
# in which ranks have parts of their own, so that each is a batch by itself
_ALONE = ("reduce", "gather", "gather_single", "gather_v", "scatter", "scatter_single", "scatter_v", "all_to_all")


@dataclass(frozen=True, slots=True)
class Use:
    """A view that a call of one rank has."""

    view: View
    written: bool
    checked: bool  #: to be one that can be written, which it need not be
    touched: bool = True  #: False: only looked at


def uses(step: Step, rank: int) -> list[Use]:
    """The views in the calls of a rank of the group, those that are written in their order."""
    if step.messages:
        sent = [Use(m.send, False, False) for m in step.messages if m.src == rank]
        return [*sent, *(Use(m.recv, True, True) for m in step.messages if m.dst == rank)]
    found = []
    arguments = step.ranks[rank] if step.ranks else {}
    for name, value in arguments.items():
        views = list(views_in(value))
        if views:
            written, checked = _role(step, rank, name, arguments)
            found += [Use(view, written, checked, _is_touched(step, rank, name)) for view in views]
    return found


def _is_touched(step: Step, rank: int, name: str) -> bool:
    """Whether an argument of this name is used on a rank that is not the root."""
    root = step.common.get("root", rank)
    return rank == root or not (
        (step.op == "reduce" and name == "out") or (step.op.startswith("broadcast") and name in ("obj", "tensor_dict"))
    )


def _role(step: Step, rank: int, name: str, arguments: Mapping[str, Any]) -> tuple[bool, bool]:
    root = step.common.get("root", rank)
    if name in _READ:
        return False, False
    if name in _WRITTEN:
        return step.op != "reduce" or rank == root, True
    assert name in ("tensor", "tensors"), name
    if step.op in ("all_gather", "all_gather_coalesced") or arguments.get("out") is not None:
        return False, False
    written = rank != root if step.op.startswith("broadcast") else rank == root
    return written, written


def refusal(step: Step, rank: int) -> str | None:
    """Whether the call of a rank of the group is refused: MUST, MAY, or None."""
    found = uses(step, rank)
    if any(use.checked and overlaps_itself(use.view) for use in found):
        return MUST
    if step.op == "batch":
        return _conflict(_calls(step, rank))
    if step.op in ("all_reduce_coalesced", "reduce_scatter_coalesced", "reduce_scatter_v_coalesced"):
        return MAY if _groups_share(found) else None
    return None


def _groups_share(found: Sequence[Use]) -> bool:
    """Whether what goes as several operations, one for each dtype, depends on one another."""
    return any(
        one.view.dtype != other.view.dtype and touch(one.view, other.view)
        for one in found
        if one.written
        for other in found
    )


def _calls(step: Step, rank: int) -> list[list[Use]]:
    """Each call of a rank, by itself."""
    return [[use] for use in uses(step, rank)] if step.messages else [uses(step, rank)]


def _conflict(calls: Sequence[Sequence[Use]]) -> str | None:
    """Whether one writes what another touches: for certain, or as far as spans tell."""
    worst = None
    for i, one in enumerate(calls):
        for other in calls[:i]:
            for a in one:
                for b in other:
                    if (a.written or b.written) and a.touched and b.touched and touch(a.view, b.view):
                        if share(a.view, b.view):
                            return MUST
                        worst = MAY
    return worst


def refusal_of_scope(steps: Sequence[Step], rank: int) -> str | None:
    """Whether leaving a scope with these steps is refused, on a rank of the group."""
    worst = None
    messages: list[Sequence[Use]] = []
    others: list[Sequence[Use]] = []
    for step in steps:
        if _undivided(step, rank):
            worst = MAY
        for call in _calls(step, rank):
            against = [*messages, *others] if step.messages else messages
            for other in against:
                found = _conflict([other, call])
                if found == MUST:
                    return MUST
                worst = found or worst
            (messages if step.messages else others).append(call)
    return worst


def _undivided(step: Step, rank: int) -> bool:
    """Whether the tensor with the shares of all ranks is strided so that no share of it is a view."""
    name = {"all_gather_single": "output", "reduce_scatter_single": "input"}.get(step.op)
    view = step.ranks[rank].get(name) if name is not None and step.ranks else None
    if not isinstance(view, View) or not view.numel or len(step.group) == 1:
        return False
    plain, stride = True, 1
    for n, found in zip(reversed(view.shape), reversed(view.strides), strict=True):
        plain, stride = plain and (n == 1 or found == stride), stride * n
    return not plain and view.shape[0] % len(step.group) != 0


def runs(steps: Sequence[Step]) -> Iterator[tuple[int, Sequence[Step]]]:
    """The steps as they are done: each with the number of its first; those of one scope together."""
    start = 0
    for i in range(1, len(steps) + 1):
        if i == len(steps) or not steps[start].scope or steps[i].scope != steps[start].scope:
            yield start, steps[start:i]
            start = i


def refusal_of_run(steps: Sequence[Step], rank: int) -> str | None:
    """Of one of ``runs``, for a rank of the group."""
    return refusal_of_scope(steps, rank) if steps[0].scope else refusal(steps[0], rank)


# -- normal programs --------------------------------------------------------------------------------------------------


def normal(program: Program) -> Program:
    """The program with those steps awaited one by one that must not be under way together.

    Nothing is promised about messages, operations of several comms and threads that share memory while they are in
    flight; and scopes need operations that share memory alike on all ranks.
    """
    steps: list[Step] = []
    for _, group in runs(_sure([_in_order(step) for step in program.steps])):
        plain = not group[0].scope or _scope_is_plain(group)
        steps += group if plain else [_apart(step) for step in group]
    while (clash := _clash(steps)) is not None:
        early = steps[clash]
        if early.scope:
            steps = [_apart(each) if each.scope == early.scope else each for each in steps]
        else:
            steps[clash] = replace(early, issue="await")
    return replace(program, steps=tuple(_sure(steps)))


def _clash(steps: Sequence[Step]) -> int | None:
    """A step that is in flight on some rank when another is called there that must not overtake it."""
    in_flight: dict[int, set[int]] = {}  # by step: the ranks that have not awaited it
    for i, step in enumerate(steps):
        for j, ranks in in_flight.items():
            if not _may_overtake(steps[j], step, ranks):
                return j
        if step.issue in ("flight", "thread") or step.scope:
            in_flight[i] = {*step.group}
        else:  # its ranks await all that is in flight there
            in_flight = {j: ranks - {*step.group} for j, ranks in in_flight.items()}
    return None


def _in_order(step: Step) -> Step:
    """Messages that share memory only as a batch, which is refused then."""
    if step.op != "messages" or step.scope:
        return step
    alone = all(_conflict(_calls(step, rank)) is None for rank in range(len(step.group)))
    return step if alone else replace(step, op="batch")


def _sure(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps up to the first that is perhaps refused: what comes after would depend on it."""
    for number, group in runs(steps):
        if MAY in [refusal_of_run(group, rank) for rank in range(len(group[0].group))]:
            return steps[: number + len(group)]
    return steps


def _apart(step: Step) -> Step:
    return replace(step, scope=0, issue="await")


def _may_overtake(earlier: Step, later: Step, ranks: AbstractSet[int]) -> bool:
    """Whether both may be in flight: of one comm's collectives the order is kept, anything else must be apart.

    Args:
        ranks: those on which the earlier one is in flight.
    """
    ordered = not earlier.messages and not later.messages and earlier.group == later.group
    if earlier.scope and earlier.scope == later.scope:
        return True
    if ordered and "torch" not in (earlier.issue, later.issue):
        return True
    if any(refusal(step, i) for step in (earlier, later) for i in range(len(step.group))):
        return False
    for rank in ranks & {*later.group}:
        if _meets(uses(earlier, earlier.group.index(rank)), uses(later, later.group.index(rank))):
            return False
    return True


def _meets(uses: Sequence[Use], others: Sequence[Use]) -> bool:
    return any(
        (a.written or b.written) and a.touched and b.touched and touch(a.view, b.view) for a in uses for b in others
    )


def _scope_is_plain(steps: Sequence[Step]) -> bool:
    """Whether all ranks of a scope come to the same batches, and refuse it for certain or not at all."""
    first = steps[0]
    if any(step.group != first.group for step in steps):
        return False
    members = range(len(first.group))
    if any(refusal(step, rank) for step in steps for rank in members):
        return False
    refused = {refusal_of_scope(steps, rank) for rank in members}
    if MAY in refused or (MUST in refused and first.common.get("scope")):  # with limits, some has been sent by then
        return False
    joint = [step for step in steps if not step.messages and step.op not in _ALONE]
    patterns = {tuple(_pattern(joint, rank)) for rank in members}
    return len(patterns) == 1


def _pattern(steps: Sequence[Step], rank: int) -> Iterator[bool]:
    """Which of the steps share memory on a rank; a broadcast counts as writing on the root, too."""
    found = []
    for step in steps:
        everywhere = step.op.startswith("broadcast")
        found.append([replace(use, written=use.written or everywhere) for use in uses(step, rank)])
    for i, one in enumerate(found):
        for other in found[:i]:
            yield _conflict([one, other]) == MUST
