"""What is said of the ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asynccomm.control.diagnosis import Diagnosis, PendingOp, RankState
from asynccomm.control.transport.schema import MessageError
from tests.cases import cases

BARRIER = {"op": "barrier()", "seq": 3, "age": 2.04, "site": "train.py:7 in step"}
ANSWER: dict[str, Any] = {
    "comm": "main",
    "rank": 1,
    "size": 2,
    "host": "node7",
    "pid": 4711,
    "state": "open",
    "collectives": 4,
    "messages": 2,
    "in_flight": 3,
    "pending": [{**BARRIER, "seq": 2}, BARRIER],
    "last": BARRIER,
    "blocked": False,
    "issued": 1,
    "stacks": "main thread:\n  here",
}


def state(**changes: Any) -> RankState:
    return RankState.from_answer(1, json.loads(json.dumps({**ANSWER, **changes})))


def test_everything_of_an_answer() -> None:
    found = state()
    assert (found.rank, found.answered, found.state, found.host, found.pid) == (1, True, "open", "node7", 4711)
    assert (found.collectives, found.messages, found.in_flight, found.issued) == (4, 2, 3, 1)
    assert found.last == PendingOp("barrier()", 3, 2.04, "train.py:7 in step")
    assert [one.seq for one in found.pending] == [2, 3]
    assert not found.blocked
    assert found.gone is None


def test_a_state_as_text() -> None:
    assert str(state()).splitlines() == [
        "rank 1 (process 4711 on node7) called last barrier() #3 2.0 s ago at train.py:7 in step",
        "    waits for barrier() #2 2.0 s ago at train.py:7 in step",
        "    waits for barrier() #3 2.0 s ago at train.py:7 in step",
        "    and for 1 more",
        "    | main thread:",
        "    |   here",
    ]


@cases(
    "found, text",
    [
        (state(pending=[], in_flight=0), "called last barrier() #3 2.0 s ago at train.py:7 in step, which is done"),
        (state(pending=[{**BARRIER, "op": "recv()"}], in_flight=1), "which is done"),  # messages have their own numbers
        (state(last=None), "has called nothing"),
        (state(last={**BARRIER, "seq": -1, "site": ""}, pending=[], in_flight=0), "barrier() 2.0 s ago, which is done"),
        (state(blocked=True), "; its event loop is blocked"),
        (state(state="broken: rank 3 was lost"), "is broken: rank 3 was lost; called last"),
        (RankState.from_answer(1, {}), "is closed; has called nothing"),
        (
            RankState.from_answer(1, {"problem": "ZeroDivisionError: no"}),
            "could not report its state: ZeroDivisionError: no",
        ),
        (RankState(1, False, silent=2.52), "does not answer: it was last heard 2.5 s ago; it is stopped, or"),
        (RankState(1, False), "does not answer; it is stopped, or something holds its interpreter lock"),
        (RankState(1, False, reachable=False), "has no control channel"),
        (RankState(1, False, gone="its process ended"), "is gone: its process ended"),
        (RankState(1, False, gone=""), "has left"),
    ],
)
def test_what_a_rank_is_doing(found: RankState, text: str) -> None:
    assert text in found.doing
    assert found.doing in str(found)


def test_a_last_call_beyond_the_listed_ones_is_not_called_done() -> None:
    found = state(pending=[{**BARRIER, "seq": 0}, {**BARRIER, "seq": 1}], in_flight=4)
    assert found.doing == "called last barrier() #3 2.0 s ago at train.py:7 in step"


@cases(
    "answer",
    [
        {"last": 3},
        {"pid": "x"},
        {"pending": 7},
        {"pending": [{}]},
        {"collectives": None},
        {"last": {"op": "x", "seq": 0}},
    ],
)
def test_nonsense_is_no_answer(answer: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        RankState.from_answer(1, {**ANSWER, **answer})


def test_the_whole_as_text() -> None:
    others = [
        RankState(0, True, collectives=5),
        state(),
        RankState(2, False, silent=1.0),
        RankState(3, True, gone="", collectives=5),
    ]
    found = Diagnosis("main", tuple(others))
    assert found.behind == (1, 2, 3)
    assert str(found).splitlines()[0] == "comm 'main', 4 ranks, 5 collectives issued; behind: ranks [1, 2, 3]"
    assert str(found) == "\n".join([str(found).splitlines()[0], *map(str, others)])


def test_nobody_is_behind() -> None:
    found = Diagnosis("main", (RankState(0, True, collectives=1), RankState(1, True, collectives=1)))
    assert found.behind == ()
    assert str(found).splitlines()[0] == "comm 'main', 2 ranks, 1 collectives issued"
