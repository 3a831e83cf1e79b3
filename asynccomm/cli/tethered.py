"""The ``asynccomm`` command, which ends when its parent does: ``python -m asynccomm.cli.tethered PARENT_PID ...``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from asynccomm.cli.main import main
from asynccomm.cli.processes import PR_SET_PDEATHSIG

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):  # the parent died before the prctl
        sys.exit(128 + signal.SIGTERM)
    sys.exit(main(sys.argv[2:]))
