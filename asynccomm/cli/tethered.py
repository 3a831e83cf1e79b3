"""The ``asynccomm`` command, which ends when its parent does.

Usage: ``python -m asynccomm.cli.tethered PARENT_PID FOLDER ...``.
FOLDER belongs to the parent, and is removed here if the parent has ended first.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys

from asynccomm.cli.main import main
from asynccomm.cli.processes import PR_SET_PDEATHSIG

if __name__ == "__main__":
    # SIGINT comes from the parent only, and may be ignored there: a shell without job control starts `command &` so
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    parent, folder = int(sys.argv[1]), sys.argv[2]
    try:
        if os.getppid() != parent:  # the parent died before the prctl
            sys.exit(128 + signal.SIGTERM)
        sys.exit(main(sys.argv[3:]))
    finally:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)
