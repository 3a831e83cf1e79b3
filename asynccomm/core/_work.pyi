"""The objects of ``python_state`` in C."""

from asynccomm.core.python_state import CallCounts as CallCounts
from asynccomm.core.python_state import CallLog as CallLog
from asynccomm.core.python_state import DirectCaller as DirectCaller
from asynccomm.core.python_state import HeldCalls as HeldCalls
from asynccomm.core.python_state import ReentrantLock as ReentrantLock
from asynccomm.core.python_state import Streak as Streak
from asynccomm.core.python_state import WorkState as WorkState
from asynccomm.core.python_state import values_of as values_of
