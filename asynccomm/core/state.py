"""The state of a Work, the counts of a comm's calls, and the streak of awaits: in C if it was built, else in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynccomm.core.native import CoreUnavailable, load

if TYPE_CHECKING:
    from asynccomm.core.python_state import CallCounts, Streak, WorkState
else:
    _state = load("asynccomm.core._work")
    if isinstance(_state, CoreUnavailable):
        from asynccomm.core import python_state as _state
    CallCounts, Streak, WorkState = _state.CallCounts, _state.Streak, _state.WorkState

__all__ = ["CallCounts", "Streak", "WorkState"]
