"""Programs as data: the same after a trip through JSON, and the same for the same seed."""

from __future__ import annotations

import pytest

from .arguments_of_lists import ARGUMENTS
from .generate import PROFILES, Features, generate
from .legality import normal
from .program import Message, Program, Step, View, dumps, loads, views_in, with_views


@pytest.mark.parametrize("profile", PROFILES)
def test_a_program_comes_back_from_json_as_it_was(profile: str) -> None:
    for seed in range(60):
        program = generate(profile, 3, seed, Features(torch=True))
        assert loads(dumps(program)) == program


@pytest.mark.parametrize("profile", PROFILES)
def test_a_seed_gives_the_same_program_again_and_another_seed_another(profile: str) -> None:
    programs = [dumps(generate(profile, 2, seed, Features())) for seed in range(20)]
    assert programs == [dumps(generate(profile, 2, seed, Features())) for seed in range(20)]
    assert len(set(programs)) == 20


def test_every_operation_and_every_way_to_issue_it_is_drawn() -> None:
    programs = [generate("everything", 2, seed, Features(torch=True)) for seed in range(400)]
    steps = [step for program in programs for step in program.steps]
    assert {step.op for step in steps} == {*ARGUMENTS, "messages", "batch"}
    assert {step.issue for step in steps} == {"await", "flight", "thread", "wait", "torch"}
    assert any(step.scope for step in steps)
    assert any(step.group != (0, 1) for step in steps)


def test_what_is_generated_is_normal() -> None:
    for seed in range(100):
        program = generate("everything", 3, seed, Features(torch=True))
        assert normal(program) == program


def test_a_message_from_any_rank_has_a_tag_of_its_own() -> None:
    """Two that are under way at once could each take the other's."""
    found = 0
    for seed in (408, 582, 741, 772, 1202, 1386):  # which have several
        program = generate("everything", 3, seed, Features())
        tags = [message.tag for step in program.steps for message in step.messages if message.anyone]
        assert len(set(tags)) == len(tags)
        found += len(tags) > 1
    assert found


def test_views_are_found_and_changed_wherever_they_are() -> None:
    view = View(0, 2, (3,), (1,), "float32")
    message = Message(0, 1, 0, view, view)
    step = Step("gather", (0, 1), {}, ({"a": [view, {"b": view}], "n": 1}, {}), (message,))
    assert len(list(views_in(step.ranks[0]))) == 2
    moved = with_views(step, lambda rank, each: View(0, 10 + rank, each.shape, each.strides, each.dtype))
    assert [each.offset for each in views_in(moved.ranks[0])] == [10, 10]
    assert (moved.messages[0].send.offset, moved.messages[0].recv.offset) == (10, 11)
    assert moved.ranks[0]["n"] == 1


def test_a_view_knows_the_bytes_that_it_reaches() -> None:
    assert View(0, 3, (2, 3), (10, 2), "int16").span == (6, 6 + 2 * 15)
    assert View(0, 3, (0, 3), (3, 1), "int16").span == (6, 6)
    assert View(0, 0, (), (), "complex128").span == (0, 16)
    assert Program((), ()).size == 0
