"""A process that has imported everything, runs nothing, and forks a child for each rank of each case.

Importing torch costs seconds, forking from here some hundredths of one. That is safe because nothing was started here:
no thread, no event loop, no comm. A child makes its own, and may be killed at will.

``python -m tests.faults.forkserver FD``, with FD a socket that keeps messages apart. What comes is a pickled
:class:`.reports.Order` with two descriptors, where the child reports and where it prints; what goes back are ``Born``
and ``Ended``. The process ends with whoever started it, and its children with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import selectors
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Final

from .program import run_local, run_rank
from .reports import Born, Ended, Order
from .resource_limits import end_with_parent

MESSAGE_BYTES: Final = 1 << 16


def main() -> None:
    """Fork until the socket ends."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    end_with_parent()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"forking with {len(threads)} threads is not safe"
    parent.send(pickle.dumps("ready"))
    gc.freeze()  # children need not look at what all of them share
    ready = selectors.DefaultSelector()
    ready.register(parent, selectors.EVENT_READ)
    children: dict[int, tuple[int, int]] = {}  # number and pid, by descriptor
    while True:
        for key, _ in ready.select():
            if key.fileobj is parent:
                data, fds, _, _ = socket.recv_fds(parent, MESSAGE_BYTES, 2)
                if not data:
                    return
                order = pickle.loads(data)
                pid = os.fork()
                if pid == 0:
                    ready.close()
                    parent.close()
                    for watched in children:
                        os.close(watched)
                    _live(order, *fds)
                for fd in fds:
                    os.close(fd)
                watched = os.pidfd_open(pid)
                children[watched] = order.number, pid
                ready.register(watched, selectors.EVENT_READ)
                parent.send(pickle.dumps(Born(order.number, pid)))
            else:
                number, pid = children.pop(key.fd)
                ready.unregister(key.fd)
                os.close(key.fd)
                parent.send(pickle.dumps(Ended(number, os.waitpid(pid, 0)[1])))


def _live(order: Order, report: int, output: int) -> None:
    """Be a child; does not return."""
    status = 1
    try:
        end_with_parent()
        for fd in (1, 2):
            os.dup2(output, fd)
        os.close(output)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        os.environ.update(order.environment)
        channel = Connection(report)
        if order.rank < 0:
            run_local(order.case, channel.send)
        else:
            run_rank(order.case, order.rank, channel.send)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
