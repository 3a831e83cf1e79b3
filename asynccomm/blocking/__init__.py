"""The bridge for programs without an event loop: comms with blocking methods.

::

    from asynccomm import blocking

    with blocking.new_comm() as comm:
        comm.all_reduce(tensor).wait()
        with comm.split([0, 1], "pair") as pair: ...

One event loop runs in a thread for all these comms. Calls and waits run on the caller's thread, so a small operation in
shared memory takes the same path as in a program with a loop, without a hand-over between threads.
"""

from asynccomm.blocking.comm import BlockingComm as BlockingComm
from asynccomm.blocking.comm import coalesce as coalesce
from asynccomm.blocking.comm import join_comm as join_comm
from asynccomm.blocking.comm import new_comm as new_comm
from asynccomm.blocking.comm import pair_comm as pair_comm
from asynccomm.blocking.events import BlockingEvents as BlockingEvents
from asynccomm.blocking.queue import BlockingQueue as BlockingQueue
from asynccomm.blocking.queue import attach_queue as attach_queue
from asynccomm.blocking.window import BlockingWindow as BlockingWindow

__all__ = [
    "BlockingComm",
    "BlockingEvents",
    "BlockingQueue",
    "BlockingWindow",
    "attach_queue",
    "coalesce",
    "join_comm",
    "new_comm",
    "pair_comm",
]
