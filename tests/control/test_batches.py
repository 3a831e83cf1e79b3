"""Messages of many ranks become few, and those of each rank keep their order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asynccomm.control.batches import BATCHED, batches, merge
from asynccomm.control.messages import ALL, ROOT, Departure, MessageBatch, News, Presence, Request, RoutedMessage
from asynccomm.control.runs import expand_ranks
from asynccomm.control.transport.schema import dumps


def closed(rank: int, number: int = 1, **more: Any) -> RoutedMessage:
    return RoutedMessage(ALL, rank, News("main", {"kind": "closed", **more}), number, patient=True)


def leaves(rank: int) -> RoutedMessage:
    return RoutedMessage(ALL, rank, Departure((rank,), ""), patient=True)


def of_each(messages: list[RoutedMessage]) -> dict[int, list[object]]:
    """What is said by, or about, each rank."""
    found: dict[int, list[object]] = {}
    for message in messages:
        if isinstance(message.body, Departure):
            for rank in expand_ranks(message.body.ranks):
                found.setdefault(rank, []).append("leaves")
        else:
            for source in message.sources:
                found.setdefault(source, []).append((message.number, dumps(message.body)))
    return found


def test_ten_thousand_ranks_close_and_leave_in_two_short_messages() -> None:
    (batch,) = batches([*map(closed, range(10_000)), *map(leaves, range(10_000))])
    assert isinstance(batch, MessageBatch)
    assert [message.sources for message in batch.messages] == [tuple(range(10_000)), (0,)]
    assert len(dumps(batch)) < 300


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["closed", "lost", "leaves"])), max_size=20))
def test_merged_messages_say_the_same_of_each_rank_in_the_same_order(said: list[tuple[int, str]]) -> None:
    numbers = dict.fromkeys(range(5), 0)
    messages = []
    gone: set[int] = set()
    for rank, what in said:
        if rank not in gone and what == "leaves":
            messages.append(leaves(rank))
            gone.add(rank)
        elif rank not in gone:
            numbers[rank] += 1
            messages.append(closed(rank, numbers[rank], **({"lost": 1} if what == "lost" else {})))
    assert of_each(merge(messages)) == of_each(messages)


def test_long_messages_stay_in_their_place() -> None:
    request = RoutedMessage(1, 0, Request("main", {}, 0))
    lost = RoutedMessage(ALL, 0, Departure((3,), "killed"))
    sent = [closed(1), closed(2), request, closed(3), lost, RoutedMessage(ROOT, 1, Presence()), leaves(1)]
    found = list(batches(sent))
    assert found == [closed(1).of([1, 2]), request, closed(3), lost, MessageBatch(sent[5:])]
    assert list(batches([])) == []


def test_a_batch_has_a_limit() -> None:
    found = list(batches([closed(rank, rank + 1) for rank in range(BATCHED + 1)]))
    assert [len(batch.messages) if isinstance(batch, MessageBatch) else 1 for batch in found] == [BATCHED, 1]
