"""What is passed around and never copied, and what is."""

from __future__ import annotations

import copy
import pickle
import re
from inspect import isclass
from types import ModuleType
from typing import Any

import pytest

import asynccomm
from asynccomm.backends.loopback import Hub
from asynccomm.comm.pending import PendingComm
from asynccomm.compat import c10d
from asynccomm.core.handles import Handle
from asynccomm.interop.wrapped_work import WrappedWork
from tests.cases import cases

# What the packages export, that is data: copies are equal, and have nothing in common with what they are copies of.
VALUES = {"CommOptions", "CommStatistics", "Diagnosis", "PendingOp", "QueueStatistics", "RankState"}
VALUES |= {"Dispatched", "RedOpType", "ReduceOp", "Routing", "SignalCmpOp"}
VALUES_OF_C10D = {"Backend", "BackendConfig", "GroupMember", "P2POp", "group"}  # two are namespaces


class Line(Handle):
    """Stands for a connection."""

    _instead = "dial again"

    def __repr__(self) -> str:
        return "<Line 5>"


def classes_of(module: ModuleType) -> dict[str, type[Any]]:
    """Ours, and no errors, which survive pickle."""
    found = {
        name: getattr(module, name) for name in module.__all__ if name != "reduce_op"
    }  # which warns when looked at
    return {
        name: value
        for name, value in found.items()
        if isclass(value) and value.__module__.startswith("asynccomm") and not issubclass(value, BaseException)
    }


def test_copies_are_the_handle_itself_wherever_it_is() -> None:
    line = Line()
    assert copy.copy(line) is line
    assert copy.deepcopy(line) is line
    held = copy.deepcopy({"lines": [line, line], "numbers": [1]})
    assert held["lines"] == [line, line]


@cases("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_handle_is_not_pickled_and_says_what_to_do(protocol: int) -> None:
    with pytest.raises(TypeError, match=re.escape("<Line 5> cannot be pickled, as it belongs to this process: dial")):
        pickle.dumps([Line()], protocol)


def test_what_is_exported_is_a_handle_or_a_value() -> None:
    found = classes_of(asynccomm)
    assert {name for name, kind in found.items() if not issubclass(kind, Handle)} == VALUES
    of_c10d = classes_of(c10d)
    assert {name for name, kind in of_c10d.items() if not issubclass(kind, Handle)} == VALUES_OF_C10D
    assert {"CoalesceScope", "BatchSendRecv", "Comm", "Estimate", "Sink", "Store", "Stream", "Work"} <= found.keys()


@cases("kind", [*classes_of(asynccomm).values(), *classes_of(c10d).values(), PendingComm, Hub, WrappedWork])
def test_a_handle_says_what_to_do_instead(kind: type[Any]) -> None:
    if issubclass(kind, Handle):
        assert kind._instead
