"""The messages between ranks: each is decoded as it was, and damage raises one error that names the field."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from asynccomm.control.membership.messages import (
    Commit,
    Excluded,
    Finalized,
    ParticipantState,
    Prepare,
    Rejected,
    Retry,
    StatusReport,
    View,
)
from asynccomm.control.messages import (
    Departure,
    DepartureAck,
    Heartbeat,
    IssuedCollectives,
    JobOverview,
    News,
    OrderMessage,
    ParticipantReport,
    Presence,
    RankAnswer,
    Reply,
    ReportRequest,
    Request,
    RoutedMessage,
)
from asynccomm.control.transport.connection import Hello, Look, Tokens, Welcome
from asynccomm.control.transport.schema import MessageError, decode, dumps, loads
from asynccomm.control.transport.topology import RankAddress
from asynccomm.rendezvous.lobby import Invitation
from tests.cases import cases
from tests.sampling import examples

VIEW = View("k", 0, 2, (3, "n", 0), {"host": "a", "ports": [1, 2]})
ORDERS = [
    Prepare(VIEW),
    Commit("k"),
    Retry("k", 3, "no route"),
    Finalized("k"),
    Rejected(1, "they differ", True),
    Excluded("late"),
]
BODIES: list[Any] = [
    Presence(),
    Heartbeat({3: 0.5}),
    Departure((1,), "killed"),
    DepartureAck(),
    News("main", {"kind": "abort"}),
    Request("main", {"what": "state"}, 3),
    Reply(3, {"op": "barrier()"}),
    IssuedCollectives("main", 2, [(0, 2**64 - 1, -(2**63), 1)]),
    ParticipantReport("main", [0, 1], StatusReport(ParticipantState.PREPARED, 1, (0, "n"), 2.5, VIEW)),
    ReportRequest("main"),
    *(OrderMessage("main", order) for order in ORDERS),
]
ADDRESS = RankAddress(3, "host", 77, "name", "fe80::1", 99)
MESSAGES: list[Any] = [
    *(RoutedMessage("all", 1, body, 7) for body in BODIES),
    *BODIES,
    Hello("token", "newcomer"),
    Look(True, [1]),
    Welcome("token", "lost"),
    RankAnswer(1, {"main": {"state": "open"}}),
    JobOverview({1: None, 2: 0.5}, {3: "killed"}, {1: "name"}),
    ADDRESS,
    Invitation("key", [0, 1], [ADDRESS], Tokens("a", "b"), "shm", ["shm"], "program"),
]
NAMES = sorted({name for message in MESSAGES for name in to_builtins(message)} | {"decision", "members", "attempt"})
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)


@cases("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_through(message: Any) -> None:
    assert loads(type(message), dumps(message)) == message


@cases("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_has_no_other_field_and_no_other_type(message: Any) -> None:
    data = to_builtins(message)
    with pytest.raises(MessageError, match="unknown field `other`"):
        decode(type(message), {**data, "other": 1})
    for name in data:
        with pytest.raises(MessageError, match=f"at `\\$.{name}`"):
            decode(type(message), {**data, name: b"no JSON value"} | ({name: 1.5} if data[name] == {} else {}))
    for other in (None, 1, "text", [data]):
        with pytest.raises(MessageError):
            decode(type(message), other)


def replaced(data: Any, path: list[int], value: Any) -> Any:
    """``data`` with ``value`` somewhere in it."""
    if not path or not isinstance(data, (dict, list, tuple)) or not data:
        return value
    keys = list(data) if isinstance(data, dict) else list(range(len(data)))
    key = keys[path[0] % len(keys)]
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[key] = replaced(data[key], path[1:], value)  # type: ignore[index]
    return copy


@examples(300)
@given(st.sampled_from(MESSAGES), st.lists(st.integers(0, 5), max_size=5), ANYTHING)
def test_damage_is_read_or_named(message: Any, path: list[int], value: Any) -> None:
    with contextlib.suppress(MessageError):
        decode(type(message), replaced(json.loads(dumps(message)), path, value))
