"""The oracle: snapshots of all inputs, outputs in list order, what is refused, and how results are judged."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import torch

from .judging import judge_memory, judge_result
from .legality import MAY, MUST, normal
from .memory import Memory, overlaps_itself, share, touch
from .oracle import Result, expect
from .program import Arena, Message, Program, Step, View
from .reference import BOUNDED


def at(offset: int, *shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> View:
    dense = tuple(torch.empty(shape).stride())
    return View(0, offset, shape, dense if strides is None else strides, dtype)


def program(*steps: Step, numel: int = 4, size: int = 2, fill: str = "position") -> Program:
    return Program(((Arena("float32", numel, fill),),) * size, steps)


def step(op: str, common: dict[str, Any], *ranks: dict[str, Any], **more: Any) -> Step:
    return Step(op, tuple(range(len(ranks))), common, ranks, **more)


def memory_of(done: Program, rank: int) -> list[float]:
    arena = done.arenas[rank][0]
    return expect(done).memories[rank].arenas[0].view(torch.float32)[: arena.numel].tolist()


def test_the_content_of_two_ranks() -> None:
    assert memory_of(program(), 0) == [1.0, 6.0, 4.0, 2.0]
    assert memory_of(program(), 1) == [4.0, 2.0, 7.0, 5.0]


def test_all_reduce_reads_before_it_writes() -> None:
    shifted = {"tensor": at(0, 3), "out": at(1, 3)}
    done = program(step("all_reduce", {"op": "SUM"}, shifted, shifted))
    assert memory_of(done, 0) == [1.0, 5.0, 8.0, 11.0]
    assert memory_of(done, 1) == [4.0, 5.0, 8.0, 11.0]


def test_of_outputs_that_overlap_the_later_one_wins() -> None:
    own = {"tensor_list": [at(0, 2), at(1, 2)], "tensor": at(2, 2)}
    assert memory_of(program(step("all_gather", {}, own, own)), 0) == [4.0, 7.0, 5.0, 2.0]
    twice = {"tensors": [at(0, 2), at(0, 2)]}
    assert memory_of(program(step("all_reduce_coalesced", {"op": "SUM"}, twice, twice)), 0) == [5.0, 8.0, 4.0, 2.0]


def test_a_reduction_leaves_the_others_as_they_were() -> None:
    own = {"tensor": at(0, 4)}
    done = program(step("reduce", {"root": 1, "op": "MAX"}, own, own))
    assert memory_of(done, 0) == [1.0, 6.0, 4.0, 2.0]
    assert memory_of(done, 1) == [4.0, 6.0, 7.0, 5.0]


def test_steps_take_effect_one_after_the_other() -> None:
    first = step("broadcast", {"root": 0}, {"tensor": at(0, 2)}, {"tensor": at(0, 2)})
    second = step("broadcast", {"root": 1}, {"tensor": at(2, 2)}, {"tensor": at(0, 2)})
    done = program(first, second)
    assert memory_of(done, 0) == [1.0, 6.0, 1.0, 6.0]
    assert memory_of(done, 1) == [1.0, 6.0, 7.0, 5.0]


def test_rows_of_all_to_all_and_what_is_behind_them() -> None:
    sends = {"input_split_sizes": [1, 1], "output_split_sizes": [1, 1]}
    own = {"output": at(0, 3), "input": at(1, 3), **sends}
    assert memory_of(program(step("all_to_all_v_single", {}, own, own)), 0) == [6.0, 2.0, 4.0, 2.0]


def test_a_written_tensor_that_overlaps_itself_is_refused_where_it_is() -> None:
    folded = {"tensor": at(0, 3, strides=(0,))}
    done = program(step("all_reduce", {"op": "SUM"}, folded, {"tensor": at(0, 3)}))
    assert expect(done).refusals == {0: {0: MUST}}
    assert memory_of(done, 1) == memory_of(program(), 1)
    read = program(step("broadcast", {"root": 0}, folded, {"tensor": at(0, 3)}))
    assert expect(read).refusals == {}


def test_messages_of_one_batch_that_share_memory_are_refused() -> None:
    messages = (Message(0, 1, 0, at(0, 2), at(0, 2)), Message(1, 0, 0, at(2, 2), at(1, 2)))
    done = program(Step("batch", (0, 1), {}, ({}, {}), messages))
    assert expect(done).refusals == {0: {0: MUST}}
    assert normal(program(Step("messages", (0, 1), {}, ({}, {}), messages))).steps[0].op == "batch"


def test_lists_of_two_dtypes_in_one_place_may_be_refused() -> None:
    own = {"tensors": [at(0, 2), at(0, 2, dtype="int32")]}
    assert expect(program(step("all_reduce_coalesced", {"op": "SUM"}, own, own))).refusals == {0: {0: MAY, 1: MAY}}


def test_a_scope_in_which_ranks_share_memory_otherwise_is_taken_apart() -> None:
    a = step("all_reduce", {"op": "SUM"}, {"tensor": at(0, 2)}, {"tensor": at(0, 2)}, scope=1)
    b = step("all_reduce", {"op": "SUM"}, {"tensor": at(1, 2)}, {"tensor": at(2, 2)}, scope=1)
    assert [each.scope for each in normal(program(a, b)).steps] == [0, 0]
    assert [each.scope for each in normal(program(a, a)).steps] == [1, 1]


def test_operations_of_several_comms_that_share_memory_are_not_in_flight_together() -> None:
    """Those who await another comm's operation in between are other ranks."""
    own = {"tensor": at(0, 2)}
    first = replace(step("all_reduce", {"op": "SUM"}, own, own), issue="flight")
    between = Step("all_reduce", (1,), {"op": "SUM"}, ({"tensor": at(2, 2)},))
    last = Step("all_reduce", (0,), {"op": "SUM"}, (own,))
    assert [each.issue for each in normal(program(first, between, last)).steps] == ["await"] * 3
    apart = Step("all_reduce", (0,), {"op": "SUM"}, ({"tensor": at(2, 2)},))
    assert [each.issue for each in normal(program(first, between, apart)).steps] == ["flight", "await", "await"]


def test_wrong_bytes_are_told_with_the_step_that_should_have_written_them() -> None:
    own = {"tensor": at(0, 2)}
    done = program(step("all_reduce", {"op": "SUM"}, own, own))
    expectation = expect(done)
    memory = Memory(done.arenas[0], 0)
    memory.arenas[0].copy_(expectation.memories[0].arenas[0])
    assert judge_memory(expectation, memory, 0) == []
    memory.tensor(at(0, 1)).add_(1)
    memory.tensor(at(3, 1)).add_(1)
    found = judge_memory(expectation, memory, 0)
    assert [(each.kind, each.step) for each in found] == [("untouched", -1), ("wrong", 0)]


def test_what_has_play_is_compared_within_it() -> None:
    own = {"tensor": at(0, 4)}
    done = program(step("all_reduce", {"op": "SUM"}, own, own, own), size=3, fill="random")
    expectation = expect(done)
    margin = expectation.written[0].value.margin
    assert margin is not None
    assert (margin.kind == BOUNDED).all()
    memory = Memory(done.arenas[0], 0)
    memory.arenas[0].copy_(expectation.memories[0].arenas[0])
    memory.tensor(at(0, 1)).mul_(1 + 1e-7)
    assert judge_memory(expectation, memory, 0) == []
    memory.tensor(at(0, 1)).mul_(1.01)
    assert [each.kind for each in judge_memory(expectation, memory, 0)] == ["wrong"]


def test_results_are_the_arguments_or_what_was_made() -> None:
    own = {"tensor_list": None, "tensor": at(0, 2)}
    done = program(step("all_gather", {}, own, own))
    expected = expect(done).results[0, 0]
    right = [torch.tensor([1.0, 6.0]), torch.tensor([4.0, 2.0])]
    assert judge_result(0, 0, expected, {}, right) is None
    assert judge_result(0, 0, expected, {}, right[:1]) is not None
    assert judge_result(0, 0, expected, {}, [right[1], right[1]]) is not None
    given = torch.zeros(2)
    assert judge_result(0, 0, Result("tensor"), {"tensor": given}, given) is None
    assert judge_result(0, 0, Result("tensor"), {"tensor": given}, given.clone()) is not None


def places(view: View) -> set[int]:
    """All bytes of the arena that a view reaches."""
    found = {view.offset} if view.numel else set()
    for extent, stride in zip(view.shape, view.strides, strict=True):
        found = {start + i * stride for start in found for i in range(extent)}
    return {start * view.itemsize + byte for start in found for byte in range(view.itemsize)}


def test_views_share_memory_if_they_have_a_byte_in_common() -> None:
    random, seen = Random(0), set()

    def view() -> View:
        shape = tuple(random.randrange(5) for _ in range(random.randrange(4)))
        strides = tuple(random.randrange(9) for _ in shape)
        return View(0, random.randrange(20), shape, strides, random.choice(("int8", "int16", "float32", "complex64")))

    for _ in range(3000):
        one, other = view(), view()
        assert share(one, other) == share(other, one) == bool(places(one) & places(other)), (one, other)
        seen.add((touch(one, other), share(one, other)))
    assert seen == {(False, False), (True, False), (True, True)}


def test_large_views_share_memory() -> None:
    n = 1 << 20
    even, odd = at(0, n, strides=(2,)), at(1, n, strides=(2,))
    assert not share(even, odd)
    assert share(even, at(2 * n - 2, 1))
    assert not share(odd, at(2 * n - 2, 1))


def test_how_views_share_memory() -> None:
    even, odd = at(0, 4, strides=(2,)), at(1, 4, strides=(2,))
    assert touch(even, odd)
    assert not share(even, odd)
    assert share(even, at(2, 1))
    assert not touch(at(0, 2), at(2, 2))
    assert overlaps_itself(at(0, 2, 2, strides=(1, 1)))
    assert not overlaps_itself(at(0, 2, 2, strides=(1, 2)))
    assert not overlaps_itself(at(0, 0, 3, strides=(1, 0)))
