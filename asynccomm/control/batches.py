"""Messages that a node sends at once: equal ones become one message, and short ones travel as one batch. Pure.

Usually all ranks close a comm, or leave, at about the same time. Their messages differ only by the source, or by the
rank that leaves, so the news of thousands of ranks are a few messages with lists of ranks (``runs``).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from asynccomm.control.messages import Departure, MessageBatch, News, Presence, RoutedMessage
from asynccomm.control.runs import compact_ranks, expand_ranks

BATCHED: Final = 2048  # messages in a batch at most: some 400 KB


def batches(messages: Sequence[RoutedMessage]) -> Iterator[RoutedMessage | MessageBatch]:
    """``messages``, those of each source in order; the short ones are merged, and in batches."""
    short: list[RoutedMessage] = []
    for message in messages:
        if message.patient or isinstance(message.body, Presence):
            short.append(message)
        else:
            yield from _cut(merge(short))
            short = []
            yield message
    yield from _cut(merge(short))


def _cut(messages: Sequence[RoutedMessage]) -> Iterator[RoutedMessage | MessageBatch]:
    for start in range(0, len(messages), BATCHED):
        some = list(messages[start : start + BATCHED])
        yield some[0] if len(some) == 1 else MessageBatch(some)


def merge(messages: Sequence[RoutedMessage]) -> list[RoutedMessage]:
    """``messages`` with equal ones as one, those of each source in order."""
    groups: list[list[RoutedMessage]] = []
    places: dict[Hashable, int] = {}  # of the group for each kind of message
    latest: dict[int, int] = {}  # of the last group with a message from, or about, each rank
    for message in messages:
        key, ranks = _kind(message), _concerned(message)
        place = places.get(key, -1)
        if place < 0 or max(map(latest.get, ranks, itertools.repeat(-1))) > place:
            place = places[key] = len(groups)
            groups.append([])
        groups[place].append(message)
        latest.update(dict.fromkeys(ranks, place))
    return [_merged(group) for group in groups]


def _concerned(message: RoutedMessage) -> tuple[int, ...]:
    about = expand_ranks(message.body.ranks) if isinstance(message.body, Departure) else ()
    return (*message.sources, *about)


def _kind(message: RoutedMessage) -> Hashable:
    """Equal for messages that can be one."""
    body = message.body
    if isinstance(body, Departure):
        return "departure", message.to, body.reason, message.held
    if isinstance(body, News) and message.number is not None:
        return body.comm, json.dumps(body.item, sort_keys=True), message.number, message.held
    return id(message)


def _merged(group: Sequence[RoutedMessage]) -> RoutedMessage:
    first = group[0]
    if len(group) == 1:
        return first
    if isinstance(first.body, Departure):
        bodies = [message.body for message in group if isinstance(message.body, Departure)]
        ranks = sorted({rank for body in bodies for rank in expand_ranks(body.ranks)})
        return replace(first, body=replace(first.body, ranks=compact_ranks(ranks)))
    return first.of(sorted({source for message in group for source in message.sources}))
