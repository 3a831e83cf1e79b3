"""Whether a process may read the memory of another one that it has not started, as single copy does."""

from __future__ import annotations

import ctypes
import os

import pytest


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _parent_is_readable() -> bool:
    here, there = ctypes.c_uint64(0), ctypes.c_uint64(0x5EC4E7)
    read = ctypes.CDLL(None).process_vm_readv
    if not (child := os.fork()):
        pieces = [_Piece(ctypes.addressof(number), 8) for number in (here, there)]
        to, source = (ctypes.byref(piece) for piece in pieces)
        done = read(os.getppid(), to, ctypes.c_ulong(1), source, ctypes.c_ulong(1), ctypes.c_ulong(0))
        os._exit(0 if done == 8 and here.value == there.value else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


needs_reading = pytest.mark.skipif(
    not _parent_is_readable(),
    reason="processes may not read each other's memory here: /proc/sys/kernel/yama/ptrace_scope",
)
