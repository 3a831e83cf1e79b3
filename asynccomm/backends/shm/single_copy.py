"""Whether single copy (``_single_copy.c``) is possible here: whether processes may read each other's memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_NUMBER: Final = 0x5EC4E7
_SECONDS: Final = 10.0

# run by a child: a process may read its descendants where it may not read others, but never so its parent
_READ: Final = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))
pid, address = map(int, sys.argv[1:])
number = ctypes.c_uint64(0)
here, there = Piece(ctypes.addressof(number), 8), Piece(address, 8)
one = ctypes.c_ulong(1)
read = ctypes.CDLL(None, use_errno=True).process_vm_readv
read(pid, ctypes.byref(here), one, ctypes.byref(there), one, ctypes.c_ulong(0))
print(number.value, os.strerror(ctypes.get_errno()))
"""


def refusal() -> str:
    """The reason why another process cannot read the memory of this one; empty if it can."""
    number = ctypes.c_uint64(_NUMBER)
    command = [sys.executable, "-ISc", _READ, str(os.getpid()), str(ctypes.addressof(number))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as exc:
        return f"no process could try it: {exc}"
    found, error = done.stdout.strip().split(" ", 1)
    if int(found) == _NUMBER:
        return ""
    try:
        scope = YAMA.read_text().strip()
    except OSError:
        return error
    return error if scope == "0" else f"{error}; {YAMA} is {scope}"
