"""Agreed ordering without a loop: every interleaving ends in one order, and nothing is believed, kept or scanned."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.batching.ordering.codec import MAX_TAG, MAX_TEXT, MessageWriter, Mismatch, OrderMessageError
from asynccomm.batching.ordering.protocol import Announcer, OrderCoordinator
from tests.cases import cases
from tests.sampling import examples

Item = tuple[str, int]  # tag, and the how-manieth under it


class World:
    """All ranks and the messages between them."""

    def __init__(self, size: int, max_ops: int | None = None, max_bytes: int | None = None, **capacity: int) -> None:
        self.size = size
        self.announcers = [Announcer[Item](**capacity) for _ in range(size)]
        self.coordinator = OrderCoordinator(size, max_ops, max_bytes, **capacity)
        self.up: list[deque[bytes]] = [deque() for _ in range(size)]
        self.down: list[deque[bytes]] = [deque() for _ in range(size)]
        self.heard: list[list[list[Item]]] = [[] for _ in range(size)]
        self.issued = [Counter[str]() for _ in range(size)]
        self.sent: list[bytes] = []  # every message

    def issue(self, rank: int, tag: str, kind: int = 0, nbytes: int = 8) -> None:
        item = (tag, self.issued[rank][tag])
        self.issued[rank][tag] += 1
        self.announcers[rank].issue(tag, (kind, kind + 1), f"op {kind}", nbytes, item)

    def announce(self, rank: int) -> None:
        if (message := self.announcers[rank].message()) is not None:
            self.up[rank].append(message)
            self.sent.append(message)

    def reach(self, rank: int) -> None:
        """One message of ``rank`` reaches the council."""
        if self.up[rank]:
            self.coordinator.hear(rank, self.up[rank].popleft())

    def decide(self) -> None:
        if (message := self.coordinator.message()) is not None:
            self.sent.append(message)
            for queue in self.down:
                queue.append(message)

    def hear(self, rank: int) -> None:
        """One message of the council reaches ``rank``."""
        if self.down[rank]:
            self.heard[rank] += self.announcers[rank].hear(self.down[rank].popleft())

    def step(self, number: int) -> None:
        """Any one thing that may happen next."""
        do = (self.announce, self.reach, self.hear, lambda _: self.decide())[number % 4]
        do(number // 4 % self.size)

    def settle(self, *silent: int) -> None:
        """Carry messages until there are none; those of ``silent`` ranks stay where they are."""
        while True:
            before = len(self.sent)
            for rank in set(range(self.size)) - set(silent):
                self.announce(rank)
                while self.up[rank]:
                    self.reach(rank)
            self.decide()
            for rank in range(self.size):
                while self.down[rank]:
                    self.hear(rank)
            if len(self.sent) == before:
                return


Task = list[tuple[str, int]]  # tags and kinds, in order
steps = st.integers(0, 4 * 6 - 1)


@st.composite
def programs(draw: st.DrawFn) -> list[Task]:
    """Tasks whose operations fit together in whatever order each rank runs them: a tag is one task's, or one kind's."""
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, 4))):
        tags = [f"{number}a", f"{number}b", *([""] if number == 0 else [])]
        own = st.tuples(st.sampled_from(tags), st.integers(0, 2))
        shared = st.sampled_from([("shared", 7), ("other", 8)])
        tasks.append(draw(st.lists(st.one_of(own, shared), max_size=8)))
    return tasks


def interleaved(tasks: list[Task], rnd: random.Random) -> Task:
    left = [deque(task) for task in tasks if task]
    order = []
    while left:
        task = rnd.choice(left)
        order.append(task.popleft())
        left = [task for task in left if task]
    return order


@examples(300, 30)
@given(
    programs(),
    st.integers(1, 6),
    st.sampled_from([1, 2, 3, 5, 8, 4096]),
    st.one_of(st.none(), st.integers(1, 4)),
    st.randoms(use_true_random=False),
    st.lists(steps, max_size=80),
    st.integers(1, 4),
)
def test_all_ranks_hear_everything_in_one_order(
    tasks: list[Task],
    size: int,
    capacity: int,
    max_ops: int | None,
    rnd: random.Random,
    schedule: list[int],
    repeats: int,
) -> None:
    world = World(size, max_ops, capacity=capacity)
    programs = [deque(op for _ in range(repeats) for op in interleaved(tasks, rnd)) for _ in range(size)]
    for number in schedule:
        if programs[rank := rnd.randrange(size)]:
            world.issue(rank, *programs[rank].popleft())
        world.step(number)
    for rank, program in enumerate(programs):
        for tag, kind in program:
            world.issue(rank, tag, kind)
            world.step(rnd.randrange(4 * size))
    world.settle()

    first = world.heard[0]
    assert all(batches == first for batches in world.heard)
    assert all(0 < len(batch) <= (max_ops or len(batch)) for batch in first)
    heard = [item for batch in first for item in batch]
    assert sorted(heard) == sorted((tag, i) for tag, count in world.issued[0].items() for i in range(count))
    for tag, count in world.issued[0].items():
        assert [item for item in heard if item[0] == tag] == [(tag, i) for i in range(count)]
        assert not any(announcer.outstanding(tag) for announcer in world.announcers)


def test_ready_operations_keep_the_order_in_which_they_became_ready() -> None:
    world = World(3)
    for rank, order in enumerate(["abcd", "dcba", "badc"]):
        for tag in order:
            world.issue(rank, tag)
        world.announce(rank)
    for rank in (1, 2, 0):
        world.reach(rank)
    world.settle()
    assert world.heard == [[[(tag, 0) for tag in "abcd"]]] * 3


@given(
    st.integers(2, 6),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=12),
    st.integers(0, 5),
    st.lists(steps, max_size=40),
)
def test_an_operation_that_some_ranks_never_issue_blocks_nothing_else(
    size: int, tags: list[str], absent: int, schedule: list[int]
) -> None:
    world = World(size)
    absent %= size
    numbers = iter(schedule)
    for rank in range(size):
        for tag in ["late", *tags, "late"] if rank != absent else tags:
            world.issue(rank, tag)
            world.step(next(numbers, 0))
    world.settle()
    expected = sorted((tag, i) for tag, count in Counter(tags).items() for i in range(count))
    assert all(sorted(item for batch in batches for item in batch) == expected for batches in world.heard)
    assert [announcer.outstanding("late") for announcer in world.announcers] == [
        2 * (rank != absent) for rank in range(size)
    ]
    world.issue(absent, "late")
    world.settle()
    assert all(batches[-1] == [("late", 0)] for batches in world.heard)
    assert [announcer.outstanding("late") for announcer in world.announcers] == [rank != absent for rank in range(size)]


def test_what_was_never_issued_is_outstanding_nowhere() -> None:
    world = World(2)
    assert world.announcers[0].outstanding("nobody's") == 0
    assert world.announcers[0].message() is None
    assert world.coordinator.message() is None


@given(
    st.integers(2, 6),
    st.integers(1, 6),
    st.data(),
    st.lists(steps, max_size=60),
    st.booleans(),
)
def test_a_mismatch_is_named_on_every_rank(
    size: int, count: int, data: st.DataObject, schedule: list[int], known: bool
) -> None:
    odd = data.draw(st.integers(0, size - 1), label="odd rank")
    wrong = data.draw(st.integers(0, count - 1), label="wrong operation")
    world = World(size)
    if known:
        for rank in range(size):
            world.issue(rank, "a")
        world.settle()
    reports: dict[int, Mismatch] = {}
    for rank in range(size):
        for i in range(count):
            world.issue(rank, "a", kind=5 if (rank, i) == (odd, wrong) else 0)
    for number in schedule:
        if number % 4 != 2:  # that is heard below
            world.step(number)
    for rank in range(size):
        world.announce(rank)
        while world.up[rank]:
            world.reach(rank)
    world.decide()
    for rank, queue in enumerate(world.down):
        while queue:
            try:
                world.hear(rank)
            except Mismatch as found:
                reports[rank] = found
                assert not queue
    assert sorted(reports) == list(range(size))
    assert len({found.args for found in reports.values()}) == 1
    found = reports[0]
    assert found.tag == "a"
    assert {(found.rank, found.text), (found.other_rank, found.other_text)} > {(odd, "op 5")}
    assert {found.text, found.other_text} == {"op 0", "op 5"}
    assert found.rank != found.other_rank


def test_a_mismatch_is_found_by_the_second_rank_and_ends_everything() -> None:
    world = World(5)
    for rank in range(5):
        world.issue(rank, "ready before")
        world.announce(rank)
        world.reach(rank)
    world.issue(3, "x", kind=1)
    world.issue(1, "x", kind=2)
    for rank in (3, 1):
        world.announce(rank)
        world.reach(rank)
    message = world.coordinator.message()
    assert message is not None
    with pytest.raises(Mismatch) as caught:
        world.announcers[4].hear(message)
    assert caught.value.args == ("x", 3, "op 1", 1, "op 2")
    for rank in range(5):
        world.issue(rank, "later")
        world.announce(rank)
        world.reach(rank)
    assert world.coordinator.message() is None


def test_operations_of_one_tag_may_differ_from_each_other() -> None:
    world = World(3)
    for _ in range(3):  # announced in full, then by ids
        for kind in (1, 2, 1, 3):
            for rank in range(3):
                world.issue(rank, "", kind)
        world.settle()
    assert world.heard[0] == [[("", 4 * i + j) for j in range(4)] for i in range(3)]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.one_of(st.none(), st.integers(1, 5)),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_batches_are_full_and_not_too_full(sizes: list[int], max_ops: int | None, max_bytes: int | None) -> None:
    world = World(2, max_ops, max_bytes)
    for rank, order in ((0, sizes), (1, sizes)):
        for i, nbytes in enumerate(order):
            world.issue(rank, str(i), nbytes=nbytes)
    world.settle()
    batches = [[sizes[int(tag)] for tag, _ in batch] for batch in world.heard[1]]
    assert [nbytes for batch in batches for nbytes in batch] == sizes
    for batch in batches:
        assert len(batch) <= (max_ops or len(batch))
        assert len(batch) == 1 or sum(batch) <= (max_bytes or sum(batch))
    for batch, after in itertools.pairwise(batches):  # nothing was cut without need
        assert len(batch) == max_ops or (max_bytes is not None and sum(batch) + after[0] > max_bytes)


def test_bytes_count_where_they_are_most() -> None:
    world = World(3, max_bytes=100)
    for _ in range(3):  # of the later rounds all are known
        for tag in "ab":
            for rank, nbytes in enumerate((20, 60, 20)):
                world.issue(rank, tag, nbytes=nbytes)
        world.settle()
    assert [len(batch) for batch in world.heard[2]] == [1] * 6
    assert max(map(len, world.sent[-4:])) <= 3


def test_a_steady_state_round_is_one_small_message_each_way() -> None:
    world = World(4)
    tags = [f"layer{i}.weight" for i in range(50)]
    rnd = random.Random(0)
    for _ in range(5):
        world.sent.clear()
        for rank in range(4):
            for tag in rnd.sample(tags, 50):
                world.issue(rank, tag)
        world.settle()
    assert len(world.sent) == 4 + 1
    assert max(map(len, world.sent)) <= 52
    world.sent.clear()
    for rank in range(4):
        for tag in tags:
            world.issue(rank, tag)
    world.settle()
    assert len(world.sent) == 5
    assert max(map(len, world.sent)) <= 52


def test_another_kind_under_a_known_tag_is_told_in_full_once() -> None:
    world = World(2)
    lengths = []
    for kind in (1, 1, 2, 2, 1):
        world.sent.clear()
        for rank in range(2):
            world.issue(rank, "tag", kind)
        world.settle()
        lengths.append([len(message) for message in world.sent])
    full, known = [27, 27, 5], [1, 1, 1]
    assert lengths == [full, known, full, known, known]


def test_an_id_that_the_council_may_have_forgotten_is_not_used() -> None:
    def announcement(unheard: int) -> bytes:
        """Rank 1's of an operation that has an id, when it waits for that many decisions; they all evict."""
        world = World(2, capacity=4)
        for rank in range(2):
            world.issue(rank, "hot")
        world.settle()
        for i in range(unheard):
            for rank in range(2):
                world.issue(rank, f"new {i}")
                world.announce(rank)
                world.reach(rank)
            world.decide()
        world.issue(1, "hot")
        world.announce(1)
        message = world.up[1][0]
        world.issue(0, "hot")
        world.settle()
        assert world.heard[0] == world.heard[1]
        assert world.heard[0][-1] == [("hot", 1)]
        return message

    assert [len(announcement(unheard)) for unheard in range(6)] == [1, 1, 1, 1, 27, 27]


def test_an_id_that_the_council_still_has_is_kept_by_an_announcement_in_full() -> None:
    world = World(2, capacity=4)
    for rank in range(2):
        for _ in range(9):  # announced before the first decision is heard
            world.issue(rank, "hot")
    world.settle()
    for rank in range(2):
        world.issue(rank, "other")
    world.settle()
    world.sent.clear()
    for rank in range(2):
        world.issue(rank, "hot")
    world.settle()
    assert [len(message) for message in world.sent] == [1, 1, 1]


def reachable(root: object) -> int:
    """Containers and objects that ``root`` keeps, classes and modules aside."""
    seen: dict[int, object] = {id(root): root}
    todo = [root]
    while todo:
        for other in gc.get_referents(todo.pop()):
            if id(other) not in seen and not isinstance(other, type) and type(other).__name__ != "module":
                seen[id(other)] = other
                todo.append(other)
    return len(seen)


def test_ever_new_tags_need_no_more_memory_than_the_known_operations() -> None:
    world = World(3, capacity=20)

    def serve(start: int) -> list[int]:
        for i in range(start, start + 100):
            for rank in range(3):
                world.issue(rank, f"request-{i}", kind=i)
                world.issue(rank, "step")
            world.settle()
        world.issued.clear()
        world.issued += [Counter() for _ in range(3)]
        return [reachable(world.coordinator), *map(reachable, world.announcers)]

    first = serve(1_000)
    assert serve(2_000) == first
    assert max(first) < 20 * 10 + 50
    world.sent.clear()
    for rank in range(3):
        world.issue(rank, "step")
    world.settle()
    assert max(map(len, world.sent)) <= 3


def test_a_text_is_no_reason_to_keep_much() -> None:
    world = World(2)
    for rank in range(2):
        world.announcers[rank].issue("tag", (1, 2), "x" * 1_000_000, 8, ("tag", 0))
    world.settle()
    assert max(map(len, world.sent)) < MAX_TEXT + 100
    assert world.heard == [[[("tag", 0)]]] * 2


def test_a_tag_that_cannot_be_sent_is_refused_when_it_is_issued() -> None:
    announcer = Announcer[None]()
    for tag in ("x" * (MAX_TAG + 1), "\ud800"):
        with pytest.raises(ValueError):
            announcer.issue(tag, (1, 2), "op", 8, None)
        assert announcer.outstanding(tag) == 0
    assert announcer.message() is None


def decision(*tokens: int | str) -> bytes:
    writer = MessageWriter()
    for token in tokens:
        if token == "cut":
            writer.cut()
        elif isinstance(token, str):
            writer.decided(token)
        else:
            writer.known(token)
    return writer.written()


@cases(
    "message, text",
    [
        (b"", "a batch is empty"),
        (decision("cut"), "a batch is empty"),
        (decision("a", "cut"), "a batch is empty"),
        (decision("a", "cut", "cut", "a"), "a batch is empty"),
        (decision("b"), "it decides on 'b'"),
        (decision("a", "a", "a"), "it decides on 'a'"),
        (decision("not announced"), "it decides on 'not announced'"),
        (decision(1), "1 is no operation's id"),
        (decision(0, "known"), "it decides on 'known'"),
        (decision("a", 1, 2), "it decides on 'a'|2 is no operation's id"),
        (b"\x00\x05a", "cut off"),
    ],
)
def test_a_voice_believes_no_decision_on_what_it_has_not_announced(message: bytes, text: str) -> None:
    world = World(1)
    world.issue(0, "known")
    world.settle()
    for tag in ("known", "a", "a"):
        world.issue(0, tag)
    world.announce(0)
    world.issue(0, "not announced")
    with pytest.raises(OrderMessageError, match=text):
        world.announcers[0].hear(message)


@cases(
    "message, text",
    [
        (b"", "announces nothing"),
        (decision(0, 1), "1 is no operation's id"),
        (decision("cut"), "only the coordinator"),
        (b"\x03\x00\x00\x00\x00\x00", "only the coordinator"),
        (decision(0, "known"), "cut off"),
    ],
)
def test_a_council_takes_nothing_of_an_announcement_that_it_cannot_read(message: bytes, text: str) -> None:
    world = World(1)
    world.issue(0, "known")
    world.settle()
    with pytest.raises(OrderMessageError, match=text):
        world.coordinator.hear(0, message)
    assert world.coordinator.message() is None


@examples(200, 20)
@given(st.data(), st.lists(steps, max_size=40))
def test_damaged_messages_are_refused_or_understood(data: st.DataObject, schedule: list[int]) -> None:
    world = World(2, capacity=4)
    for number in schedule:
        world.issue(number % 2, "abc"[number % 3], kind=number % 3)
        world.step(number)
    message = bytearray(data.draw(st.sampled_from([*world.sent, b""]), label="message"))
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255)), max_size=3)):
        message[place : place + 1] = bytes([byte])
    message += data.draw(st.binary(max_size=8))
    for hear in (world.announcers[0].hear, lambda data: world.coordinator.hear(1, data)):
        with contextlib.suppress(OrderMessageError, Mismatch):
            hear(bytes(message))
    world.coordinator.message()


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python ``call`` takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # finalizers are lines, too
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def test_a_round_costs_what_is_new_in_it() -> None:
    def cost(waiting: int) -> int:
        """Of one operation on two ranks, where that many others wait, under tags of their own and under one."""
        world = World(2)
        for rank in range(2):
            world.issue(rank, "new")
        world.settle()
        for i in range(waiting):
            world.issue(0, str(i))
            world.issue(0, "")
        world.settle()

        def one_round() -> None:
            for rank in range(2):
                world.issue(rank, "new")
                world.announce(rank)
                world.reach(rank)
            world.decide()
            for rank in range(2):
                world.hear(rank)

        return lines_run(one_round)

    assert cost(2000) == cost(0)


def test_a_thousand_ranks() -> None:
    world = World(1000)
    tags = [f"layer{i}" for i in range(10)]
    rnd = random.Random(0)
    for _ in range(3):
        world.sent.clear()
        for rank in range(1000):
            for tag in rnd.sample(tags, len(tags)):
                world.issue(rank, tag)
        world.settle()
    assert len(world.sent) == 1000 + 1
    assert max(map(len, world.sent)) <= 10
    assert all(batches == world.heard[0] for batches in world.heard)
    assert [len(batch) for batch in world.heard[0]] == [10, 10, 10]
