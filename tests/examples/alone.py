"""An example as the only rank of a run, without the launcher, whose start takes longer than such a rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start_alone(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """``script`` is below ``examples``."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.run(
        [sys.executable, f"examples/{script}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
