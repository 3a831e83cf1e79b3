"""Matching against a model that searches plain lists."""

from hypothesis import given
from hypothesis import strategies as st

from asynccomm.backends.matching import MatchQueues

SIZE = 3
steps = st.lists(
    st.tuples(
        st.sampled_from(["receive", "message"]), st.integers(0, SIZE - 1), st.sampled_from([None, 1]), st.integers(0, 2)
    ),
    max_size=60,
)


class Model:
    """Receives and messages in the order they came; the first that fits is taken."""

    def __init__(self) -> None:
        self.receives: list[tuple[int, int | None, int]] = []
        self.messages: list[tuple[int, int, int]] = []

    def receive(self, item: int, source: int | None, tag: int) -> tuple[int, int] | None:
        for i, (message, its_source, its_tag) in enumerate(self.messages):
            if its_tag == tag and source in (None, its_source):
                del self.messages[i]
                return its_source, message
        self.receives.append((item, source, tag))
        return None

    def message(self, item: int, source: int, tag: int) -> int | None:
        for i, (receive, its_source, its_tag) in enumerate(self.receives):
            if its_tag == tag and its_source in (None, source):
                del self.receives[i]
                return receive
        self.messages.append((item, source, tag))
        return None


@given(steps, st.sets(st.integers(0, 59)))
def test_first_come_first_served(steps: list[tuple[str, int, int | None, int]], elsewhere: set[int]) -> None:
    """Receives that are over elsewhere are as if never posted: ``take`` finds them to be so, or they are withdrawn."""
    matching: MatchQueues[int, int] = MatchQueues(SIZE, lambda item: item not in elsewhere)
    model = Model()
    for item, (what, rank, anybody, tag) in enumerate(steps):
        if what == "receive":
            source = None if anybody is None else rank
            if source is None and item in elsewhere:
                assert matching.post(item, None, tag) is None
                if item % 2:
                    matching.withdraw_one(item, tag)
                    assert not matching.withdraw_one(item, tag)
                continue
            assert matching.post(item, source, tag) == model.receive(item, source, tag)
        else:
            claimed = matching.claim(rank, tag)
            assert claimed == model.message(item, rank, tag)
            if claimed is None:
                matching.keep(item, rank, tag)
    for source in (None, *range(SIZE)):
        left = matching.withdraw(source)
        expected = [item for item, its_source, _ in model.receives if its_source == source]
        assert sorted(left if source is not None else set(left) - elsewhere) == expected
        assert matching.withdraw(source) == []


def test_forgotten_messages_are_not_matched() -> None:
    matching: MatchQueues[str, str] = MatchQueues(2)
    matching.keep("a", 0, 5)
    matching.keep("b", 1, 5)
    matching.forget(0)
    assert matching.post("r", None, 5) == (1, "b")
    assert matching.post("s", 0, 5) is None
    matching.clear()
    assert matching.claim(0, 5) is None


def test_queues_of_tags_that_are_done_with_are_removed() -> None:
    matching: MatchQueues[int, int] = MatchQueues(1)
    for tag in range(100):
        matching.keep(tag, 0, tag)
        assert matching.post(tag, 0, tag) == (0, tag)
        matching.post(tag, None, tag)
        assert matching.claim(0, tag) == tag
    assert not any([*matching._arrived, *matching._posted])


def test_unexpected_messages_are_listed() -> None:
    queues = MatchQueues[str, str](SIZE)
    for message, source, tag in (("a", 2, 0), ("b", 0, 1), ("c", 2, 0), ("d", 1, 1)):
        queues.keep(message, source, tag)
    assert queues.post("receive", 1, 1) == (1, "d")
    assert list(queues.kept()) == [(0, 1, "b"), (2, 0, "a"), (2, 0, "c")]


def test_the_next_receive_is_known_unless_one_from_any_source_is_posted() -> None:
    matching: MatchQueues[str, str] = MatchQueues(2)
    assert matching.next_receive(0, 5) is None
    for receive in "ab":
        matching.post(receive, 0, 5)
    assert [matching.next_receive(0, 5), matching.claim(0, 5), matching.next_receive(0, 5)] == ["a", "a", "b"]
    assert matching.next_receive(1, 5) is None
    matching.post("c", None, 5)
    assert matching.next_receive(0, 5) is None
    assert [matching.claim(0, 5), matching.next_receive(0, 5), matching.claim(1, 5)] == ["b", None, "c"]
