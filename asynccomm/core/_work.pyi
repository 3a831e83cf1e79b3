"""The state of a Work, the counts of a comm's calls, and the streak of awaits, in C: see ``python_state``."""

from asynccomm.core.python_state import CallCounts as CallCounts
from asynccomm.core.python_state import Streak as Streak
from asynccomm.core.python_state import WorkState as WorkState
