"""The state of a Work, and the counts, log, lock and streak of a comm: in C if it was built, else in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynccomm.core.native import CoreUnavailable, load

if TYPE_CHECKING:
    from asynccomm.core.python_state import (
        CallCounts,
        CallLog,
        DirectCaller,
        HeldCalls,
        ReentrantLock,
        Streak,
        WorkState,
        values_of,
    )
else:
    _state = load("asynccomm.core._work")
    if isinstance(_state, CoreUnavailable):
        from asynccomm.core import python_state as _state
    CallCounts, CallLog, ReentrantLock = _state.CallCounts, _state.CallLog, _state.ReentrantLock
    DirectCaller = _state.DirectCaller
    HeldCalls, Streak, WorkState, values_of = _state.HeldCalls, _state.Streak, _state.WorkState, _state.values_of

__all__ = ["CallCounts", "CallLog", "DirectCaller", "HeldCalls", "ReentrantLock", "Streak", "WorkState", "values_of"]
